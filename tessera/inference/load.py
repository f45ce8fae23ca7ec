"""Load a model and its processor from a Hugging Face folder, a run, a checkpoint or adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.checkpoint.forms import check_folder_fit, fill_tensors, native_shapes
from tessera.checkpoint.legacy.forms import open_form
from tessera.checkpoint.state import model_tensors, tied_names
from tessera.config.reader import build
from tessera.config.run_config import ModelSection, ParallelSection, PrecisionSection, load_config
from tessera.config.saved_recipe import read_saved
from tessera.config.trust import Trust
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import ModelSpec, Processor
from tessera.data.media.files import Limits
from tessera.diffusion.family import GenerationFamily, family_of
from tessera.diffusion.sampling.over_ranks import ModelOverRanks
from tessera.errors import TesseraError, few_names, nearest
from tessera.hub.config import local_model
from tessera.inference.chat import Chat
from tessera.inference.found_model import FoundModel, find_model
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.sampling_options import sampling_of
from tessera.inference.weight_source import CONFIG, allocated, fill_from, newest_names, origin_of, saved_config
from tessera.lora.exchange import is_adapters
from tessera.lora.load import fill_adapters, merge_into, part_of, settled, targets_origin
from tessera.lora.modules import add_adapters, find_adapters, trained_in_full, with_adapters
from tessera.lora.select import Adapter, is_factor
from tessera.models import build_on_meta, fresh_names, resolve
from tessera.models.foreign import Arguments, takes_batch
from tessera.models.module import MODEL_TYPE, spec_of_object
from tessera.models.processing.conversation import warn_of_another_template
from tessera.models.processing.transcription import Transcriber, transcript, transcription_instruction
from tessera.parallel.apply import parallelize
from tessera.parallel.make_plan import make_plan
from tessera.parallel.mesh import CONTEXT, Mesh
from tessera.parallel.pipeline_stages import LocalStages, PipelinedModel
from tessera.parallel.plan import Workload
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks, rank_on_machine
from tessera.weights.layouts import detect_layout
from tessera.weights.map import WeightMap

AdapterPaths = str | Path | Sequence[str | Path] | Mapping[str, float] | Mapping[Path, float]


def load(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    model: nn.Module | None = None,
    adapters: AdapterPaths | None = None,
    base: str | Path | None = None,
    family: str | None = None,
    shards: str | Path | None = None,
    parallel: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
    trust: Trust = False,
) -> tuple[LoadedModel, LoadedProcessor]:
    """Load a model and its processor.

    `device` "auto": an accelerator if there is one. `dtype` None: as stored.

    `model`: your own module, for a run of `tessera.train(..., model=net)`. The trained weights are copied into it, with
    its device and dtype. The returned model wraps it as `module`.

    `adapters`: LoRA files or PEFT folders to merge into the weights: one path, a list, or {path: strength}.

    `base`: folder of the base model, if `path` contains adapters that do not name it.

    `family`: as `model.family` of a recipe, such as the import path of a family of your own. None: the family that
    reads the folder.

    `shards`: a torch DCP folder, or a folder with one weight file per rank. Its weights replace those in the Hugging
    Face folder `path`.

    `parallel`: a layout as in a recipe ({"tp": 2, "pp": 2}), for a model that does not fit into one device. All ranks
    of the process group must call this function and the methods of the model together, with the same arguments. All
    ranks get the results.

    `processor`: options as in `data.processor` of a recipe ({"max_pixels": 262144}), which replace the stored options.

    `trust`: True permits importing and calling code that a run names. Only use it for runs that you trust.
    """
    folder = local_model(path)
    if model is not None:
        unused = {"adapters": adapters, "base": base, "shards": shards, "parallel": parallel, "processor": processor}
        _refuse_beside_module({**unused, "device": device, "dtype": dtype, "family": family})
        return _filled(folder, model)
    check_class_known(folder)
    where = device if isinstance(device, torch.device) else _own_device(device or "auto", parallel is not None)
    source = find_model(folder, dtype, trust, None if base is None else local_model(base, "base"), family)
    section, files = source.section, source.files
    merged = adapter_strengths(adapters)
    if merged:
        _check_mergeable(section, folder)
    meta = _MetaModel.of(source)
    if source.origin in ("folder", "adapters") and meta.weights is not None and shards is None:
        assert section.path is not None
        stored = {name: tensor for name, tensor in model_tensors(meta.module).items() if name not in meta.fresh}
        check_folder_fit(section.path, stored, meta.weights, tied=meta.tied)
    trained, saved = chosen_adapters(section, meta.spec, meta.config, meta.module)
    if section.lora is not None:
        add_adapters(meta.module, trained, quantize=section.lora.quantize)
    spec, plan = meta.spec, meta.spec.main.plan(meta.config)
    run: Callable[..., Any] | None = None
    if parallel is None:
        module = allocated(meta.module, where, source.dtype, plan.float32)
    else:
        plan, generation = with_adapters(plan) if trained else plan, family_of(spec, meta.config)
        module, run = _over_ranks(meta.module, plan, parallel, where, source.dtype, generation)
    tensors = model_tensors(module)
    _fill_weights(folder, source, meta, tensors, trained, None if shards is None else Path(shards))
    for path_of_adapters, strength in merged.items():
        merge_into(path_of_adapters, strength, tensors, meta.names, meta.weights, part_of(section.path))
    prepare = _processor_of(source, spec, meta.config, processor)
    if source.origin not in ("run", "checkpoint"):  # runs always use the built-in chat template
        warn_of_another_template(prepare, files)
    loaded = LoadedModel(module, spec, meta.config, prepare, run, trained, section.path, files, source.limits, saved)
    return loaded, LoadedProcessor(prepare, spec, source.limits)


@dataclass(frozen=True)
class ModelDescription:
    """Describe a model whose weights are not read yet, with its processor."""

    spec: ModelSpec
    dtype: torch.dtype
    processor: LoadedProcessor


def describe(path: str | Path, *, family: str | None = None, trust: Trust = False) -> ModelDescription:
    """Describe the model that `load` would return with these arguments. Weights are not read."""
    folder = local_model(path)
    check_class_known(folder)
    source = find_model(folder, None, trust, None, family)
    spec, config = resolve(source.section)
    processor = LoadedProcessor(_processor_of(source, spec, config, None), spec, source.limits)
    return ModelDescription(spec, source.dtype, processor)


def _processor_of(
    source: FoundModel, spec: ModelSpec, config: Any, options: Mapping[str, Any] | None
) -> Processor | None:
    """Return the processor of a model; None if it has none. `options` replace those of its folder."""
    if spec.processor is None or source.files is None:
        return None
    return spec.processor(config, source.files, **{**source.options, **(options or {})})


def _refuse_beside_module(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise TesseraError(
                "this argument has no effect together with model=",
                where=name,
                fix="leave it out",
                code="model.option-not-for-module",
            )


def _check_mergeable(section: ModelSection, folder: Path) -> None:
    """Raise if the base weights of a run are quantized, so that no adapter can be merged into them."""
    if section.lora is not None and section.lora.quantize is not None:
        raise TesseraError(
            "adapters cannot be merged into the quantized weights of this run",
            where=str(folder),
            fix="load the folder of the base model, with the adapters of this run and the others as adapters=",
            code="adapter.merge-into-quantized",
        )


@dataclass(frozen=True)
class _MetaModel:
    """Hold a model on the meta device without adapters, and names and shapes of its tensors."""

    spec: ModelSpec
    config: Any
    module: nn.Module
    weights: WeightMap | None
    names: list[str]
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    fresh: frozenset[str]  # new parameters that the base folder lacks, such as a reward head

    @staticmethod
    def of(source: FoundModel) -> _MetaModel:
        spec, config = resolve(source.section)
        module = build_on_meta(spec, config)
        tensors, weights = model_tensors(module), spec.main.weight_map(config)
        fresh = fresh_names(source.section, spec) if source.origin != "folder" else frozenset()
        shapes = native_shapes(tensors)
        return _MetaModel(spec, config, module, weights, list(tensors), shapes, tied_names(module), fresh)


def chosen_adapters(
    section: ModelSection, spec: ModelSpec, config: Any, module: nn.Module
) -> tuple[dict[str, Adapter], list[str]]:
    """Return the adapters that a `model` section selects, and the names of parameters that are trained in full.

    `module`: the model on the meta device, without adapters.
    """
    if section.lora is None:
        return {}, []
    part = part_of(section.path)
    lora = settled(section.lora, list(model_tensors(module)), spec.main.weight_map(config), part)
    adapters = find_adapters(lora, module, spec.main.plan(config), targets_origin(section.lora))
    return adapters, trained_in_full(lora, module, adapters)


def _fill_weights(
    folder: Path,
    source: FoundModel,
    meta: _MetaModel,
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, Adapter],
    shards: Path | None,
) -> None:
    """Read this rank's weights from a Hugging Face folder, run, checkpoint or adapters, or from `shards`."""
    section, expected = source.section, [name for name in meta.names if name not in meta.fresh]
    if source.origin == "adapters":
        assert section.path is not None
        inside = {n: t for n, t in tensors.items() if not is_factor(n) and n not in meta.fresh}
        fill_from(section.path, inside, meta.weights, meta.tied, expected)
        fill_adapters(folder, tensors, adapters, meta.names, meta.weights, part_of(section.path))
    elif shards is not None:
        if source.origin != "folder" or meta.weights is None:
            raise TesseraError(
                "shards= needs a Hugging Face folder that describes the model",
                where=str(folder),
                fix="name the Hugging Face folder of the model as path",
                code="weights.shards-without-folder",
            )
        form = (shards, meta.spec.name, meta.config, meta.weights, meta.shapes)
        fill_tensors(lambda: open_form(*form), tensors, meta.weights, meta.tied, meta.shapes)
    else:
        fill_from(folder, tensors, meta.weights, meta.tied, expected, base=section.path)


