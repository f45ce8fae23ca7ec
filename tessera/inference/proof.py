"""Prove that Tessera and `transformers` or `diffusers` compute the same from an exported folder.

Each side loads the folder by its own code (weights, configuration, tokenizer, chat template, preprocessor) and computes
the outputs of a small input in float32. The allowed difference is derived from the effect of rounding: the outputs are
computed again with every weight changed by one float32 rounding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, LOGITS, REWARDS
from tessera.core.sample import Message, Part, Sample
from tessera.core.spec import ModelSpec
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, MediaSampling, read_media
from tessera.diffusion.batches import pack
from tessera.diffusion.config import DiffusersConfig
from tessera.diffusion.family import GenerationFamily, GenerationSpec
from tessera.diffusion.given_images import from_tokens
from tessera.diffusion.samples import EncodedMedia
from tessera.errors import TesseraError, few_names, first_line, nearest
from tessera.inference.reference import DiffusersModel, StockModel, TransformersReference, UnreadableError
from tessera.inference.weight_source import allocated
from tessera.models import build_on_meta, folder_config
from tessera.models.files.exported_config import config_differences
from tessera.models.transformers import ClassProcessor
from tessera.runtime import device as devices
from tessera.runtime.collective import Ranks
from tessera.runtime.progress import human_bytes
from tessera.weights.layouts import CLASS_NAME, folder_layout

Prove = Literal["auto", "always", "never"]
AUTO_BYTES = 4 << 30  # prove=auto does not compare more bytes of float32 weights: it takes minutes
_SHARE = 4  # prove=auto uses at most 1/4 of the free memory
# The outputs may differ by this multiple of the change that results if every weight is rounded once.
_ROUNDINGS = 8.0
_TEXT = "What is this? Say red, 12 or tall."
_TOKENS = 16
_SECONDS = 1.0  # length of the recording for the comparison, in seconds
_SCALARS = {"guidance": 3.5}  # model inputs with one value per sample
_TIME = 500.0  # timestep; 500 and 500/1000 are exact in float32


@dataclass(frozen=True)
class Proof:
    """Hold the result of a comparison."""

    line: str  # what was compared, or why nothing was compared
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # problems that do not concern the weights
    obstacle: str | None = None  # why a comparison was impossible, if the folder is not the reason


def check_choice(when: str) -> None:
    """Raise if `when` is not a value of `prove`."""
    if when not in get_args(Prove):
        near = nearest(when, get_args(Prove))
        raise TesseraError(
            f"unknown value of prove: {when!r}",
            where="--prove",
            allowed=get_args(Prove),
            nearest=near,
            code="output.unknown-prove-choice",
        )


def prove_folder(folder: Path, spec: ModelSpec, config: Any, when: Prove = "auto") -> Proof:
    """Compare a folder's config.json with the trained `config`, and outputs of the model with another library.

    The library is transformers (logits) or diffusers (latents). One rank calls this. `when` "auto": skip the library if
    it is not installed, if it has no class for the model, or if the comparison would take long or much memory; errors
    of the comparison (a package that the library needs, a chat template that refuses the messages) are warnings.
    "always": raise instead. "never": compare nothing.
    """
    library = "diffusers" if CLASS_NAME in folder_layout(folder).config() else "transformers"
    untrue = () if when == "never" else tuple(_untrue_fields(folder, spec, config))
    if untrue:
        return Proof("config.json compared with the trained model", untrue)
    reason = "prove=never" if when == "never" else _obstacle(folder, spec, config, when)
    if reason is not None:
        if when == "always":
            raise TesseraError(
                f"the folder cannot be compared: {reason}",
                where=str(folder),
                fix="leave prove out; the default is auto",
                code="output.nothing-to-prove",
            )
        return Proof(f"not compared with {library}: {reason}")
    try:
        return (_compare_latents if library == "diffusers" else _compare_logits)(folder, spec, config)
    except Exception as error:  # code of the library, of a chat template or of a codec may raise any exception
        if isinstance(error.__cause__, RuntimeError):  # the weights do not fit the class: the folder is wrong
            return Proof(f"compared with {library}", (first_line(error),))
        if when == "always":
            raise
        line = f"not compared with {library}: {first_line(error)}"
        warning = f"the export was {line}"
        unreadable = isinstance(error, UnreadableError)
        return Proof(line, warnings=(warning,)) if unreadable else Proof(line, obstacle=warning)


def _untrue_fields(folder: Path, spec: ModelSpec, config: Any) -> list[str]:
    """Return descriptions of the fields of a folder's config.json that contradict the trained `config`."""
    if not spec.hf_types:  # a class of the user or of transformers: it has no config of Tessera to compare
        return []
    # `folder_config` also works for a family of the user, which is not in the table of families.
    stored = folder_config(spec, folder)
    trained = config.model_dump(mode="json")
    return [
        f"config.json: {difference}"
        for difference in config_differences(stored.model_dump(mode="json"), trained, "training")
    ]


