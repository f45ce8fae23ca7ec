"""Read and write folders of published models, directly into and from any parallel layout.

Safetensors alone are read and written, never a pickle.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.checkpoint.collective import CollectiveError, Failure, Ranks, raise_together
from tessera.checkpoint.files import (
    DTYPES,
    Entry,
    Fault,
    SafetensorsFile,
    no_fault,
    sync_folder,
    write_file,
)
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.planned_folder import plan_safetensors
from tessera.checkpoint.publish import Origin, Staging, begin, pretty_json, show
from tessera.checkpoint.weights import (
    Counts,
    check_copies,
    check_stored_kind,
    fill,
    judge_non_finite,
    non_finite,
    plan_reading,
)
from tessera.runtime.modules import local_shard, whole_tensor
from tessera.runtime.progress import WorkProgress, human_bytes
from tessera.weights.file_plan import FilePlan, FolderPlan
from tessera.weights.layouts import CONFIG_FILE, ROOT, FolderLayout, TransformersFolder, single_folder
from tessera.weights.map import WeightMap

_log = logging.getLogger("tessera")


# ---------------------------------------------------------------------------------------------- reading


def load_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
    component: str = ROOT,
    ranks: Ranks | None = None,
) -> None:
    """Fill `tensors` (plain or sharded, of any float type) in place from the safetensors of a folder's component.

    `tied`: further names of shared tensors -> the name in `tensors`. `expected`: all names of the model, when `tensors`
    is only a part of it. Each rank reads for itself; a failure of one is raised on all. `ranks`: those that call this,
    where they are not all.
    """
    ranks, counts = ranks or Ranks.current(), Counts()

    def work() -> list[str]:
        _load(folder, component, tensors, weight_map, tied or {}, expected, counts)
        return [name for name, (_, nan, infinite) in counts.items() if nan or infinite]

    suspects = {name for found in ranks.on_all(work) for name in found}
    if suspects:  # a shard may be ruined where the whole is not: all ranks add up what they have read
        warnings = judge_non_finite(
            ranks.on_all(lambda: {n: c for n, c in counts.items() if n in suspects}), str(folder)
        )
        if warnings and ranks.rank == 0:
            _log.warning("weights that are not finite, in %s:\n    %s", folder, "\n    ".join(warnings[:20]))


def _load(
    folder: Path,
    component: str,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    tied: Mapping[str, str],
    expected: Iterable[str],
    counts: Counts,
) -> None:
    with FolderTensors(folder, component) as stored:
        shapes, kinds = stored.shapes, stored.kinds
        sources = plan_reading(tensors.keys(), shapes, weight_map, tied=tied, expected=expected, where=str(folder))

        def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
            box = stored.read(name, offsets, sizes)
            (read, nan, infinite), (more_nan, more_infinite) = counts.get(name, (0, 0, 0)), non_finite(box)
            counts[name] = (read + box.numel(), nan + more_nan, infinite + more_infinite)
            return box

        if Ranks.current().rank == 0:
            check_copies(weight_map.for_names(shapes), shapes, read, str(folder))
        sizes = [local_shard(tensors[source.native]).nbytes for source in sources]
        with WorkProgress("loading weights", sum(sizes)) as progress:
            for source, size in zip(sources, sizes, strict=True):
                for name in source.foreign:
                    check_stored_kind(name, kinds[name], tensors[source.native].dtype, str(folder))
                fill(tensors[source.native], source, shapes, read, str(folder))
                progress.count(size)


def stored_dtype(folder: Path, component: str = ROOT) -> torch.dtype:
    """Return the floating point type that most weights of a component are stored in."""
    counts: dict[torch.dtype, int] = {}
    with FolderTensors(folder, component) as stored:
        for name, kind in stored.kinds.items():
            dtype = DTYPES.get(kind)
            if dtype is not None and dtype.is_floating_point:
                counts[dtype] = counts.get(dtype, 0) + prod(stored.shapes[name])
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


# ---------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class ComponentWeights:
    """Hold what is written of one component: this rank's tensors, their weight map and the config.json."""

    tensors: Mapping[str, Tensor]
    weight_map: WeightMap
    config: Mapping[str, Any]


def save_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    **options: Any,
) -> None:
    """Write a folder of one component, of transformers or of diffusers as its configuration says; see
    `save_components` for the options."""
    made = {ROOT: ComponentWeights(tensors, weight_map, config)}
    save_components(folder, made, layout=single_folder(config), **options)