def _filled(folder: Path, module: nn.Module) -> tuple[LoadedModel, LoadedProcessor]:
    """Load the weights of a run, a checkpoint or an exported folder into the user's module, and wrap it."""
    if not isinstance(module, nn.Module):
        fix = f"model={module.__name__}(...)" if isinstance(module, type) else "model=net, an object of its class"
        raise TesseraError(
            f"model= must be a torch.nn.Module, got {str(module)[:100]}",
            where="model",
            fix=fix,
            code="model.not-a-module",
        )
    if any(tensor.is_meta for tensor in model_tensors(module).values()):
        raise TesseraError(
            "the module is on the meta device, without memory for its weights",
            where="model",
            fix="allocate it first: net.to_empty(device='cpu')",
            code="model.module-without-memory",
        )
    spec, config = spec_of_object(module)
    tensors = model_tensors(module)
    stored = (
        [] if detect_layout(folder) is not None else newest_names(folder)
    )  # [] for a Hugging Face folder, whose names `fill_from` checks
    if unknown := [name for name in stored if name not in tensors]:
        raise TesseraError(
            f"{type(module).__name__} lacks trained tensors: {few_names(unknown)}",
            where=str(folder),
            nearest=nearest(unknown[0], tensors),
            fix="use a module of the class and sizes of the trained model",
            code="model.module-differs",
        )
    fill_from(folder, tensors, spec.main.weight_map(config), tied_names(module))
    run = None if takes_batch(module) else _call_with_arguments(module)
    return LoadedModel(module, spec, config, None, run, files=folder), LoadedProcessor(None, spec, Limits())


