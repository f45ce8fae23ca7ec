"""Native tensors of a model, one at a time, from any form that weights are kept in.

`NativeTensors` joins what a form stores (`StoredForm`: names, types, shapes, and a way to read one) with the weight map
that says how native tensors are made of it. Converting (`checkpoint.writer`) is then writing another form from native
tensors, with no more than a few of them in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.dcp_safetensors import is_dcp_safetensors, read_dcp_safetensors
from tessera.checkpoint.files import CODES, DTYPES, data_positions
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.job_dcp import job_tensors
from tessera.checkpoint.legacy.dcp import METADATA, DcpTensor, read_dcp
from tessera.checkpoint.legacy.megatron import (
    MegatronLayout,
    MegatronTensor,
    is_megatron_folder,
    newest_iteration,
    read_megatron,
)
from tessera.checkpoint.storage import KeyedPart
from tessera.checkpoint.weights import (
    TensorSource,
    check_copies,
    check_copy,
    check_stored_kind,
    fill,
    plan_reading,
    shapes_fit,
)
from tessera.errors import TesseraError, nearest
from tessera.runtime.modules import local_shard
from tessera.runtime.progress import WorkProgress
from tessera.weights.file_plan import Extent, PlannedTensor
from tessera.weights.layouts import ROOT
from tessera.weights.map import WeightMap, native_rows
from tessera.weights.megatron_form import MegatronForm
from tessera.weights.rows import TensorRows


class StoredForm(ABC):
    """Read the weights that a folder of some kind stores. Use it as a context: files stay open inside."""

    where: str
    weight_map: WeightMap | None = None
    """That of the form, if it is another than that of Hugging Face folders."""
    in_order = False
    """Whether one thread reads the tensors in a fixed order: a model over several ranks is gathered."""

    def __enter__(self) -> StoredForm:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def gathering(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which rank 0 reads these tensors in their order. Every rank enters it."""
        return nullcontext()

    @abstractmethod
    def tensors(self) -> Mapping[str, PlannedTensor]:
        """Return types and shapes by the names of the form."""

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return one tensor, or a box of it, reading no more than that: it may lie in mapped pages of its file.

        Several threads may read at a time.
        """

    def read_rows(self, name: str) -> TensorRows:
        """Return one tensor as parts that are not joined before they are used."""
        return TensorRows.of(self.read(name))

    def extents(self, name: str) -> Sequence[Extent | None]:
        """Return where the slices of a tensor lie, one for each rank that has a part of it; None: not in order.

        Names are those of what is stored, also of the parts that a weight in fewer bits is computed from.
        """
        return (None,)

    def check_copies(self, weight_map: WeightMap) -> None:
        """Raise if config.json ties two tables and the folder stores both with different numbers.

        `weight_map`: of forms that have none of their own.
        """
        shapes = {name: plan.shape for name, plan in self.tensors().items()}
        used = (self.weight_map or weight_map).for_names(shapes)
        check_copies(used, shapes, self.read, self.where)


class SafetensorsForm(StoredForm):
    """Read the safetensors of a folder of transformers or diffusers; weights in fewer bits are dequantized."""

    def __init__(self, folder: Path, component: str = ROOT) -> None:
        self.where = str(folder)
        self._folder = FolderTensors(folder, component)
        odd = [name for name, kind in self._folder.kinds.items() if kind not in DTYPES]
        if odd:
            raise TesseraError(
                f"{odd[0]} is stored as {self._folder.kinds[odd[0]]}, which is not read", where=self.where
            )

    def __exit__(self, *_: Any) -> None:
        self._folder.__exit__()

    def tensors(self) -> Mapping[str, PlannedTensor]:
        kinds = self._folder.kinds
        return {name: PlannedTensor(DTYPES[kinds[name]], shape) for name, shape in self._folder.shapes.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._folder.read(name, offsets, sizes)

    def extents(self, name: str) -> Sequence[Extent | None]:
        return (self._folder.extent(name),)


class MegatronFolder(StoredForm):
    """Read the rank files of a Megatron-style job as whole tensors."""

    def __init__(self, folder: Path, form: MegatronForm, layout: MegatronLayout | None = None) -> None:
        self.where = str(folder)
        self.weight_map = form.weights
        self._found, self.layout = read_megatron(folder, form, layout)
        self._tables: dict[str, MegatronTensor] = {}  # of a tied model in a pipeline: the last stage has a copy
        if form.tied and form.table in self._found and form.head in self._found:
            self._tables = {form.head: self._found.pop(form.head), form.table: self._found[form.table]}

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(found.dtype, found.shape) for name, found in self._found.items()}

    def check_copies(self, weight_map: WeightMap) -> None:
        if self._tables:
            head, table = self._tables
            shapes = {name: found.shape for name, found in self._tables.items()}
            check_copy(head, table, shapes, lambda name, *box: self._tables[name].read(*box), self.where)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._found[name].read(offsets, sizes)

    def read_rows(self, name: str) -> TensorRows:
        return self._found[name].read_rows()

    def extents(self, name: str) -> Sequence[Extent | None]:
        return [part.extent() for part in self._found[name].slices]


class DcpFolder(StoredForm):
    """Read a folder of torch.distributed.checkpoint, over its own files or over safetensors.

    `prefix` is removed from names; others are left out.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.where = str(folder)
        check_dcp(folder)
        found = read_dcp(folder) if (folder / METADATA).is_file() else read_dcp_safetensors(folder)
        self._found = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        self._positions: dict[Path, Mapping[str, int]] = {}  # of tensors in safetensors files
        if not self._found:
            raise TesseraError(f"no tensor's name begins with {prefix!r}", where=self.where, allowed=sorted(found)[:10])

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: PlannedTensor(found.dtype, found.shape) for name, found in self._found.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._found[name].read(offsets, sizes)

    def extents(self, name: str) -> Sequence[Extent | None]:
        found = self._found[name]
        if isinstance(found, DcpTensor):
            return [found.stored_part(part).extent() for part in found.parts]
        return [self._extent(part, found.dtype) for part in found.parts]

    def _extent(self, part: KeyedPart, dtype: torch.dtype) -> Extent:
        if part.file not in self._positions:
            self._positions[part.file] = data_positions(part.file)
        return Extent(part.file, self._positions[part.file][part.key], PlannedTensor(dtype, part.sizes))