def save_components(
    folder: Path,
    components: Mapping[str, ComponentWeights],
    *,
    layout: Callable[[Path], FolderLayout] = TransformersFolder,
    shard_bytes: int = 5_000_000_000,
    origin: Origin | None = None,
    overwrite: bool = False,
    extras: Callable[[Path], None] | None = None,
    prepare: Callable[[str, Tensor], Tensor] | None = None,
    fault: Fault = no_fault,
) -> None:
    """Write configurations and safetensors with an index, as `layout` names them; the folder appears by one rename.

    Every rank calls this with what it has, which together is the whole model; each tensor is gathered, written by rank
    0 and freed. `extras` (on rank 0) may add further files, such as those of the
    tokenizer, before the folder is published. `prepare` returns what is written instead of a tensor.
    """
    ranks = Ranks.current()
    staging: Staging | None = None
    plans: dict[str, tuple[dict[str, _Holder], list[_Shard]]] = {}
    for name, given in components.items():
        holders = _holders(ranks, given.tensors)
        blanks = {key: holder.blank for key, holder in holders.items()}
        plans[name] = holders, _split_into_files(blanks, given.weight_map, shard_bytes)
    size = sum(_bytes_of(shards) for _, shards in plans.values())
    try:
        staging = ranks.on_rank0(lambda: begin(folder, overwrite, origin))
        target = layout(staging.path)
        for name, (holders, shards) in plans.items():
            inside, given = target.component_folder(name), components[name]
            ranks.on_rank0(lambda inside=inside: inside.mkdir(exist_ok=True))  # type: ignore[misc]
            table: dict[str, str] = {}
            for number, shard in enumerate(shards, start=1):
                path = inside / target.shard_file(number, len(shards), name)
                _write_shard(ranks, path, shard, given, holders, prepare, fault)
                table.update(dict.fromkeys((entry.key for made in shard.values() for entry in made), path.name))
            files = {CONFIG_FILE: pretty_json(given.config)}
            if len(shards) > 1:
                files[target.index_file(name)] = _index(shards, table)
            ranks.on_rank0(lambda inside=inside, files=files: _write_all(inside, files, fault))  # type: ignore[misc]
        root_files = target.root_files({name: given.config for name, given in components.items()})
        ranks.on_rank0(lambda: _finish(staging, folder, root_files, extras, fault, origin, overwrite))
    except BaseException as error:
        if ranks.rank == 0 and staging is not None:
            staging.discard()
        if isinstance(error, CollectiveError):
            raise error.about_writing(ranks, "the export", folder, size) or error from error
        raise
    if ranks.rank == 0:
        _log.info("exported %s to %s", human_bytes(size), folder)


_Shard = dict[tuple[str, ...], list[Entry]]  # native names that go together -> what they become in the file, in order


def _split_into_files(tensors: Mapping[str, Tensor], weight_map: WeightMap, shard_bytes: int) -> list[_Shard]:
    """Return the contents of the files. What one native tensor becomes stays together, so that it is gathered once."""
    shards: list[_Shard] = [{}]
    space = shard_bytes
    for names in dict.fromkeys(weight_map.group_of(name) for name in tensors):
        foreign = weight_map.to_foreign({name: tensors[name] for name in names})
        entries = [Entry(key, blank.dtype, tuple(blank.shape)) for key, blank in foreign.items()]
        size = sum(entry.nbytes for entry in entries)
        if size > space and shards[-1]:
            shards.append({})
            space = shard_bytes
        shards[-1][names] = entries
        space -= size
    # Widest first, so that all are aligned; a weight in eight bits stands behind its wide scales.
    return [dict(sorted(shard.items(), key=lambda item: -item[1][0].dtype.itemsize)) for shard in shards]


def plan_folder(
    layout: FolderLayout,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    shard_bytes: int = 5_000_000_000,
    like: Mapping[str, str] | None = None,
) -> FolderPlan:
    """Plan a transformers folder of native tensors, of which only types and shapes are used.

    `like`: the files of a folder by the names of tensors. If it has all of them, they are divided as they are there.
    """
    shards = _split_into_files(tensors, weight_map, shard_bytes)
    entries = {
        layout.shard_file(number, len(shards)): [entry for made in shard.values() for entry in made]
        for number, shard in enumerate(shards, start=1)
    }
    every = [entry for made in entries.values() for entry in made]
    if like and all(entry.key in like for entry in every):
        theirs: dict[str, list[Entry]] = {}
        for entry in every:
            theirs.setdefault(like[entry.key], []).append(entry)
        if len(theirs) > 1 or layout.shard_file(1, 1) in theirs:
            entries = dict(sorted(theirs.items()))
    weights = plan_safetensors(entries)
    files = {CONFIG_FILE: FilePlan.of_bytes(pretty_json(config)), **weights.files}
    if len(entries) > 1:
        table = {key: places[0].file for key, places in weights.places.items()}
        files[layout.index_file()] = FilePlan.of_bytes(_index(shards, table))
    return FolderPlan(files, weights.places)