def _call_with_arguments(module: nn.Module) -> Callable[[Batch], Any]:
    arguments = Arguments(module)
    return lambda batch: module(**arguments(batch))


def check_class_known(folder: Path) -> None:
    """Raise if the model was trained as an object (model=net), because then no file names its class."""
    if (folder / CONFIG).is_file():
        section = load_config(saved_config(folder) or read_saved(folder / CONFIG)).model
        unknown = section.family == "module" and not section.config.get("class")
    else:
        layout = detect_layout(folder)
        unknown = layout is not None and layout.config().get("model_type") == MODEL_TYPE
    if unknown:
        raise TesseraError(
            "this model was trained as a Python object, and its files do not name its class",
            where=str(folder),
            fix="create a module of its class and load the weights into it: tessera.load(folder, model=net)",
            code="model.class-not-known",
        )


def adapter_strengths(adapters: AdapterPaths | None) -> dict[Path, float]:
    """Return the argument `adapters` as {path: strength}. Raise if a path is not an adapter."""
    if adapters is None:
        return {}
    if isinstance(adapters, (str, Path)):
        adapters = [adapters]
    strengths = adapters if isinstance(adapters, Mapping) else dict.fromkeys(adapters, 1.0)
    by_path = {Path(path): float(strength) for path, strength in strengths.items()}
    for path in by_path:
        if not is_adapters(path):
            origin_of(path)  # raises another error if the path does not exist
            raise TesseraError(
                "this path is a model, not an adapter",
                where=str(path),
                allowed=["a LoRA file (.safetensors)", "a PEFT folder"],
                fix=f"to get the adapters of a run: tessera convert {path} ADAPTERS --adapters",
                code="adapter.folder-is-a-model",
            )
    return by_path


