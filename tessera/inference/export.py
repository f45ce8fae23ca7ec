"""Write a model as a Hugging Face folder that plain `transformers` loads, and prove it before it is published.

Before a folder is published it is read again: every tensor is noted in its record, and where transformers has the
class, both sides compute logits from it. A folder that does not pass is not published.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.checkpoint.export_record import TensorNotes, write_record
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.fp8 import Fp8Map
from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.publish import Origin
from tessera.checkpoint.state import model_tensors
from tessera.core.outputs import REWARDS
from tessera.core.spec import ModelSpec, Processor
from tessera.errors import TesseraError
from tessera.inference.proof import Prove, prove_folder
from tessera.lora.factors import merge_adapter
from tessera.lora.select import Adapters, factor_names, is_factor, weight_names
from tessera.models import is_original
from tessera.models.files.exported_config import base_config, exported_config
from tessera.models.files.side_files import write_side_files
from tessera.models.text.decoder import PROJECTIONS
from tessera.weights.layouts import detect_layout
from tessera.weights.map import WeightMap

_log = logging.getLogger("tessera")


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
    """Write a Hugging Face folder. All ranks call it: weights are gathered tensor by tensor, the main rank writes.

    `adapters`, those of the whole model, are merged into its weights. `files`: the folder whose tokenizer, template,
    preprocessors, generation settings and licence are copied, with what its config.json says besides. `base`: the
    folder that the weights came from, which the record compares them with. `quantize`: "fp8" or "fp8-block".
    `origin`: see `made_from`. `prove`: see `prove_folder`.
    """
    weight_map = spec.main.weight_map(model_config)
    if weight_map is None:
        raise TesseraError(f"family {spec.name} has no Hugging Face form to export to")
    tensors = model_tensors(module)
    known = adapters or {}
    here = [weight_names(path, one) for path, one in known.items() if factor_names(path)[0] in tensors]
    if any(name not in tensors for weights in here for name in weights):
        raise TesseraError(
            "the weights of adapted layers are kept in fewer bits, which is not what a model is merged into",
            fix="write the adapters alone (tessera convert --adapters), and merge them into the model they belong to",
        )
    read = None if spec.processor is None else functools.partial(spec.processor, model_config)
    written = {name: tensor for name, tensor in tensors.items() if not is_factor(name)}
    weight_map = as_in_base(weight_map, spec, base) if quantize is None else weight_map
    fp8 = None if quantize is None else Fp8Map.of(weight_map, quantize, written, PROJECTIONS, str(folder))
    described = exported_config(model_config, base_config(files), main_dtype(written), spec.gives(REWARDS))

    def finish(staging: Path) -> None:
        write_side_files(staging, processor, read=read, own=files, weights=files)
        if fp8 is not None:
            fp8.check(staging)
        seal_export(staging, spec, model_config, base=base, prove=prove)

    save_folder(
        folder,
        written,
        fp8 or weight_map,
        described if fp8 is None else fp8.config(described),
        origin=origin,
        overwrite=overwrite,
        extras=finish,
        prepare=(lambda name, weight: merge_adapter(name, weight, tensors, known)) if known else None,
    )


def as_in_base(weight_map: WeightMap, spec: ModelSpec, base: Path | None) -> WeightMap:
    """Return the table that writes names as the folder does that the weights came from."""
    if base is None or detect_layout(base) is None or is_original(spec, base) or not any(base.glob("*.safetensors")):
        return weight_map
    try:
        with FolderTensors(base) as stored:
            return weight_map.spelled_as(stored.shapes)
    except TesseraError:  # it was read once; what became of it since is no fault of the export
        return weight_map


def seal_export(
    staging: Path,
    spec: ModelSpec,
    config: Any,
    *,
    prove: Prove,
    base: Path | None = None,
    notes: TensorNotes | None = None,
) -> None:
    """Prove a Hugging Face folder that is about to be published, and write its record; raise if it is not right.

    `base`: the folder that the weights came from. `notes`: those of the tensors, compared with the base, if they were
    made while tensors were written.
    """
    proof = prove_folder(staging, spec, config, prove)
    if proof.problems:
        raise TesseraError(
            f"the export would not be what was trained: {'; '.join(proof.problems)}",
            where=staging.name.removeprefix(".staging-").split("~")[0],
            fix="nothing was published, and the checkpoints are untouched; `tessera convert RUN FOLDER --prove never` "
            "writes the folder as it is, to look at",
        )
    for warning in (*proof.warnings, *filter(None, [proof.obstacle])):
        _log.warning("%s", warning)
    weight_map = spec.main.weight_map(config)
    assert weight_map is not None, "a family with Hugging Face folders has a weight map"
    comparable = base if is_original(spec, base) == is_original(spec, staging) else None  # names of one form
    record = write_record(staging, comparable, weight_map, notes)
    _log.info("%s; %s", record.summary(), proof.line)


def main_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the floating point type of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
