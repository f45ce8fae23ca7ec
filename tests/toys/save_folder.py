"""Write the tensors of a model as a folder, without the side files and the proof of an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.forms import NativeTensors, SafetensorsForm
from tessera.checkpoint.hf import SHARD_BYTES, gathered, plan_folder
from tessera.checkpoint.writer import WriteJob, write_weights
from tessera.weights.map import WeightMap


def save_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
    prepare: Callable[[str, Tensor], Tensor] | None = None,
    **options: Any,
) -> None:
    """Write a folder of one component, of transformers or of diffusers as its configuration states.

    Every rank calls this with the tensors that it has; together they are the model. `prepare` returns the tensor that
    is written in place of a tensor. Further options are those of `WriteJob`.
    """
    with gathered(tensors, prepare) as native:
        shapes = {name: plan.shape for name, plan in native.plans.items()}
        plan = plan_folder(native.blanks(), weight_map, config, shard_bytes)

        def reopen(staging: Path) -> NativeTensors:
            return NativeTensors(SafetensorsForm(staging), weight_map, shapes, {})

        write_weights(folder, WriteJob(native, weight_map, plan, reopen, **options))