def generate(
    model: str | Path,
    question: str | None = None,
    *,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    audios: Sequence[str | Path] = (),
    system: str | None = None,
    max_new_tokens: int = 256,
    adapters: AdapterPaths | None = None,
    family: str | None = None,
    device: str | torch.device = "auto",
    trust: bool = False,
    on_text: Callable[[str], None] | None = None,
    **sampling: Any,
) -> str:
    """Load a model, ask it one question and return the answer. To ask more than once, `load` the model once.

    `question` None: return the transcript of the recording in `audios`, by a model that is trained to transcribe.
    `on_text` is called with each new part of the answer; with the whole transcript, at its end. `adapters`, `family`
    and `trust`: see `load`. `sampling`: temperature, top_k, top_p, seed.
    """
    sampling_of(**sampling)  # raise for wrong values before the model is loaded
    if question is None and not (audios and _transcribes(model, family, trust)):
        raise TesseraError(
            "the model needs a question: only models that are trained to transcribe answer a recording without one",
            where="question",
            fix='tessera generate MODEL "What is it?"',
            code="generation.no-prompt",
        )
    loaded, processor = load(model, device=device, adapters=adapters, family=family, trust=trust)
    loaded.freeze()
    conversation = Chat(loaded, processor, system, max_new_tokens, sampling)
    if question is not None:
        return conversation.ask(question, images=images, videos=videos, audios=audios, on_text=on_text)
    text = transcription_instruction(processor.processor, None, None, timestamps=False)
    answer = conversation.ask(text, images=images, videos=videos, audios=audios)
    text = transcript(processor.processor, answer).text
    if on_text is not None:
        on_text(text)
    return text


def _transcribes(model: str | Path, family: str | None, trust: bool) -> bool:
    """Return whether a model is trained to transcribe. Its weights are not read."""
    return isinstance(describe(model, family=family, trust=trust).processor.processor, Transcriber)


def _over_ranks(
    module: nn.Module,
    model_plan: ModelPlan,
    parallel: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    family: GenerationFamily | None,
) -> tuple[nn.Module, Callable[..., Any]]:
    """Allocate this rank's part of a model without values. Return it, and a callable that runs the model on all ranks.

    `family`: family of a generation model; None for a language model.
    """
    if not dist.is_initialized():
        raise TesseraError(
            "parallel= needs a process group",
            where="parallel",
            fix="start with torchrun, and call torch.distributed.init_process_group() before",
            code="layout.no-process-group",
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise TesseraError(
            f"the dtype {dtype} is not supported with parallel=",
            where="dtype",
            allowed=["float32", "bfloat16"],
            code="layout.quantized-over-ranks",
        )
    section = build(ParallelSection, dict(parallel), "parallel")
    # A number of rows with which the plan accepts every pipeline schedule.
    work = Workload(rows=dist.get_world_size() * (section.virtual or 2))
    plan = make_plan(
        section,
        model_plan,
        module,
        dist.get_world_size(),
        precision=PrecisionSection(weights=str(dtype).removeprefix("torch.")),
        workload=work,
    )
    if plan.layout.axes.size(CONTEXT) > 1 and family is None:
        raise TesseraError(
            "language models cannot generate with context parallelism",
            where="parallel.cp",
            allowed=[1],
            code="layout.axis-not-for-generation",
        )
    mesh = Mesh(plan.layout.axes, device)
    part = parallelize(module, plan, mesh, device).eval()
    if family is not None:
        return part, ModelOverRanks(part, family, plan, mesh, device)
    if isinstance(part, LocalStages):
        return part, PipelinedModel(part, plan, mesh, device)
    return part, part


def _own_device(name: str, with_others: bool) -> torch.device:
    """Return the device of this rank. Without `with_others`, do not communicate with other ranks."""
    if name == "cpu" or not dist.is_initialized():
        return devices.resolve(name)
    return devices.resolve_shared(name, rank_on_machine() if with_others else environment_ranks()[2])
