"""Load weights from folders of torch.distributed.checkpoint (DCP), and from formats that other packages add.

Other trainers with FSDP2 save a model in a DCP folder with name prefixes, such as `model.`. They may flatten stacked
experts to two dimensions, or merge the matrices of all experts of a layer into one transposed tensor. `JobFolder`
derives all of this from the names and shapes that the model needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.forms import StoredForm, fill_tensors
from tessera.checkpoint.legacy.dcp import METADATA, read_dcp
from tessera.checkpoint.weight_forms import described_forms, detect_form, weight_form, weights_folder
from tessera.config.reader import Section
from tessera.errors import TesseraError
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.layouts import no_such_folder
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows

Shape = tuple[int, ...]
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class DcpFolder(StoredForm):
    """Read a folder of torch.distributed.checkpoint. Tensors whose names do not begin with `prefix` are left out."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.where = str(folder)
        check_dcp(folder)
        stored = read_dcp(folder)
        self._tensors = {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}
        if not self._tensors:
            raise TesseraError(
                f"no tensor name begins with {prefix!r}",
                where=self.where,
                allowed=[*stored][:10],
                code="checkpoint.unknown-name-prefix",
            )

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._tensors[name].read(offsets, sizes)


# ---------------------------------------------------------------------------------------------- jobs with FSDP2


@dataclass(frozen=True)
class JobTensor:
    """Locate a tensor of the model in the DCP folder of another trainer, which may flatten or merge experts."""

    stored: str
    plan: PlannedTensor
    flat: bool = False  # experts [experts, rows, columns] are stored as [experts * rows, columns]
    box: tuple[Shape, Shape] | None = None  # offsets and sizes of one expert in a merged tensor, which is transposed

    def read(self, form: StoredForm, offsets: Sequence[int] | None, sizes: Sequence[int] | None) -> Tensor:
        """Return the tensor, or a box of it."""
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
    """Locate the tensors in the DCP folder of another trainer, by Hugging Face name. `shapes`: of all model tensors."""
    prefix = _prefix(stored, weight_map, shapes)
    inside = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    table = weight_map.for_names(inside)
    needed = _needed(table, shapes)
    merged = _merged(needed, inside, stored)
    tensors: dict[str, JobTensor] = {}
    for name, full_name in inside.items():
        plan, shape = stored[full_name], needed.get(table.canonical(name), ())
        if name in merged:
            tensors |= merged[name]
        elif len(shape) == 3 and len(plan.shape) == 2 and plan.shape[0] % shape[0] == 0:
            stacked = (shape[0], plan.shape[0] // shape[0], plan.shape[1])
            tensors[name] = JobTensor(full_name, PlannedTensor(plan.dtype, stacked), flat=True)
        else:
            tensors[name] = JobTensor(full_name, plan)
    return tensors


def _needed(weight_map: WeightMap, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensor names and shapes of the model's Hugging Face folder."""
    blanks = {
        name: TensorRows.of(torch.empty(shape, device="meta"))
        for name, shape in shapes.items()
        if weight_map.rule_for(name) is not None
    }
    return {name: rows.shape for name, rows in weight_map.to_foreign_rows(blanks).items()}


def _prefix(stored: Mapping[str, PlannedTensor], weight_map: WeightMap, shapes: Mapping[str, Shape]) -> str:
    """Return the name prefix that most of the model's tensors have in the folder. Optimizer tensors do not count."""
    tables = [weight_map, *weight_map.others.values()]
    matches = [match for table in tables for native in shapes if (match := table.rule_for(native))]
    names = {name for _, foreign in matches for name in foreign}
    counts: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for at in range(len(parts)):
            end = ".".join(parts[at:])
            if any(table.canonical(end) in names for table in tables):
                counts[name[: len(name) - len(end)]] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")


def _merged(
    needed: Mapping[str, Shape], inside: Mapping[str, str], stored: Mapping[str, PlannedTensor]
) -> dict[str, dict[str, JobTensor]]:
    """Return for each merged tensor the experts that it contains, by their Hugging Face names."""
    experts: dict[str, dict[str, JobTensor]] = {}
    for name, shape in needed.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            continue
        merged = f"{match[1]}.{'down_proj' if match[3] == 'down_proj' else 'gate_up_proj'}"
        if merged not in inside:
            continue
        plan, number = stored[inside[merged]], int(match[2])
        (outputs, inputs), first = shape, shape[0] if match[3] == "up_proj" else 0
        box: tuple[Shape, Shape] = ((number, 0, first), (1, inputs, outputs))
        if len(plan.shape) == 2:
            box = ((number * inputs, first), (inputs, outputs))
        tensor = JobTensor(inside[merged], PlannedTensor(plan.dtype, (outputs, inputs)), box=box)
        experts.setdefault(merged, {})[name] = tensor
    return experts


class JobFolder(StoredForm):
    """Read the DCP folder of another trainer with FSDP2, by Hugging Face names."""

    def __init__(self, folder: Path, weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = DcpFolder(folder)
        self.where = self._folder.where
        self._tensors = job_tensors(self._folder.tensors(), weight_map, shapes)

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: tensor.plan for name, tensor in self._tensors.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._tensors[name].read(self._folder, offsets, sizes)


# ---------------------------------------------------------------------------------------------- opening


def check_dcp(folder: Path, other: Sequence[str] = ()) -> None:
    """Raise unless a folder is a DCP folder. `other`: descriptions of formats that are accepted as well."""
    if not folder.is_dir():
        raise no_such_folder(folder, "model.weights" if other else None)
    if not (folder / METADATA).is_file():
        raise TesseraError(
            f"the folder is not a torch DCP folder: it has no {METADATA}",
            where=str(folder),
            allowed=[*other] or None,
            fix="set model.path to a Hugging Face folder, a run or a checkpoint, and leave out model.weights"
            if other
            else None,
            code="checkpoint.not-dcp-folder",
        )


def open_form(
    folder: Path, family: str, config: Section, weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> StoredForm:
    """Open the weights of a configured model: a torch DCP folder, or a format that another package adds.

    `shapes`: shapes of all tensors of the model.
    """
    folder = weights_folder(folder)
    name = detect_form(folder)
    if (form := weight_form(name)) is not None:
        model = form.of_model(family, config)
        if model is None:
            raise TesseraError(
                f"the format {name} does not support the family {family}",
                where=str(folder),
                code="weights.form-without-family",
            )
        return model.open(folder)
    check_dcp(folder, described_forms())
    return JobFolder(folder, weight_map, shapes)


def fill_from_form(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    family: str,
    config: Section,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> None:
    """Fill a model's tensors (plain or sharded) in place from a DCP folder or an added format.

    `shapes`: shapes of all tensors of the model; `tensors` may be some of them. If any rank fails, all ranks raise.
    """
    fill_tensors(lambda: open_form(folder, family, config, weight_map, shapes), tensors, weight_map, tied, shapes)
