"""Read the DCP folder of a job with FSDP2 by the names and shapes of Hugging Face folders.

Such a job keeps its model under prefixes: `model.`, and those of its wrappers. Stacked experts have lost their first
dimension, or the matrices of all experts of a layer are one tensor, transposed. Nothing in the folder says which of
this was done, so it is found from the names and shapes that the model needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows

if TYPE_CHECKING:
    from tessera.checkpoint.forms import StoredForm

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class JobTensor:
    """Say where a tensor of a Hugging Face folder is stored: whole, without its first dimension, or in the transposed
    matrix of all experts."""

    stored: str
    plan: PlannedTensor
    flat: bool = False  # stacked experts [experts, rows, columns] as [experts * rows, columns]
    box: tuple[Shape, Shape] | None = None  # offsets and sizes of one expert's matrix, which is transposed

    def read(self, form: StoredForm, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> Tensor:
        """Return the tensor, or a box of it."""
        if self.box is not None:
            whole = form.read(self.stored, *self.box)
            whole = whole.reshape(whole.shape[-2:]).t()
            return whole if sizes is None else whole[box_slices(offsets or [0, 0], sizes)]
        if not self.flat or sizes is None:
            return form.read(self.stored, offsets, sizes).reshape(self.plan.shape if sizes is None else tuple(sizes))
        _, rows, columns = self.plan.shape
        first, *inside = offsets or (0, 0, 0)
        experts = form.read(self.stored, (first * rows, 0), (sizes[0] * rows, columns)).reshape(-1, rows, columns)
        return experts[box_slices((0, *inside), sizes)]


def job_tensors(
    stored: Mapping[str, PlannedTensor], weight_map: WeightMap, shapes: Mapping[str, Shape]
) -> dict[str, JobTensor]:
    """Return the tensors of a job by the names of Hugging Face folders. `shapes`: of all native tensors."""
    prefix = _prefix(stored, weight_map, shapes)
    inside = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    table = weight_map.for_names(inside)
    needed = _needed(table, shapes)
    merged = _merged(needed, inside, stored)
    found: dict[str, JobTensor] = {}
    for name, own in inside.items():
        plan, shape = stored[own], needed.get(table.canonical(name), ())
        if name in merged:
            found |= merged[name]
        elif len(shape) == 3 and len(plan.shape) == 2 and plan.shape[0] % shape[0] == 0:
            stacked = (shape[0], plan.shape[0] // shape[0], plan.shape[1])
            found[name] = JobTensor(own, PlannedTensor(plan.dtype, stacked), flat=True)
        else:
            found[name] = JobTensor(own, plan)
    return found


def _needed(weight_map: WeightMap, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return names and shapes in a Hugging Face folder of the model."""
    blanks = {
        name: TensorRows.of(torch.empty(shape, device="meta"))
        for name, shape in shapes.items()
        if weight_map.rule_for(name) is not None
    }
    return {name: rows.shape for name, rows in weight_map.to_foreign_rows(blanks).items()}


def _prefix(stored: Mapping[str, PlannedTensor], weight_map: WeightMap, shapes: Mapping[str, Shape]) -> str:
    """Return the prefix behind which most names are those of the model. A job may store more: an optimizer."""
    tables = [weight_map, *weight_map.others.values()]
    known = {name for table in tables for one in shapes if (found := table.rule_for(one)) for name in found[1]}
    counts: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for at in range(len(parts)):
            end = ".".join(parts[at:])
            if any(table.canonical(end) in known for table in tables):
                counts[name[: len(name) - len(end)]] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")


def _merged(
    needed: Mapping[str, Shape], inside: Mapping[str, str], stored: Mapping[str, PlannedTensor]
) -> dict[str, dict[str, JobTensor]]:
    """Return the tensors of single experts in each tensor that holds those of a layer."""
    experts: dict[str, dict[str, JobTensor]] = {}
    for name, shape in needed.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            continue
        home = f"{match[1]}.{'down_proj' if match[3] == 'down_proj' else 'gate_up_proj'}"
        if home not in inside:
            continue
        plan, number = stored[inside[home]], int(match[2])
        (outputs, inputs), first = shape, shape[0] if match[3] == "up_proj" else 0
        box: tuple[Shape, Shape] = ((number, 0, first), (1, inputs, outputs))
        if len(plan.shape) == 2:
            box = ((number * inputs, first), (inputs, outputs))
        tensor = JobTensor(inside[home], PlannedTensor(plan.dtype, (outputs, inputs)), box=box)
        experts.setdefault(home, {})[name] = tensor
    return experts