class JobFolder(StoredForm):
    """Read the DCP folder of a job with FSDP2 by the names of Hugging Face folders. See `checkpoint.job_dcp`."""

    def __init__(self, folder: Path, weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = DcpFolder(folder)
        self.where = self._folder.where
        self._found = job_tensors(self._folder.tensors(), weight_map, shapes)

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: tensor.plan for name, tensor in self._found.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._found[name].read(self._folder, offsets, sizes)


@dataclass(frozen=True)
class TensorGroup:
    """Name native tensors that are read and written together, and what the target form makes of them."""

    names: tuple[str, ...]
    made: Mapping[str, PlannedTensor]


class NativeTensors:
    """Make the native tensors of a model from what a form stores. Use it as a context: it closes the form."""

    def __init__(
        self,
        stored: StoredForm,
        weight_map: WeightMap,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Check that names and shapes fit.

        `weight_map`: of forms that have none of their own. `shapes`: of all native tensors; `tied`: further names of
        shared ones. `types`: of native tensors that are not to be as they are stored.
        """
        self._stored, self.where, self._types = stored, stored.where, types or {}
        self.in_order = stored.in_order
        available, used = stored.tensors(), stored.weight_map or weight_map
        sources = plan_reading(shapes.keys(), available, used, tied=tied, expected=(), where=stored.where)
        self._sources: dict[str, TensorSource] = {source.native: source for source in sources}
        self._shapes = {name: plan.shape for name, plan in available.items()}
        self.plans: dict[str, PlannedTensor] = {}
        for name, shape in shapes.items():
            source = self._sources[name]
            shapes_fit(source, shape, self._shapes, stored.where)
            self.plans[name] = PlannedTensor(self._types.get(name, available[source.foreign[0]].dtype), shape)

    def __enter__(self) -> NativeTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stored.__exit__()

    def gathering(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which rank 0 reads these native tensors in their order. Every rank enters it."""
        return self._stored.gathering([foreign for name in names for foreign in self._sources[name].foreign])

    def blanks(self) -> dict[str, Tensor]:
        """Return tensors without data, by native names."""
        return {name: torch.empty(plan.shape, dtype=plan.dtype, device="meta") for name, plan in self.plans.items()}

    def fill(self, name: str, target: Tensor) -> None:
        """Fill a model's tensor in place. Where it is sharded, a rank reads what it holds."""
        fill(target, self._sources[name], self._shapes, self._stored.read, self._stored.where)

    def read(self, name: str) -> Tensor:
        """Return one native tensor."""
        return self.read_group([name])[name].whole()

    def read_group(self, names: Sequence[str]) -> dict[str, TensorRows]:
        """Return native tensors, mostly as views of files; what several of them are made of is read once."""
        sources = [self._sources[name] for name in names]
        stored_names = dict.fromkeys(name for source in sources for name in source.foreign)
        stored = {name: self._stored.read_rows(name) for name in stored_names}
        found = {source.native: native_rows(source.op, [stored[name] for name in source.foreign]) for source in sources}
        for name in self._types.keys() & found.keys():
            if found[name].dtype != self._types[name]:
                found[name] = TensorRows.of(found[name].whole().to(self._types[name]))
        return found

    def check_kinds(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if a weight is stored as integers or a counter as floats. `tensors`: those of the model."""
        for name, plan in self.plans.items():
            stored = self._sources[name].foreign[0]
            check_stored_kind(stored, CODES.get(plan.dtype, str(plan.dtype)), tensors[name].dtype, self.where)

    def read_ahead(self, names: Sequence[str]) -> None:
        """Ask the system to read what native tensors are made of soon."""
        for foreign in dict.fromkeys(foreign for name in names for foreign in self._sources[name].foreign):
            for extent in self._stored.extents(foreign):
                if extent is not None:
                    extent.read_ahead()

    def extents(self, foreign: str) -> Sequence[Extent | None]:
        """Return where the slices of what is stored under a name of the form lie."""
        return self._stored.extents(foreign)

    def groups(self, weight_map: WeightMap) -> list[TensorGroup]:
        """Return the groups in which another form is written: tensors that share anything stored, here or there."""
        blanks, joined = self.blanks(), dict[str, list[str]]()
        by_stored: dict[str, list[str]] = {}
        for name in blanks:
            group = joined.setdefault(name, [name])
            for other in weight_map.group_of(name):
                group = _join(joined, group, joined.setdefault(other, [other]))
            for stored in self._sources[name].foreign:
                group = _join(joined, group, by_stored.setdefault(stored, group))
                by_stored[stored] = group
        unique = {id(group): group for group in joined.values()}
        made = [
            weight_map.to_foreign_rows({name: TensorRows.of(blanks[name]) for name in group})
            for group in unique.values()
        ]
        return [
            TensorGroup(tuple(group), {name: self._planned(name, rows) for name, rows in tensors.items()})
            for group, tensors in zip(unique.values(), made, strict=True)
        ]

    def _planned(self, foreign: str, rows: TensorRows) -> PlannedTensor:
        if rows.dtype is None:
            raise TesseraError(f"what {foreign} is made of is stored in different types", where=self.where)
        return PlannedTensor(rows.dtype, rows.shape)


def _join(joined: dict[str, list[str]], one: list[str], other: list[str]) -> list[str]:
    """Make one group of two."""
    if one is not other:
        one.extend(other)
        joined.update(dict.fromkeys(other, one))
    return one


def weights_folder(folder: Path) -> Path:
    """Return the folder that holds the files: a job that keeps DCP folders has one for each iteration."""
    if is_megatron_folder(folder):
        inner = newest_iteration(folder)
        if (inner / METADATA).is_file() and not inner.is_symlink():
            return inner
    return folder


def check_dcp(folder: Path, other: str = "") -> None:
    """Raise unless a folder is one of torch.distributed.checkpoint. `other`: what else it could have been."""
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        near, fix = nearest(folder.name, beside), "check model.weights" if other else None
        raise TesseraError("there is no such folder", where=str(folder), nearest=near, fix=fix)
    if not (folder / METADATA).is_file() and not is_dcp_safetensors(folder):
        raise TesseraError(
            f"here is {'neither ' + other + ' nor' if other else 'not'} a torch DCP folder ({METADATA})",
            where=str(folder),
            fix="a Hugging Face folder, a run or a checkpoint is named by model.path alone" if other else None,
        )


def open_form(
    folder: Path, shards: MegatronForm | None, weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> StoredForm:
    """Open Megatron-style shards or a DCP folder, whichever it is. `shards`: how the family keeps such shards;
    `shapes`: of all native tensors."""
    folder = weights_folder(folder)
    if is_megatron_folder(folder):
        if shards is None:
            raise TesseraError("this family has no Megatron-style form", where=str(folder))
        return MegatronFolder(folder, shards)
    check_dcp(folder, "Megatron-style shards")
    return JobFolder(folder, weight_map, shapes)


def fill_from_form(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    shards: MegatronForm | None,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> None:
    """Fill a model's tensors (plain or sharded) in place from a folder in another form.

    `shapes`: of all native tensors, of which `tensors` may be a part. A failure of one rank is raised on all.
    """

    def work() -> None:
        with open_form(folder, shards, weight_map, shapes) as stored:
            native = NativeTensors(stored, weight_map, shapes, tied)
            if Ranks.current().rank == 0:
                stored.check_copies(weight_map)
            sizes = {name: local_shard(target).nbytes for name, target in tensors.items()}
            with WorkProgress("loading weights", sum(sizes.values())) as progress:
                for name, target in tensors.items():
                    native.fill(name, target)
                    progress.count(sizes[name])

    Ranks.current().on_all(work)


def native_shapes(tensors: Mapping[str, Tensor], left_out: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in left_out}
