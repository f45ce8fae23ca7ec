"""`load`: from whatever holds a model (Hugging Face folder, run, checkpoint) to a model that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.checkpoint.examine import check_fit, check_numbers
from tessera.checkpoint.hf import stored_dtype
from tessera.checkpoint.model_state import model_tensors, tied_names
from tessera.checkpoint.origin import fill_from, origin_of
from tessera.checkpoint.peft import base_of, fill_adapters, settled
from tessera.checkpoint.run_files import saved_config
from tessera.core import device as devices
from tessera.core.adapters import Adapter, Adapters, is_factor
from tessera.core.config import Section, build, read_mapping
from tessera.core.dist import environment_ranks, rank_on_machine
from tessera.core.errors import TesseraError, nearest
from tessera.core.meta import computed_buffers, put_back_buffers
from tessera.core.run_config import ModelSection, RunConfig, load_config
from tessera.core.trust import Trust, check_trusted, find_code, model_code
from tessera.core.types import Batch, ModelSpec, Processor, Sample
from tessera.data.media.images import Limits
from tessera.data.media.read import read_media
from tessera.data.processor import ChatProcessor
from tessera.data.side_files import side_folder
from tessera.infer.generate import generate
from tessera.infer.messages import conversations, sample_of
from tessera.infer.over_ranks import over_ranks
from tessera.infer.sampling import Sampling
from tessera.infer.stream import TextStream
from tessera.models import build_on_meta, read_folder_config, resolve
from tessera.nn.lora import add_adapters, find_adapters, with_adapters
from tessera.parallel.memory.materialize import allocate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RUN_CONFIG = "config.yaml"


class LoadedModel(nn.Module):
    """A model with what it needs to answer in words. `module` is the plain torch module."""

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        config: Section,
        processor: Processor | None,
        run: Callable[..., Any] | None = None,
        adapters: Adapters | None = None,
        base: Path | None = None,
        files: Path | None = None,
    ) -> None:
        """`run`: what is called in the place of a module that lies on several ranks. `base`: the folder of the model
        that adapters belong to, as far as it is known. `files`: where tokenizer, template and so on lie."""
        super().__init__()
        self.adapters = adapters or {}
        self.base = base
        self.files = files
        self.module = module
        self._run: Any = module if run is None else run
        self.spec = spec
        self.config = config
        self._processor = processor

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def forward(self, batch: Batch, logits: bool = True) -> Any:
        # What to leave out is a question to our own language models; other classes give what they give.
        asked = {"logits": logits} if self.spec.task == "language" else {}
        return self._run(batch.to(self.device), **asked)

    def generate(
        self,
        batch: Batch,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> str | list[str]:
        """The answer to a prompt, or a list of answers to several. `on_text` gets a single answer as it grows."""
        processor = _needed(self._processor, self.spec)
        rows = batch.segments["text"].bounds.numel() - 1
        stream = None if on_text is None else TextStream(processor.decode, on_text)
        if stream is not None and rows != 1:
            raise TesseraError(f"on_text follows one answer, the batch asks for {rows}", fix="ask one at a time")
        answers = generate(
            self._run,
            batch.to(self.device),
            max_new_tokens=max_new_tokens,
            stop_tokens=processor.stop_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            on_token=None if stream is None else stream.add,
        )
        if stream is not None:
            stream.close()
        texts = [processor.decode(tokens) for tokens in answers]
        return texts[0] if rows == 1 else texts


@dataclass(frozen=True)
class LoadedProcessor:
    """Chat messages, or samples of a data set -> a batch to generate from."""

    processor: Processor | None
    spec: ModelSpec
    limits: Limits

    def __call__(self, messages: Sequence[Any], root: str | Path | None = None) -> Batch:
        """One conversation or a list of them, each a list of {role, content}; pictures as paths, PIL images or bytes,
        clips as paths, bytes or arrays of frames.

        Relative paths start at `root`, or at the working folder.
        """
        base = Path.cwd() if root is None else Path(root)
        samples = [sample_of(talk, str(number), base) for number, talk in enumerate(conversations(messages))]
        return self.prompt([(sample, Path(base.anchor or "/")) for sample in samples])

    def prompt(self, samples: Sequence[tuple[Sample, Path]]) -> Batch:
        """Samples of data sets with the roots their media must lie under."""
        processor = _needed(self.processor, self.spec)
        if not isinstance(processor, ChatProcessor):  # it says itself why it makes no prompts
            return processor.prompt([sample for sample, _ in samples], [[] for _ in samples])
        read = [read_media(sample, root, self.limits, processor) for sample, root in samples]
        return processor.prompt(
            [sample for sample, _ in samples], [media for media, _ in read], [sizes for _, sizes in read]
        )


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    parallel: Mapping[str, Any] | None = None,
    trust: Trust = False,
) -> tuple[LoadedModel, LoadedProcessor]:
    """The family is found from the folder. `device` "auto": an accelerator if there is one. `dtype` None: as stored.

    `parallel`: a layout as in a recipe ({"tp": 2, "pp": 2}), for a model that one device does not hold. Every rank of a
    process group calls this, and then everything else, together and with the same questions; all get the answers.

    `trust`: a run that you did not make may name code to import and call; True says that you trust it.
    """
    folder = Path(path)
    where = device if isinstance(device, torch.device) else _own_device(device or "auto", parallel is not None)
    kind = _dtype(dtype)
    origin = origin_of(folder)
    if origin in ("folder", "adapters"):
        base = folder if origin == "folder" else base_of(folder)
        lora = None if origin == "folder" else {"path": folder}
        section = build(ModelSection, {"path": base, "lora": lora}, str(folder))
        check_numbers(read_folder_config(base), base)
        kind = kind or stored_dtype(base)
        files: Path | None = base
        options: dict[str, Any] = {}
        limits = Limits()
    else:
        kept = saved_config(folder) if origin == "run" else None  # the shape is that of the newest checkpoint
        settings = load_config(kept or read_mapping(folder / RUN_CONFIG))
        check_trusted(folder, model_code(settings.model), trust)
        find_code(folder, model_code(settings.model))
        section, options = settings.model, settings.data.processor
        kind = kind or DTYPES[section.dtype]
        files = _processor_folder(folder if origin == "run" else folder.parent.parent, settings)
        limits = Limits(max_image_pixels=settings.data.max_image_pixels, draft=settings.data.draft)
    spec, config = resolve(section)
    whole = build_on_meta(spec, config)
    weights = None if spec.weights is None else spec.weights(config)
    adapters: dict[str, Adapter] = {}
    names, tied = list(model_tensors(whole)), tied_names(whole)
    if origin in ("folder", "adapters") and weights is not None:
        check_fit(base, model_tensors(whole), weights, tied=tied)
    if section.lora is not None:
        adapters = find_adapters(settled(section.lora, names, weights), whole, spec.plan(config))
        add_adapters(whole, adapters, quantized=section.lora.quantize is not None)
    run: Callable[..., Any] | None = None
    if parallel is None:
        module = _allocated(whole, where, kind)
    else:
        plan = spec.plan(config)
        module, run = over_ranks(whole, with_adapters(plan) if adapters else plan, parallel, where, kind)
    tensors = model_tensors(module)
    if origin == "adapters":
        assert section.path is not None
        fill_from(section.path, {n: t for n, t in tensors.items() if not is_factor(n)}, weights, tied, names)
        fill_adapters(folder, tensors, adapters, names, weights)
    else:
        fill_from(folder, tensors, weights, tied, names)
    processor = None if spec.processor is None or files is None else spec.processor(config, files, **options)
    loaded = LoadedModel(module, spec, config, processor, run, adapters, section.path, files)
    return loaded, LoadedProcessor(processor, spec, limits)


def _own_device(name: str, with_others: bool) -> torch.device:
    """Of several ranks each has its own; one that loads for itself may not wait for the others to count them."""
    if name == "cpu" or not dist.is_initialized():
        return devices.resolve(name)
    return devices.resolve_shared(name, rank_on_machine() if with_others else environment_ranks()[2])


def _processor_folder(run: Path, settings: RunConfig) -> Path | None:
    """A run keeps its processor's files; a checkpoint moved away from its run still knows where they came from."""
    kept = run / "processor"
    return kept if kept.is_dir() else settings.model.tokenizer or side_folder(settings.model.path)


def _allocated(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    buffers = computed_buffers(module)
    allocate(module.to(dtype), device)
    put_back_buffers(module, buffers)
    return module.eval()


def _needed(processor: Processor | None, spec: ModelSpec) -> Processor:
    if processor is None:
        raise TesseraError(
            f"no processor for this {spec.name} model: words cannot be made into tokens",
            fix="put tokenizer.json and the preprocessor files beside the weights, or in the run's `processor` folder",
        )
    return processor


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise TesseraError(f"unknown dtype {dtype!r}", where="dtype", allowed=DTYPES, nearest=nearest(dtype, DTYPES))
    return DTYPES[dtype]
