"""Hugging Face folders: read directly into any layout, written directly from any. Safetensors only, never a pickle."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.checkpoint.files import (
    Fault,
    free_bytes,
    human_bytes,
    no_fault,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.checkpoint.ranks import Failure, RankFailure, Ranks, raise_together
from tessera.checkpoint.safetensors_file import (
    DTYPES,
    PICKLE_SUFFIXES,
    Entry,
    SafetensorsStream,
    open_safetensors,
    read_box,
    refuse_pickle,
)
from tessera.checkpoint.sound import Counts, check_kind, judge_non_finite, non_finite
from tessera.checkpoint.weights import ReadBox, Shape, cast_to, fill, foreign_entries, plan_reading
from tessera.core.errors import TesseraError
from tessera.core.weightmap import WeightMap

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MARK = "tessera_export.json"  # tells an earlier export, which may be replaced, from a folder of someone else
MAX_INDEX_BYTES = 256 << 20
_COMPARED = 16 << 20  # numbers of two tables that are compared at a time
_log = logging.getLogger("tessera")


# ---------------------------------------------------------------------------------------------- reading


def load_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    *,
    tied: Mapping[str, str] | None = None,
    expected: Iterable[str] = (),
) -> None:
    """Fills `tensors` (plain or sharded, of any float type) in place from the safetensors of a folder.

    `tied`: further names of shared tensors -> the name in `tensors`. `expected`: all names of the model, when `tensors`
    is only a part of it. Each rank reads for itself; a failure of one is raised on all.
    """
    ranks, counts = Ranks.current(), Counts()

    def work() -> list[str]:
        _load(folder, tensors, weight_map, tied or {}, expected, counts)
        return [name for name, (_, nan, infinite) in counts.items() if nan or infinite]

    suspects = {name for found in ranks.each(work) for name in found}
    if suspects:  # a shard may be ruined where the whole is not: all ranks add up what they have read
        told = judge_non_finite(ranks.each(lambda: {n: c for n, c in counts.items() if n in suspects}), str(folder))
        if told and ranks.rank == 0:
            _log.warning("weights that are not finite, in %s:\n    %s", folder, "\n    ".join(told[:20]))


def _load(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    tied: Mapping[str, str],
    expected: Iterable[str],
    counts: Counts,
) -> None:
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_safetensors(path)) for path in weight_files(folder)}
        holder: dict[str, Any] = {}
        shapes: dict[str, Shape] = {}
        kinds: dict[str, str] = {}
        for path, file in files.items():
            for key in file.keys():  # noqa: SIM118 - not a dict
                if key in holder:
                    raise TesseraError(f"{key} is stored in two files", where=str(path))
                holder[key] = file
                view = file.get_slice(key)
                shapes[key], kinds[key] = tuple(view.get_shape()), str(view.get_dtype())
        recipes = plan_reading(tensors.keys(), shapes, weight_map, tied=tied, expected=expected, where=str(folder))

        def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
            piece = read_box(holder[name], name, offsets, sizes)
            (read, nan, infinite), (more_nan, more_infinite) = counts.get(name, (0, 0, 0)), non_finite(piece)
            counts[name] = (read + piece.numel(), nan + more_nan, infinite + more_infinite)
            return piece

        if Ranks.current().rank == 0:
            _check_copies(weight_map, shapes, read, folder)
        for recipe in recipes:
            for name in recipe.theirs:
                check_kind(name, kinds[name], tensors[recipe.ours].dtype, str(folder))
            fill(tensors[recipe.ours], recipe, shapes, read, str(folder))


def _check_copies(weight_map: WeightMap, shapes: Mapping[str, Shape], read: ReadBox, folder: Path) -> None:
    """Where config.json says that two tables are one and the folder has both, they must be equal."""
    spelled = {weight_map.canonical(name): name for name in shapes}
    for copied, ours in weight_map.copies:
        found = weight_map.to_foreign(ours)
        if found is None or copied not in spelled or found[1][0] not in spelled:
            continue
        one, other = spelled[copied], spelled[found[1][0]]
        shape, rows = shapes[one], max(1, _COMPARED // max(1, prod(shapes[one][1:])))
        same = shape == shapes[other]
        for start in range(0, shape[0] if same else 0, rows):
            box = ((start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
            if not torch.equal(read(one, *box), read(other, *box)):
                same = False
                break
        if not same:
            raise TesseraError(
                f"config.json ties the head to the embeddings, and {one} differs from {other}",
                where=str(folder),
                fix='set "tie_word_embeddings": false in config.json (inside of text_config, too, if it is there): the '
                "folder holds a head of its own",
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: by its index, or the one file, or all there are."""
    if folder.is_file():
        refuse_pickle(folder)
    if not folder.is_dir():
        raise TesseraError(f"no such folder: {folder}")
    index = folder / INDEX
    if index.is_file():
        return _indexed(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            refuse_pickle(path)
    raise TesseraError(
        "no safetensors file here",
        where=str(folder),
        allowed=[INDEX, SINGLE, "*.safetensors"],
        fix="name the model's folder",
    )


def stored_dtype(folder: Path) -> torch.dtype:
    """The floating point type that most weights of a folder are stored in."""
    counts: dict[torch.dtype, int] = {}
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(key)
                dtype = DTYPES.get(view.get_dtype())
                if dtype is not None and dtype.is_floating_point:
                    counts[dtype] = counts.get(dtype, 0) + prod(view.get_shape())
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def _indexed(index: Path) -> list[Path]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("far too large")
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TesseraError(f"not an index of weights: {error!r}", where=str(index)) from error
    paths = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise TesseraError(f"the index names a file outside of its folder: {name!r}", where=str(index))
        path = index.parent / name
        refuse_pickle(path)
        if not path.is_file():
            raise TesseraError(f"the index names {name}, which is not there", where=str(index))
        paths.append(path)
    return paths


# ---------------------------------------------------------------------------------------------- writing


def save_folder(
    folder: Path,
    tensors: Mapping[str, Tensor],
    weight_map: WeightMap,
    config: Mapping[str, Any],
    *,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    extras: Callable[[Path], None] | None = None,
    prepare: Callable[[str, Tensor], Tensor] | None = None,
    fault: Fault = no_fault,
) -> None:
    """Writes config.json and safetensors with an index; the folder appears whole, by one rename.

    Every rank calls this with what it has, which together is the whole model; each tensor is gathered, written by rank
    0 and let go. `dtype` casts floating point weights. `extras` (on rank 0) may put further files, such as the
    tokenizer's, into the folder before it is published. `prepare` gives what is written in the place of a tensor.
    """
    ranks = Ranks.current()
    staging: Path | None = None
    holders = _holders(ranks, tensors)
    shards = _deal({name: holder.blank for name, holder in holders.items()}, weight_map, shard_bytes, dtype)
    try:
        staging = ranks.once(lambda: _begin(folder, overwrite))
        table: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(ranks, staging / name, shard, tensors, holders, weight_map, metadata, dtype, prepare, fault)
            table.update(dict.fromkeys((entry.key for entries in shard.values() for entry in entries), name))
        size = sum(entry.nbytes for shard in shards for entries in shard.values() for entry in entries)
        ranks.once(lambda: _finish(staging, folder, table, size, config, extras, fault))
    except BaseException as error:
        if ranks.rank == 0 and staging is not None:
            remove_folder(staging)
        told = _explain(ranks, error, folder, shards) if isinstance(error, RankFailure) else None
        if told is not None:
            raise told from error
        raise
    if ranks.rank == 0:
        _log.info("exported %s to %s", human_bytes(size), folder)


_Shard = dict[tuple[str, ...], list[Entry]]  # our names that go together -> what they become in the file, in order


def _deal(
    tensors: Mapping[str, Tensor], weight_map: WeightMap, shard_bytes: int, dtype: torch.dtype | None
) -> list[_Shard]:
    """Fills one file after another. What comes from one of our tensors stays together, so that it is gathered once."""
    shards: list[_Shard] = [{}]
    room = shard_bytes
    for names in dict.fromkeys(weight_map.together(name) for name in tensors):
        theirs = foreign_entries({name: tensors[name] for name in names}, weight_map, dtype)
        entries = [Entry(key, blank.dtype, tuple(blank.shape)) for key, blank in theirs.items()]
        size = sum(entry.nbytes for entry in entries)
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][names] = entries
        room -= size
    return [dict(sorted(shard.items(), key=lambda item: -item[1][0].dtype.itemsize)) for shard in shards]


