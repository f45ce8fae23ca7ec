"""Write a model as a Hugging Face folder that `transformers` loads, and check it before it is published.

Every written tensor is read again and compared. If transformers has the class of the model, its logits are compared,
too. A folder that fails a check is not published.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, main_dtype
from tessera.checkpoint.fp8 import Fp8Map
from tessera.checkpoint.hf import gathered, plan_folder
from tessera.checkpoint.publish import Origin
from tessera.checkpoint.state import model_tensors
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec, Processor
from tessera.errors import TesseraError
from tessera.inference.export_record import write_record
from tessera.inference.proof import Prove, prove_folder
from tessera.inference.weight_source import published_folder
from tessera.lora.factors import merge_adapter
from tessera.lora.select import Adapters, factor_names, is_factor, weight_names
from tessera.models import is_original
from tessera.models.files.exported_config import base_config, exported_config
from tessera.models.files.side_files import write_side_files
from tessera.models.text.decoder import PROJECTIONS
from tessera.weights.layouts import detect_layout
from tessera.weights.map import WeightMap

_log = logging.getLogger("tessera")


@dataclass(frozen=True)
class FolderTarget:
    """Describe a folder to write. `add_files` writes the tokenizer, chat template and preprocessor files.

    `shards`: tensor name -> safetensors file, as in the source folder. `tied`: other name of a tied weight in the
    module -> its first name.
    """

    table: WeightMap
    config: Mapping[str, Any]
    add_files: Callable[[Path], object]
    shards: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


def export_folder(
    module: nn.Module,
    spec: ModelSpec,
    model_config: Any,
    processor: Processor | None,
    folder: Path,
    *,
    files: Path | None = None,
    base: Path | None = None,
    adapters: Adapters | None = None,
    quantize: str | None = None,
    origin: Origin | None = None,
    overwrite: bool = False,
    prove: Prove = "auto",
) -> None:
    """Write a Hugging Face folder. All ranks call this: weights are gathered one by one, and the main rank writes.

    `adapters`: adapters of all pipeline stages, which are merged into the weights. `files`: the folder whose tokenizer,
    template, preprocessors, generation settings and licence are copied, and whose config.json provides fields that the
    family does not know. `base`: the folder of the original weights. `quantize`: "fp8" or "fp8-block". `origin`: see
    `made_from`. `prove`: see `prove_folder`.
    """
    weight_map = spec.main.weight_map(model_config)
    if weight_map is None:
        raise TesseraError(
            f"the family {spec.name} has no weight map for Hugging Face folders, so it cannot be exported",
            fix="add a weight map to the family: docs/how-to/add-a-model-family.md",
            code="model.no-hf-form",
        )
    tensors, merged = model_tensors(module), adapters or {}
    here = [weight_names(path, adapter) for path, adapter in merged.items() if factor_names(path)[0] in tensors]
    if any(name not in tensors for weights in here for name in weights):
        raise TesseraError(
            "adapters cannot be merged into quantized weights",
            fix="write only the adapters (tessera convert --adapters), then merge them into the unquantized model: "
            "tessera convert ADAPTERS FOLDER --like BASE_MODEL",
            code="adapter.merge-into-quantized",
        )
    stored = {name: tensor for name, tensor in tensors.items() if not is_factor(name)}
    prepare = (lambda name, weight: merge_adapter(name, weight, tensors, merged)) if merged else None
    others = published_folder(base) if weight_map.other_parts else None
    with gathered(stored, prepare, others, weight_map.other_parts) as native:
        blanks = native.blanks()
        trained = {name: blank for name, blank in blanks.items() if not name.startswith(weight_map.other_parts)}
        if len(trained) < len(blanks):  # tensors of other parts keep their names
            weight_map = replace(weight_map, same_names=True)
        target = trained_target(spec, model_config, weight_map, trained, processor, files, base)
        if quantize is not None:
            target = quantized_target(target, weight_map, quantize, native.blanks(), str(folder))
        job = folder_job(native, target, weight_map, spec, model_config, base=base, prove=prove)
        write_weights(folder, replace(job, origin=origin, overwrite=overwrite))


def trained_target(
    spec: ModelSpec,
    config: Any,
    table: WeightMap,
    tensors: Mapping[str, Tensor],
    processor: Processor | None,
    files: Path | None,
    base: Path | None,
) -> FolderTarget:
    """Describe the Hugging Face folder of a trained model. `tensors`: the module's tensors, maybe on meta."""
    read = None if spec.processor is None else functools.partial(spec.processor, config)
    add_files = functools.partial(write_side_files, processor=processor, read=read, source=files, weights=files)
    described = exported_config(config, base_config(files), main_dtype(tensors.values()), spec.gives(REWARDS))
    return FolderTarget(_as_in_base(table, spec, base), described, add_files)


def quantized_target(
    target: FolderTarget, weights: WeightMap, kind: str, tensors: Mapping[str, Tensor], where: str
) -> FolderTarget:
    """Return a target with fp8 projections. Stacked experts are stored in the order that inference servers expect."""
    fp8 = Fp8Map.of(weights, kind, tensors, PROJECTIONS, where)
    files = {scale: file for name, file in target.shards.items() for scale in (name, fp8.scale_of(name))}
    return replace(target, table=fp8, config=fp8.config(target.config), shards=files)


def folder_job(
    native: NativeTensors,
    target: FolderTarget,
    weights: WeightMap,
    spec: ModelSpec,
    config: Any,
    *,
    base: Path | None,
    prove: Prove,
) -> WriteJob:
    """Return the description of what to write and check. `weights`: weight map by which the folder is read again."""
    shapes = {name: plan.shape for name, plan in native.plans.items()}
    plan = plan_folder(native.blanks(), target.table, target.config, like=target.shards)

    def reopen(staging: Path) -> NativeTensors:
        return NativeTensors(SafetensorsForm(staging), weights, shapes, target.tied)

    def finish(staging: Path) -> None:
        target.add_files(staging)
        _seal(staging, spec, config, base, prove)

    rounded = target.table.quantized if isinstance(target.table, Fp8Map) else frozenset[str]()
    return WriteJob(native, target.table, plan, reopen, finish=finish, rounded=rounded)


def _seal(staging: Path, spec: ModelSpec, config: Any, base: Path | None, prove: Prove) -> None:
    """Check a complete staging folder, and write its `tessera_export.json`. Raise if a check fails."""
    proof = prove_folder(staging, spec, config, prove)
    if proof.problems:
        raise TesseraError(
            f"the exported folder differs from the trained model: {'; '.join(proof.problems)}",
            where=staging.name.removeprefix(".staging-").split("~")[0],
            fix="checkpoints are unchanged; to look at the folder, write it without this check: "
            "tessera convert RUN FOLDER --prove never",
            code="output.export-differs",
        )
    for warning in (*proof.warnings, *filter(None, [proof.obstacle])):
        _log.warning("%s", warning)
    _log.info("%d files; %s", len(write_record(staging, base).files), proof.line)


def _as_in_base(weight_map: WeightMap, spec: ModelSpec, base: Path | None) -> WeightMap:
    """Return the weight map with tensor names spelled as in the base folder, for example with or without a prefix."""
    if base is None or detect_layout(base) is None or is_original(spec, base) or not any(base.glob("*.safetensors")):
        return weight_map
    try:
        with FolderTensors(base) as stored:
            return weight_map.spelled_as(stored.shapes)
    except TesseraError:  # the base folder was damaged after the start of the run; use the default spelling
        return weight_map