def _index(shards: Sequence[_Shard], table: Mapping[str, str]) -> bytes:
    """Return the index of a folder. `table`: files by the names of tensors."""
    return pretty_json({"metadata": {"total_size": _bytes_of(shards)}, "weight_map": dict(sorted(table.items()))})


def _write_shard(
    ranks: Ranks,
    path: Path,
    shard: _Shard,
    given: ComponentWeights,
    holders: Mapping[str, _Holder],
    prepare: Callable[[str, Tensor], Tensor] | None,
    fault: Fault,
) -> None:
    """Gather the tensors of one file, which rank 0 writes."""

    def gathered() -> Iterator[dict[str, Tensor]]:
        for names in shard:
            ready = {name: given.tensors.get(name) for name in names}
            if prepare is not None:
                ready = {name: None if tensor is None else prepare(name, tensor) for name, tensor in ready.items()}
            whole = {name: _gather(ranks, tensor, holders[name]) for name, tensor in ready.items()}
            yield {name: tensor for name, tensor in whole.items() if tensor is not None}

    groups, failures = gathered(), list[Failure]()
    if ranks.rank == 0:
        try:
            with SafetensorsFile(path, [entry for made in shard.values() for entry in made], fault) as file:
                for group in groups:
                    for key, tensor in given.weight_map.to_foreign(group).items():
                        file.put(key, tensor)
        except Exception as error:
            failures.append(Failure.of(error, 0))
    for _ in groups:  # gathering is collective: it goes on after a failed write, and on ranks that do not write
        pass
    raise_together(ranks.on_rank0(lambda: failures))


@dataclass(frozen=True)
class _Holder:
    """Name the rank that provides a tensor, with its shape and type."""

    rank: int
    blank: Tensor


def _holders(ranks: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, _Holder]:
    """Return the holder of every tensor that any rank has: the stages of a pipeline have different ones."""
    found: dict[str, _Holder] = {}
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for rank, table in enumerate(ranks.on_all(lambda: here)):
        for name, (shape, dtype) in table.items():
            if name not in found:
                found[name] = _Holder(rank, torch.empty(shape, dtype=dtype, device="meta"))
    return found


@torch.no_grad()
def _gather(ranks: Ranks, tensor: Tensor | None, holder: _Holder) -> Tensor | None:
    """Return the whole tensor on rank 0. Ranks that hold it gather it, and one sends it if rank 0 has none of it."""
    whole = None
    if tensor is not None:
        whole = whole_tensor(tensor)
    if holder.rank == 0:
        return whole
    if ranks.rank == holder.rank and whole is not None:
        dist.send(whole.cpu().contiguous(), dst=0)  # by the host, where it is written
    if ranks.rank == 0:
        whole = torch.empty_like(holder.blank, device="cpu")
        dist.recv(whole, src=holder.rank)
    return whole


def gather_on_rank0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return on rank 0 the whole tensors of all ranks together, and nothing on the others. For small ones."""
    ranks = Ranks.current()
    found = {name: _gather(ranks, tensors.get(name), holder) for name, holder in _holders(ranks, tensors).items()}
    return {name: whole for name, whole in found.items() if whole is not None and ranks.rank == 0}


def _finish(
    staging: Staging,
    folder: Path,
    files: Mapping[str, bytes],
    extras: Callable[[Path], None] | None,
    fault: Fault,
    origin: Origin | None,
    overwrite: bool,
) -> None:
    for name, content in files.items():
        write_file(staging.path / name, content, fault)
    if extras is not None:
        extras(staging.path)
    show(staging.path, folder, fault, origin, overwrite)
    os.close(staging.lock)


def _write_all(folder: Path, files: Mapping[str, bytes], fault: Fault) -> None:
    """Write small files, and make the names in their folder durable."""
    for name, content in files.items():
        write_file(folder / name, content, fault)
    sync_folder(folder, fault)


def _bytes_of(shards: Sequence[_Shard]) -> int:
    return sum(entry.nbytes for shard in shards for entries in shard.values() for entry in entries)
