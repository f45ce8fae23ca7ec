"""Read the torch DCP folders of jobs with FSDP2.

They may flatten stacked experts to two dimensions, or merge the matrices of all experts of a layer into one transposed
tensor. `JobFolder` derives this from the names and shapes that the model needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.forms import StoredForm
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows

Shape = tuple[int, ...]
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class JobTensor:
    """Locate a tensor of the model in the DCP folder of a job, which may flatten or merge experts."""

    stored: str
    plan: PlannedTensor
    flat: bool = False  # experts [experts, rows, columns] are stored as [experts * rows, columns]
    box: tuple[Shape, Shape] | None = None  # offsets and sizes of one expert in a merged tensor, which is transposed

    def read(self, form: StoredForm, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> Tensor:
        """Return the tensor in the model's shape, or only the box of it at `offsets` with `sizes`."""
        if self.box is not None:
            matrix = form.read(self.stored, *self.box)
            matrix = matrix.reshape(matrix.shape[-2:]).t()
            return matrix if sizes is None else matrix[box_slices(offsets or [0, 0], sizes)]
        if not self.flat or sizes is None:
            return form.read(self.stored, offsets, sizes).reshape(self.plan.shape if sizes is None else tuple(sizes))
        _, rows, columns = self.plan.shape
        first, *inside = offsets or (0, 0, 0)
        experts = form.read(self.stored, (first * rows, 0), (sizes[0] * rows, columns)).reshape(-1, rows, columns)
        return experts[box_slices((0, *inside), sizes)]


def job_tensors(
    stored: Mapping[str, PlannedTensor], weight_map: WeightMap, shapes: Mapping[str, Shape]
) -> dict[str, JobTensor]:
    """Locate the tensors in the DCP folder of a job, by Hugging Face name. `shapes`: shapes of all model tensors."""
    table = weight_map.for_names(stored)
    needed = _needed(table, shapes)
    merged = _merged(needed, stored)
    tensors: dict[str, JobTensor] = {}
    for name, plan in stored.items():
        shape = needed.get(table.canonical(name), ())
        if name in merged:
            tensors |= merged[name]
        elif len(shape) == 3 and len(plan.shape) == 2 and plan.shape[0] % shape[0] == 0:
            stacked = (shape[0], plan.shape[0] // shape[0], plan.shape[1])
            tensors[name] = JobTensor(name, PlannedTensor(plan.dtype, stacked), flat=True)
        else:
            tensors[name] = JobTensor(name, plan)
    return tensors


def _needed(weight_map: WeightMap, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensor names and shapes of the model's Hugging Face folder."""
    blanks = {
        name: TensorRows.of(torch.empty(shape, device="meta"))
        for name, shape in shapes.items()
        if weight_map.rule_for(name) is not None
    }
    return {name: rows.shape for name, rows in weight_map.to_foreign_rows(blanks).items()}


def _merged(needed: Mapping[str, Shape], stored: Mapping[str, PlannedTensor]) -> dict[str, dict[str, JobTensor]]:
    """Return for each merged tensor the experts that it contains, by their Hugging Face names."""
    experts: dict[str, dict[str, JobTensor]] = {}
    for name, shape in needed.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            continue
        merged = f"{match[1]}.{'down_proj' if match[3] == 'down_proj' else 'gate_up_proj'}"
        if merged not in stored:
            continue
        plan, number = stored[merged], int(match[2])
        (outputs, inputs), first = shape, shape[0] if match[3] == "up_proj" else 0
        box: tuple[Shape, Shape] = ((number, 0, first), (1, inputs, outputs))
        if len(plan.shape) == 2:
            box = ((number * inputs, first), (inputs, outputs))
        tensor = JobTensor(merged, PlannedTensor(plan.dtype, (outputs, inputs)), box=box)
        experts.setdefault(merged, {})[name] = tensor
    return experts


class JobFolder(StoredForm):
    """Read the DCP folder of a job with FSDP2, by Hugging Face names."""

    def __init__(self, folder: StoredForm, weight_map: WeightMap, shapes: Mapping[str, Shape]) -> None:
        self._folder = folder
        self.where = folder.where
        self._tensors = job_tensors(folder.tensors(), weight_map, shapes)

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: tensor.plan for name, tensor in self._tensors.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._tensors[name].read(self._folder, offsets, sizes)