def _compare_latents(folder: Path, spec: ModelSpec, config: Any) -> Proof:
    """Compare the predictions of Tessera and diffusers for a small sample of random latents and embeddings."""
    family = config.generation()
    batch = generation_batch(spec, config, family)
    latents = from_tokens(batch["latents"], family.patch, config.proof_grid())
    ours, moved = OurModel(folder, spec, config).results(batch)
    stock = DiffusersModel(folder)
    if stock.missing:  # diffusers leaves weights without a tensor on the meta device, so its model cannot compute
        return Proof("compared with diffusers", (f"diffusers finds no tensor for {few_names(stock.missing)}",))
    expected = config.diffusers_tokens(stock.predict(config.diffusers_inputs(batch, latents)))
    return _judged("diffusers", "latents", stock, (ours, moved, expected), f"{len(ours)} tokens")


def generation_batch(spec: ModelSpec, config: Any, family: GenerationFamily) -> Batch:
    """Return a batch with one sample of random latents and embeddings, in the sizes of the family."""
    assert spec.example is not None
    grid = config.proof_grid()
    words = max(reader.embeddings(reader.skip + _TOKENS) for reader in family.captions)
    example = spec.example(config, _TOKENS).tensors
    lengths = {"text": words, "latents": prod(grid)}
    chance = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {
        name: torch.randn(lengths.get(name, len(example[name])), example[name].shape[1], generator=chance)
        for name in ("text", "pooled", "image_embeds", "latents")
        if name in example
    }
    latents, text = drawn.pop("latents"), words if family.joint else 0
    batch = pack(family, [EncodedMedia("proof", len(latents) + text, grid, text, drawn)])
    more = {name: example[name] + value for name, value in _SCALARS.items() if name in example}
    return batch.with_tensors(latents=latents, timesteps=torch.tensor([_TIME]), **more)


def _compare_logits(folder: Path, spec: ModelSpec, config: Any) -> Proof:
    ours = OurModel(folder, spec, config)
    if spec.stock_inputs is not None:
        batch = ours.example()
        logits, moved = ours.results(batch)
        stock = StockModel(folder)
        parts = _missing_parts(stock, spec, config)
        results = logits, moved, stock.logits(spec.stock_inputs(batch, stock.model))
        return _judged("transformers", "logits", stock, results, f"{len(tokens_of(batch))} tokens", parts)
    media = ours.media()
    messages = proof_messages(media)
    warnings: list[str] = []
    batch = ours.example() if ours.processor is None else ours.prompt(messages)
    logits, moved = ours.results(batch)
    inputs: dict[str, Any] = {"input_ids": tokens_of(batch)[None]}
    stock = StockModel(folder) if ours.processor is None else TransformersReference(folder)
    if isinstance(stock, TransformersReference):
        theirs = stock.inputs(messages, [part.value for part in media])
        difference = other_prompt(theirs["input_ids"][0].tolist(), tokens_of(batch).tolist())
        if difference is None:
            inputs = theirs
        else:  # tokens differ: compare with Tessera's tokens, without media
            warnings.append(difference)
            batch = ours.prompt(proof_messages([]))
            inputs["input_ids"] = tokens_of(batch)[None]
            logits, moved = OurModel(folder, spec, config).results(batch)
    expected = stock.logits(inputs)
    inputs_text = f"{len(tokens_of(batch))} tokens"
    inputs_text += " with an image" if any("pixel" in name for name in inputs) else ""
    inputs_text += " with a recording" if "input_features" in inputs else ""
    proof = _judged("transformers", "logits", stock, (logits, moved, expected), inputs_text, tuple(warnings))
    if not spec.foreign:
        return proof
    return replace(proof, line=f"{proof.line}; Tessera computes with the same class, not with a family of its own")


def _missing_parts(stock: StockModel, spec: ModelSpec, config: Any) -> tuple[str, ...]:
    """Return a warning if the folder lacks other parts of the model; their tensors do not count as missing."""
    weights = spec.main.weight_map(config)
    others = () if weights is None else weights.other_parts
    lost = [name for name in stock.missing if name.startswith(others)]
    stock.missing = [name for name in stock.missing if name not in lost]
    if not lost:
        return ()
    parts = ", ".join(part.rstrip(".") for part in others)
    return (f"the folder has no weights of {parts}: set model.path to a folder that has them before training",)