def _write_shard(
    ranks: Ranks,
    path: Path,
    shard: _Shard,
    tensors: Mapping[str, Tensor],
    holders: Mapping[str, _Holder],
    weight_map: WeightMap,
    metadata: Mapping[str, str] | None,
    dtype: torch.dtype | None,
    prepare: Callable[[str, Tensor], Tensor] | None,
    fault: Fault,
) -> None:
    """Gathering is collective, writing is not: when rank 0 cannot write, it gathers on to the end of the file."""
    stream = SafetensorsStream(path, [entry for made in shard.values() for entry in made], metadata, fault)
    failures: list[Failure] = []

    def guarded(work: Callable[..., Any], *arguments: Any) -> None:
        if ranks.rank != 0 or failures:
            return
        try:
            work(*arguments)
        except Exception as error:
            failures.append(Failure.of(error, 0))
            stream.abandon()

    def put(whole: Mapping[str, Tensor]) -> None:
        cast = {name: tensor.to(cast_to(tensor, dtype)) for name, tensor in whole.items()}
        for key, tensor in weight_map.theirs(cast).items():
            stream.put(key, tensor)

    guarded(stream.open)

    def ready(name: str) -> Tensor | None:
        tensor = tensors.get(name)
        return tensor if tensor is None or prepare is None else prepare(name, tensor)

    for names in shard:
        gathered = {name: _gather(ranks, ready(name), holders[name]) for name in names}
        guarded(put, {name: whole for name, whole in gathered.items() if whole is not None})
    guarded(stream.close)
    raise_together(ranks.once(lambda: failures))


