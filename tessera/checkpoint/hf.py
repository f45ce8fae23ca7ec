"""Load weights from folders of published models into any parallel layout, and plan folders to write.

Only safetensors files are read and written, never pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.checkpoint.files import box_slices
from tessera.checkpoint.forms import NativeTensors, SafetensorsForm, StoredForm, fill_tensors, main_dtype
from tessera.checkpoint.publish import pretty_json
from tessera.checkpoint.writer import plan_safetensors
from tessera.runtime.collective import Ranks
from tessera.runtime.modules import whole_tensor
from tessera.weights.file_plan import FilePlan, FolderPlan, PlannedTensor
from tessera.weights.layouts import CONFIG_FILE, new_weight_files
from tessera.weights.map import WeightMap

SHARD_BYTES = 5_000_000_000


# ---------------------------------------------------------------------------------------------- reading


def load_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
    ranks: Ranks | None = None,
) -> None:
    """Fill `tensors` in place from the safetensors of a folder; see `fill_tensors`."""
    fill_tensors(lambda: SafetensorsForm(folder), tensors, weight_map, tied or {}, expected, ranks)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the floating point dtype of most weights of a folder."""
    with SafetensorsForm(folder) as stored:
        return main_dtype(stored.tensors().values())


# ---------------------------------------------------------------------------------------------- writing


Plans = dict[str, PlannedTensor]


def _split_into_files(tensors: Mapping[str, Tensor], weight_map: WeightMap, shard_bytes: int) -> list[Plans]:
    """Divide tensors into files of at most `shard_bytes`. All tensors made from one model tensor are in one file.

    If they are larger than `shard_bytes`, they get a larger file without other tensors.
    """
    files: list[list[Plans]] = [[]]
    space = shard_bytes
    for names in dict.fromkeys(weight_map.group_of(name) for name in tensors):
        foreign = weight_map.to_foreign({name: tensors[name] for name in names})
        group = {key: PlannedTensor.of(blank) for key, blank in foreign.items()}
        size = sum(plan.nbytes for plan in group.values())
        if size > space and files[-1]:
            files.append([])
            space = shard_bytes
        files[-1].append(group)
        space -= size
    # Write large dtypes first, for alignment. The first tensor of a group decides: for fp8, the scale of the weight.
    ordered = (sorted(groups, key=lambda group: -next(iter(group.values())).dtype.itemsize) for groups in files)
    return [{key: plan for group in groups for key, plan in group.items()} for groups in ordered]


def plan_folder(
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    like: Mapping[str, str] | None = None,
) -> FolderPlan:
    """Plan a Hugging Face folder from the dtypes and shapes of native tensors.

    `like`: tensor name -> file name in another folder. If it has all tensors, the new folder uses the same file names,
    unless that is a single file with another name than usual.
    """
    contents = _split_into_files(tensors, weight_map, shard_bytes)
    names, index = new_weight_files(config, len(contents))
    files = dict(zip(names, contents, strict=True))
    every = {key: plan for content in contents for key, plan in content.items()}
    assert len(every) == sum(map(len, contents)), "a weight map gives each tensor a name of its own"
    if like and all(key in like for key in every):
        theirs: dict[str, Plans] = {}
        for key, plan in every.items():
            theirs.setdefault(like[key], {})[key] = plan
        if len(theirs) > 1 or new_weight_files(config, 1)[0][0] in theirs:
            files = dict(sorted(theirs.items()))
    weights = plan_safetensors(files)
    plans = {CONFIG_FILE: FilePlan.of_bytes(pretty_json(config)), **weights.files}
    if len(files) > 1:
        table = {key: weights.places[key][0].file for key in sorted(weights.places)}
        size = sum(plan.nbytes for plan in every.values())
        plans[index] = FilePlan.of_bytes(pretty_json({"metadata": {"total_size": size}, "weight_map": table}))
    return FolderPlan(plans, weights.places)


# ---------------------------------------------------------------------------------------------- a model in memory