def _judged(
    library: str,
    what: str,
    stock: StockModel | DiffusersModel,
    results: tuple[Tensor, Tensor, Tensor],
    inputs_text: str,
    warnings: tuple[str, ...] = (),
) -> Proof:
    """Compare the outputs of Tessera and of the library. The tolerance is the effect of rounding the weights."""
    ours, moved, expected = results
    problems = [f"{library} finds no tensor for {few_names(stock.missing)}"] if stock.missing else []
    problems += [f"{library} has no use for {few_names(stock.unexpected)}"] if stock.unexpected else []
    if ours.shape != expected.shape:
        problems.append(f"{what} are {list(ours.shape)} here and {list(expected.shape)} in {library}")
        return Proof(f"compared with {library}", tuple(problems), warnings)
    rounding = torch.finfo(torch.float32).eps * float(expected.abs().max())
    apart, limit = float((ours - expected).abs().max()), _ROUNDINGS * (float((moved - ours).abs().max()) + rounding)
    if not apart <= limit:
        problems.append(f"{what} differ by {apart:.3g} from those of {library}; rounding explains {limit:.3g}")
    line = (
        f"{library} computes the same {what} ({inputs_text}): at most {apart:.2g} apart, rounding explains {limit:.2g}"
    )
    return Proof(line if not problems else f"compared with {library}", tuple(problems), warnings)


def _obstacle(folder: Path, spec: ModelSpec, config: Any, when: Prove) -> str | None:
    """Return why a folder cannot be compared; None if it can."""
    data = folder_layout(folder).config()
    if CLASS_NAME in data:
        return _no_diffusers(folder, spec) or _too_large(folder, when)
    if spec.gives(REWARDS):
        return "a reward model has no token logits"
    foreign = spec.foreign
    if not foreign and str(data.get("model_type")) not in spec.hf_types:
        return f"the family {spec.name} does not list the model_type of this folder (ModelSpec.hf_types)"
    if not foreign and spec.example is None:
        return f"the family {spec.name} has no example batch (ModelSpec.example)"
    if "quantization_config" in data:
        return "transformers computes with quantized weights in another way"
    if importlib.util.find_spec("transformers") is None:
        return "the library is not installed (pip install tessera-mm[hf])"
    if (kind := StockModel.class_of(folder)) is None:
        return f"transformers has no class {data.get('architectures')}"
    if not foreign and not kind.can_generate():
        return f"the family {spec.name} does not implement the class {kind.__name__}"
    if spec.processor is not None and _encoders(spec, config) and not (folder / "tokenizer.json").is_file():
        return "the folder has no tokenizer"
    if foreign and kind.can_generate() and (reason := _no_conversations(folder, spec, config)) is not None:
        return reason
    return _too_large(folder, when)


def _no_diffusers(folder: Path, spec: ModelSpec) -> str | None:
    """Return why a diffusers folder cannot be compared; None if it can."""
    if not isinstance(spec, GenerationSpec) or spec.example is None or not issubclass(spec.config, DiffusersConfig):
        return f"Tessera has no built-in model for this folder (family {spec.name})"
    if importlib.util.find_spec("diffusers") is None:
        return "the library is not installed (pip install tessera-mm[hf])"
    return (
        None if DiffusersModel.class_of(folder) is not None else "diffusers has no class with the name in config.json"
    )


