"""Read the native tensors of a model, one at a time, from weights in any format.

A `StoredForm` reads tensors of one format by their stored names. `NativeTensors` translates them by a weight map
to native tensors, which are those of Tessera's model. A conversion (`checkpoint.writer`) reads native tensors and
writes them in another format, with a few tensors in memory at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import CODES, DTYPES
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.weights import TensorSource, check_copies, fill, plan_reading, shapes_fit
from tessera.errors import TesseraError
from tessera.runtime.collective import Ranks
from tessera.runtime.modules import local_shard
from tessera.runtime.progress import WorkProgress
from tessera.weights.file_plan import PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.operations import native_rows
from tessera.weights.rows import TensorRows


class StoredForm(ABC):
    """Read the weights of a folder in one format, by their names in the files. Inside of `with`, files stay open."""

    where: str
    weight_map: WeightMap | None = None
    """The weight map of this format; None: that of Hugging Face folders."""
    in_order = False
    """Whether tensors must be read in a fixed order by one thread, because ranks gather them."""

    def __enter__(self) -> StoredForm:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def gathering(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context manager that all ranks enter, in which rank 0 reads the tensors `names` in this order."""
        return nullcontext()

    @abstractmethod
    def tensors(self) -> Mapping[str, PlannedTensor]:
        """Return dtypes and shapes by stored names."""

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or a box (offsets and sizes) of it. It may be a view of a memory map of its file.

        Several threads may read at the same time.
        """

    def read_rows(self, name: str) -> TensorRows:
        """Return a tensor as blocks of rows that are not concatenated, so that no copy is needed."""
        return TensorRows.of(self.read(name))

    def check_copies(self, weight_map: WeightMap) -> None:
        """Raise if config.json ties the head to the embeddings, and the folder stores both with different values.

        `weight_map`: map of Hugging Face folders, used if this format has no map of its own.
        """
        shapes = {name: plan.shape for name, plan in self.tensors().items()}
        used = (self.weight_map or weight_map).for_names(shapes)
        check_copies(used, shapes, self.read, self.where)


class SafetensorsForm(StoredForm):
    """Read the safetensors of a folder of transformers or diffusers; quantized weights are dequantized."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = FolderTensors(folder)
        odd = [name for name, kind in self._folder.kinds.items() if kind not in DTYPES]
        if odd:
            raise TesseraError(
                f"{odd[0]} is stored as {self._folder.kinds[odd[0]]}, which is not supported",
                where=self.where,
                code="weights.unsupported-dtype",
            )

    def __exit__(self, *_: Any) -> None:
        self._folder.__exit__()

    def tensors(self) -> Mapping[str, PlannedTensor]:
        kinds = self._folder.kinds
        return {name: PlannedTensor(DTYPES[kinds[name]], shape) for name, shape in self._folder.shapes.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return self._folder.read(name, offsets, sizes)


@dataclass(frozen=True)
class TensorGroup:
    """Hold the names of native tensors that are converted together, and the resulting tensors of the target format."""

    names: tuple[str, ...]
    foreign: Mapping[str, PlannedTensor]


class NativeTensors:
    """Translate stored tensors to the native tensors of a model. It is a context manager, which closes the files."""

    def __init__(
        self,
        stored: StoredForm,
        weight_map: WeightMap,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        types: Mapping[str, torch.dtype] | None = None,
        expected: Iterable[str] = (),
    ) -> None:
        """Check that names and shapes fit the model.

        `weight_map`: used if the format has no map of its own. `shapes`: shapes of the native tensors to read. `tied`:
        other name of a shared tensor -> its name in `shapes`. `types`: native tensor -> dtype to convert it to; without
        an entry, a tensor keeps its stored dtype. `expected`: all names of the model, if `shapes` has only some.
        """
        self._stored, self.where, self._types = stored, stored.where, types or {}
        self.in_order = stored.in_order
        self._available, used = stored.tensors(), stored.weight_map or weight_map
        available = self._available
        sources = plan_reading(shapes.keys(), available, used, tied=tied, expected=expected, where=stored.where)
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
        """Return a context manager that all ranks enter, in which rank 0 reads the native tensors in this order."""
        return self._stored.gathering([foreign for name in names for foreign in self._sources[name].foreign])

    def blanks(self) -> dict[str, Tensor]:
        """Return all native tensors on the meta device, by name."""
        return {name: torch.empty(plan.shape, dtype=plan.dtype, device="meta") for name, plan in self.plans.items()}

    def fill(self, name: str, target: Tensor) -> None:
        """Fill a tensor of the model in place. If it is sharded, a rank reads its shard only."""
        fill(target, self._sources[name], self._shapes, self._stored.read, self._stored.where)

    def read(self, name: str) -> Tensor:
        return self.read_group([name])[name].whole()

    def read_group(self, names: Sequence[str]) -> dict[str, TensorRows]:
        """Return native tensors, as views of files where possible. A stored tensor is read once for all of them."""
        sources = [self._sources[name] for name in names]
        stored_names = dict.fromkeys(name for source in sources for name in source.foreign)
        stored = {name: self._stored.read_rows(name) for name in stored_names}
        tensors = {s.native: native_rows(s.op, [stored[name] for name in s.foreign]) for s in sources}
        for name in self._types.keys() & tensors.keys():
            if tensors[name].dtype != self._types[name]:
                tensors[name] = TensorRows.of(tensors[name].whole().to(self._types[name]))
        return tensors

    def check_kinds(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if a float tensor of the model is stored as integers, or the reverse. `tensors`: the model's own."""
        for name, source in self._sources.items():
            if name not in tensors:  # a tensor of another part of the model
                continue
            wanted = tensors[name].dtype
            for stored in source.foreign:
                dtype = self._available[stored].dtype
                if dtype.is_floating_point != wanted.is_floating_point:
                    kind = CODES.get(dtype, str(dtype))
                    raise TesseraError(
                        f"{stored} is stored as {kind}, and the model needs {str(wanted).removeprefix('torch.')}",
                        where=self.where,
                        fix="use bf16, fp16 or fp32 weights: the file is damaged, or has an unsupported quantization",
                        code="weights.dtype-mismatch",
                    )

    def groups(self, weight_map: WeightMap) -> list[TensorGroup]:
        """Return groups of native tensors for writing: members of a group share a source tensor or a target tensor."""
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
        groups = []
        for group in unique.values():
            foreign = weight_map.to_foreign_rows({name: TensorRows.of(blanks[name]) for name in group})
            plans = {name: self._planned(name, rows) for name, rows in foreign.items()}
            groups.append(TensorGroup(tuple(group), plans))
        return groups

    def _planned(self, foreign: str, rows: TensorRows) -> PlannedTensor:
        if rows.dtype is None:
            raise TesseraError(
                f"{foreign} would be concatenated from tensors of different dtypes",
                where=self.where,
                code="weights.mixed-dtypes",
            )
        return PlannedTensor(rows.dtype, rows.shape)


def _join(joined: dict[str, list[str]], group: list[str], other: list[str]) -> list[str]:
    """Merge group `other` into `group`, let its names in `joined` (name -> group) refer to `group`, and return it."""
    if group is not other:
        group.extend(other)
        joined.update(dict.fromkeys(other, group))
    return group


def native_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def main_dtype(tensors: Iterable[Tensor | PlannedTensor]) -> torch.dtype:
    """Return the floating point dtype that most weights have; float32 if there are no weights."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + prod(tensor.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def check_folder_fit(
    folder: Path, tensors: Mapping[str, Tensor], weight_map: WeightMap, *, tied: Mapping[str, str]
) -> None:
    """Raise unless names, shapes and dtypes in a folder's headers fit a model on the meta device."""
    with NativeTensors(SafetensorsForm(folder), weight_map, native_shapes(tensors), tied) as native:
        native.check_kinds(tensors)


def fill_tensors(
    open_stored: Callable[[], StoredForm],
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    tied: Mapping[str, str],
    expected: Iterable[str],
    ranks: Ranks | None = None,
) -> None:
    """Fill a model's tensors (plain or sharded, of any float type) in place. If any rank fails, all ranks raise.

    Each rank opens the weights and reads its own shards. `tied`: other names of shared tensors -> their names in
    `tensors`. `expected`: all tensor names of the model, if `tensors` has only some of them. `ranks`: the ranks that
    call this function; default: all.
    """

    def work() -> None:
        with open_stored() as stored:
            native = NativeTensors(stored, weight_map, native_shapes(tensors), tied, expected=expected)
            native.check_kinds(tensors)
            if Ranks.current().rank == 0:
                stored.check_copies(weight_map)
            sizes = {name: local_shard(target).nbytes for name, target in tensors.items()}
            with WorkProgress("loading weights", sum(sizes.values())) as progress:
                for name, target in tensors.items():
                    native.fill(name, target)
                    progress.count(sizes[name])

    (ranks or Ranks.current()).on_all(work)