@dataclass(frozen=True)
class _Holder:
    """Which rank brings a tensor, and its likeness: shape and type without data."""

    rank: int
    blank: Tensor


def _holders(ranks: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, _Holder]:
    """Of every tensor that any rank has, the same on all ranks: the stages of a pipeline have different ones."""
    found: dict[str, _Holder] = {}
    here = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for rank, table in enumerate(ranks.each(lambda: here)):
        for name, (shape, dtype) in table.items():
            if name not in found:
                found[name] = _Holder(rank, torch.empty(shape, dtype=dtype, device="meta"))
    return found


@torch.no_grad()
def _gather(ranks: Ranks, tensor: Tensor | None, holder: _Holder) -> Tensor | None:
    """The whole tensor on rank 0. All ranks that have it gather it; where rank 0 is not among them, one sends it."""
    whole = None
    if tensor is not None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    if holder.rank == 0:
        return whole
    if ranks.rank == holder.rank and whole is not None:
        dist.send(whole.cpu().contiguous(), dst=0)  # by the host, where it is written
    if ranks.rank == 0:
        whole = torch.empty_like(holder.blank, device="cpu")
        dist.recv(whole, src=holder.rank)
    return whole


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0, of all that the ranks have together; nothing on the others. For what is small."""
    ranks = Ranks.current()
    found = {name: _gather(ranks, tensors.get(name), holder) for name, holder in _holders(ranks, tensors).items()}
    return {name: whole for name, whole in found.items() if whole is not None and ranks.rank == 0}


def publish(folder: Path, write: Callable[[Path], None], *, overwrite: bool = False, fault: Fault = no_fault) -> None:
    """A folder of files that `write` makes, on rank 0; it appears whole, by one rename."""

    def work() -> None:
        staging = _begin(folder, overwrite)
        try:
            write(staging)
            _show(staging, folder, fault)
        except BaseException:
            remove_folder(staging)
            raise

    Ranks.current().once(work)


def _begin(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not folder.is_dir():
        raise TesseraError(f"there is a file in the way: {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite and not (folder / MARK).is_file():
        raise TesseraError(
            "the folder is not empty and not an earlier export of ours",
            where=str(folder),
            fix="name another folder, or allow to overwrite this one (everything in it is replaced)",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".staging-{folder.name}~{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    return staging


def _finish(
    staging: Path | None,
    folder: Path,
    table: Mapping[str, str],
    size: int,
    config: Mapping[str, Any],
    extras: Callable[[Path], None] | None,
    fault: Fault,
) -> None:
    assert staging is not None
    write_file(staging / "config.json", _pretty(config), fault)
    if len(set(table.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}
        write_file(staging / INDEX, _pretty(index), fault)
    if extras is not None:
        extras(staging)
    _show(staging, folder, fault)


def _show(staging: Path, folder: Path, fault: Fault) -> None:
    write_file(staging / MARK, _pretty({"format": "tessera-export", "version": 1}), fault)
    sync_folder(staging, fault)
    trash = folder.parent / f".trash-{folder.name}~{uuid.uuid4().hex[:8]}"
    if folder.is_dir():
        rename(folder, trash, fault)
    rename(staging, folder, fault)
    # Only now: until the new one stood, what an interrupted export had left might have been the last copy.
    for path in folder.parent.iterdir():
        if path.name.startswith((f".staging-{folder.name}~", f".trash-{folder.name}~")):
            remove_folder(path)


def _pretty(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _explain(ranks: Ranks, failure: RankFailure, folder: Path, shards: list[_Shard]) -> TesseraError | None:
    causes = [f.error for f in failure.failures if isinstance(f.error, OSError)]
    if not causes:
        return None
    needed = sum(entry.nbytes for shard in shards for entries in shard.values() for entry in entries)
    free = ranks.once(lambda: free_bytes(folder.parent))
    return TesseraError(
        f"the export could not be written: {causes[0].strerror or causes[0]}",
        where=str(folder),
        fix=f"it needs {human_bytes(needed)}; {human_bytes(free)} are free there",
    )