class GatheredForm(StoredForm):
    """Read the tensors of a model that is sharded over ranks. Reading a tensor gathers it on rank 0.

    Gathering is collective: rank 0 reads tensors in the order of `gathering`, and the other ranks send in this order.
    """

    weight_map = WeightMap((), same_names=True)
    in_order = True

    def __init__(self, tensors: Mapping[str, Tensor], prepare: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """`tensors`: of this rank. `prepare` (name, tensor) returns what is gathered instead."""
        self.where = "the model"
        self._ranks, self._tensors, self._prepare = Ranks.current(), tensors, prepare
        self._holders = _holders(self._ranks, tensors)
        self._waiting: list[str] = []

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {name: plan for name, (_, plan) in self._holders.items()}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        tensor = self._gather(name)
        assert tensor is not None, "rank 0 reads"
        return tensor if sizes is None else tensor[box_slices(offsets or [0] * len(sizes), sizes)]

    @contextmanager
    def gathering(self, names: Sequence[str]) -> Iterator[None]:
        """Gather tensors on rank 0 in the order of `names`.

        Rank 0 reads them inside of the `with` block; other ranks send their shards at its end.
        """
        self._waiting = list(reversed(names))
        yield
        # Other ranks send all tensors here. If writing failed on rank 0, it must still receive the remaining ones.
        while self._waiting:
            self._gather(self._waiting[-1])

    @torch.no_grad()
    def _gather(self, name: str) -> Tensor | None:
        """Return the unsharded tensor on rank 0, in host memory."""
        assert self._waiting.pop() == name, "tensors are read in order"
        tensor = self._tensors.get(name)
        if tensor is not None and self._prepare is not None:
            tensor = self._prepare(name, tensor)
        full = _gather(self._ranks, tensor, *self._holders[name])
        return None if full is None or self._ranks.rank else full.detach().cpu().contiguous()


class WithOtherParts(StoredForm):
    """Read the tensors of a model from one form, and those of its other parts from the folder of its weights."""

    def __init__(self, model: StoredForm, folder: Path, prefixes: tuple[str, ...]) -> None:
        self.where, self.in_order, self._model = model.where, model.in_order, model
        self.weight_map = None if model.weight_map is None else replace(model.weight_map, same_names=True)
        self._folder = SafetensorsForm(folder)
        stored = self._folder.tensors()
        self._parts = {name: plan for name, plan in stored.items() if name.startswith(prefixes)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of other parts."""
        return {name: plan.shape for name, plan in self._parts.items()}

    def __exit__(self, *_: Any) -> None:
        self._model.__exit__()
        self._folder.__exit__()

    def gathering(self, names: Sequence[str]) -> AbstractContextManager[None]:
        return self._model.gathering([name for name in names if name not in self._parts])

    def tensors(self) -> Mapping[str, PlannedTensor]:
        return {**self._model.tensors(), **self._parts}

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        return (self._folder if name in self._parts else self._model).read(name, offsets, sizes)


def gathered(
    tensors: Mapping[str, Tensor],
    prepare: Callable[[str, Tensor], Tensor] | None = None,
    folder: Path | None = None,
    other_parts: tuple[str, ...] = (),
) -> NativeTensors:
    """Return the native tensors of a model that is sharded over ranks; see `GatheredForm`.

    `other_parts`: prefixes of further tensors, which are read from the folder and keep their names.
    """
    form: StoredForm = GatheredForm(tensors, prepare)
    if folder is not None and other_parts:
        form = WithOtherParts(form, folder, other_parts)
    names = form.tensors()
    return NativeTensors(form, GatheredForm.weight_map, {name: plan.shape for name, plan in names.items()}, {})


def _holders(ranks: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, PlannedTensor]]:
    """Return for each tensor the first rank that has a shard of it, and its full shape and dtype.

    Ranks of different pipeline stages have different tensors.
    """
    here = {name: PlannedTensor.of(tensor) for name, tensor in tensors.items()}
    holders: dict[str, tuple[int, PlannedTensor]] = {}
    for rank, plans in enumerate(ranks.on_all(lambda: here)):
        for name, plan in plans.items():
            holders.setdefault(name, (rank, plan))
    return holders


def names_on_ranks(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors of all ranks."""
    return list(_holders(Ranks.current(), tensors))


@torch.no_grad()
def _gather(ranks: Ranks, tensor: Tensor | None, holder: int, plan: PlannedTensor) -> Tensor | None:
    """Return the unsharded tensor on rank 0. If rank 0 has no shard, the rank `holder` sends the tensor."""
    full = None if tensor is None else whole_tensor(tensor)
    if holder == 0:
        return full
    if ranks.rank == holder and full is not None:
        dist.send(full.cpu().contiguous(), dst=0)  # send from host memory, since rank 0 writes it from there
    if ranks.rank == 0:
        full = torch.empty(plan.shape, dtype=plan.dtype)
        dist.recv(full, src=holder)
    return full


def gather_on_rank0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the unsharded tensors of all ranks on rank 0, and an empty mapping elsewhere. For small tensors."""
    ranks = Ranks.current()
    full = {name: _gather(ranks, tensors.get(name), *holder) for name, holder in _holders(ranks, tensors).items()}
    return {name: tensor for name, tensor in full.items() if tensor is not None and ranks.rank == 0}