def _too_large(folder: Path, when: Prove) -> str | None:
    """Return why the model is too large to compare; None if it is not."""
    with FolderTensors(folder) as stored:
        size = 4 * sum(prod(shape) for shape in stored.shapes.values())
    free = devices.free_memory(torch.device("cpu"))
    if when == "auto" and size > min(AUTO_BYTES, free // _SHARE):
        return (
            f"the weights are {human_bytes(size)} in float32, and `auto` allows {human_bytes(AUTO_BYTES)} and a "
            f"quarter of the free memory ({human_bytes(free)}); `tessera compare FOLDER --prove always` does it"
        )
    return None


class OurModel:
    """Hold Tessera's model of a folder, in float32 on the CPU, and its processor."""

    def __init__(self, folder: Path, spec: ModelSpec, config: Any) -> None:
        meta = build_on_meta(spec, config)
        weights = spec.main.weight_map(config)
        assert weights is not None, "a family that reads folders has a weight map"
        names, tied = list(model_tensors(meta)), tied_names(meta)
        module = allocated(meta, torch.device("cpu"), torch.float32)
        self.module: nn.Module | None = module
        try:
            load_folder(folder, model_tensors(module), weights, tied=tied, expected=names, ranks=Ranks(0, 1))
        except TesseraError as error:
            raise UnreadableError(error.what, where=error.where, fix=error.fix, code=error.code) from error
        self._spec, self._config = spec, config
        talks = not spec.foreign or module.can_generate()  # type: ignore[operator]  # of a class of transformers
        reads = talks and spec.processor is not None and (folder / "tokenizer.json").is_file()
        processor = spec.processor(config, folder) if reads and spec.processor is not None else None
        self.processor = processor if isinstance(processor, ChatProcessor) else None

    def media(self) -> list[Part]:
        """Return an image, a recording, both or none: inputs that the model supports."""
        processor = self.processor
        if processor is None:
            return []
        encoders = _encoders(self._spec, self._config)
        if isinstance(processor, ClassProcessor):
            encoders = ("vision",) if processor.sees else ()
        parts: list[Part] = []
        if "vision" in encoders:
            rows, columns = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
            colours = torch.stack([5 * rows, 3 * columns, (rows * columns) % 251], dim=-1)
            parts.append(Part("image", Image.fromarray(colours.to(torch.uint8).numpy())))
        if "audio" in encoders and isinstance(processor.sampling, MediaSampling):
            audio = processor.sampling.audio
            seconds = torch.arange(round(audio.rate * min(_SECONDS, audio.max_seconds))) / audio.rate
            parts.append(Part("audio", (seconds * 1500).sin().mul(seconds.sin()).numpy()))
        return parts

    def prompt(self, messages: tuple[Message, ...]) -> Batch:
        assert self.processor is not None
        sample = Sample("proof", messages)
        media, sizes = read_media(sample, Path(), Limits(jpeg_draft=False), self.processor)
        return self.processor.prompt([sample], [media], [sizes])

    def example(self) -> Batch:
        """Return a batch of tokens spread over the vocabulary, for a folder without a tokenizer."""
        if self._spec.foreign:  # classes of transformers take input_ids
            words = self.module.get_input_embeddings().weight  # type: ignore[union-attr, operator]
            return Batch({"input_ids": _spread(len(words))[None]})
        assert self._spec.example is not None
        batch = self._spec.example(self._config, _TOKENS)
        batch["tokens"].copy_(_spread(self._config.text.vocab_size))
        return batch

    @torch.no_grad()
    def results(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits or latents, and the same outputs after every weight was changed by one rounding, up or down.

        The model is freed afterwards: the other library needs the memory.
        """
        module, self.module = self.module, None
        assert module is not None, "it computes once"
        result = self._forward(module, batch)
        chance = torch.Generator().manual_seed(0)
        for weight in module.parameters():
            signs = torch.randint(0, 2, weight.shape, generator=chance).to(weight) * 2 - 1
            weight.addcmul_(weight, signs, value=torch.finfo(weight.dtype).eps)
        return result, self._forward(module, batch)

    def _forward(self, module: nn.Module, batch: Batch) -> Tensor:
        if isinstance(self._spec, GenerationSpec):
            latents: Tensor = module(batch)[LATENTS]
            return latents
        logits: Tensor = module(batch)[LOGITS][0] if "input_ids" in batch else module(batch, logits=True)[LOGITS]
        return logits


def _spread(vocabulary: int) -> Tensor:
    return torch.arange(_TOKENS) * (vocabulary // _TOKENS) % vocabulary


def tokens_of(batch: Batch) -> Tensor:
    """Return the tokens of a prompt as one dimension."""
    return batch["input_ids"][0] if "input_ids" in batch else batch["tokens"]


def _no_conversations(folder: Path, spec: ModelSpec, config: Any) -> str | None:
    """Return why a class of transformers does not accept a conversation as prompt; None if it does."""
    processor = None if spec.processor is None else spec.processor(config, folder)
    if not isinstance(processor, ClassProcessor):
        return f"the family {spec.name} has no conversations"
    try:
        processor.library.check()
    except TesseraError as error:
        return error.what
    return None


def _encoders(spec: ModelSpec, config: Any) -> tuple[str, ...]:
    """Return the names of the encoders' streams: vision, audio."""
    return tuple(spec.main.plan(config).encoders)


def proof_messages(media: Sequence[Part]) -> tuple[Message, ...]:
    return (Message("user", (*media, Part("text", _TEXT))),)


def other_prompt(theirs: list[int], ours: list[int]) -> str | None:
    if theirs == ours:
        return None
    at = next((n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    return (
        f"the folder's chat template gives other tokens in transformers than here, from position {at} on: "
        f"{theirs[at : at + 8]} there, {ours[at : at + 8]} here"
    )
