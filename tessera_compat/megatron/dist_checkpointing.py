"""Save and load sharded state without pickle: `megatron.core.dist_checkpointing` on safetensors and JSON.

Each rank writes its shards into one safetensors file; a shard that several ranks hold is written by one of them.
`metadata.json` lists every shard, its box (offsets and sizes) in the unsharded tensor and the hash of its file. It is
written last: a folder without it is no checkpoint.
Loading may read any box, so the tensor- and pipeline-parallel sizes may differ from those at saving. Values that are
not tensors are stored in `common.json`. Files of Megatron's own `torch_dist` format contain pickles and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import (
    DTYPES,
    code_of,
    hash_file,
    open_safetensors,
    read_box,
    sync_folder,
    write_file,
    write_safetensors,
)
from tessera.errors import TesseraError, foreign_values, nearest
from tessera.runtime.collective import Ranks
from tessera.runtime.files import read_json_mapping
from tessera_compat.megatron.sharding import LocalNonpersistentObject, ShardedObject, ShardedTensor

METADATA, COMMON = "metadata.json", "common.json"
BACKEND, VERSION = "tessera_safetensors", 1
ShardedStateDict = dict[str, Any]


class CheckpointingException(TesseraError):
    """Raised when a checkpoint cannot be written or read."""


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield all leaves of nested dicts and lists with their paths."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from _leaves(below, (*path, number))
    else:
        yield path, value


_MISSING = object()


def _with_leaves(value: Any, leaves: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return nested containers with their leaves replaced by `leaves`, which maps paths to values.

    A leaf without a value is removed from its dict; in a list it becomes None.
    """
    if isinstance(value, Mapping):
        exchanged = {key: _with_leaves(below, leaves, (*path, key)) for key, below in value.items()}
        return {key: below for key, below in exchanged.items() if below is not _MISSING}
    if isinstance(value, list | tuple):
        items = [_with_leaves(below, leaves, (*path, number)) for number, below in enumerate(value)]
        return [None if item is _MISSING else item for item in items]
    return leaves.get(path, _MISSING)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Any = None,
) -> None:
    """Write a nested dict of `ShardedTensor`, `ShardedObject` and plain values; all ranks call it together."""
    if async_sharded_save:
        raise CheckpointingException(
            "async_sharded_save=True is not offered", where="dist_checkpointing.save", code="megatron.async-save"
        )
    folder, ranks = Path(checkpoint_dir), Ranks.current()
    ranks.on_rank0(lambda: _make_folder(folder))
    tensors, objects, common = _sorted_out(sharded_state_dict)
    written = ranks.on_all(lambda: _write_parts(folder / f"rank-{ranks.rank:05d}.safetensors", tensors, objects))

    def publish() -> None:
        if validate_access_integrity:
            _check_coverage(written)
        metadata = {
            "sharded_backend": BACKEND,
            "sharded_backend_version": VERSION,
            "common_backend": "json",
            "files": [part["file"] for part in written if part["file"]],
            "tensors": _table(written),
            "objects": {key: value for part in written for key, value in part["objects"].items()},
        }
        write_file(folder / COMMON, json.dumps(common).encode())
        write_file(folder / METADATA, json.dumps(metadata).encode())
        sync_folder(folder)

    ranks.on_rank0(publish)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointingException(
            "the folder is not empty",
            where=str(folder),
            fix="empty it, or choose another folder",
            code="megatron.save-folder-not-empty",
        )


def _write_parts(path: Path, tensors: list[ShardedTensor], objects: dict[str, Any]) -> dict[str, Any]:
    """Write the tensor parts whose main replica is on this rank, and return their entries for `metadata.json`."""
    parts, blocks = [], {}
    for shard in tensors:
        for block, (offset, size) in shard.boxes() if shard.is_main_replica else ():
            name = f"{shard.key}@{'.'.join(map(str, offset))}"
            blocks[name] = block
            parts.append([shard.key, name, offset, size, shard.global_shape, code_of(shard.dtype, name)])
    if not blocks:
        return {"parts": parts, "objects": objects, "file": None}
    return {"parts": parts, "objects": objects, "file": vars(write_safetensors(path, blocks))}


def _sorted_out(state: ShardedStateDict) -> tuple[list[ShardedTensor], dict[str, Any], Any]:
    """Return the sharded tensors, the sharded objects that this rank writes, and the plain values."""
    tensors, objects, plain = [], {}, {}
    for path, leaf in _leaves(state):
        if isinstance(leaf, ShardedTensor):
            tensors.append(leaf)
        elif isinstance(leaf, ShardedObject):
            if leaf.is_main_replica:
                objects[leaf.unique_key] = _as_json(leaf.data, leaf.key)
        elif not isinstance(leaf, LocalNonpersistentObject):
            plain[path] = _as_json(leaf, ".".join(map(str, path)))
    return tensors, objects, _with_leaves(state, plain)


def _as_json(value: Any, name: str) -> Any:
    """Convert a value to JSON: a tensor to a list with its dtype. Raise for values that JSON cannot store."""
    if isinstance(value, Tensor):
        return {"__tensor__": value.tolist(), "dtype": code_of(value.dtype, name)}
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise CheckpointingException(
            f"{name} is a {type(value).__name__}, which JSON cannot store, and nothing is pickled",
            where="dist_checkpointing.save",
            fix="save numbers, strings, lists, dicts and tensors; wrap objects of this process in "
            "LocalNonpersistentObject",
            code="megatron.state-not-json",
        ) from None


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__tensor__", "dtype"}:
            return torch.tensor(value["__tensor__"], dtype=DTYPES[value["dtype"]])
        return {key: _from_json(below) for key, below in value.items()}
    return [_from_json(below) for below in value] if isinstance(value, list) else value


def _table(everything: list[dict[str, Any]]) -> dict[str, Any]:
    """Return shape, dtype and stored parts of each unsharded tensor, by key."""
    tensors: dict[str, Any] = {}
    for entries in everything:
        for key, name, offset, size, shape, dtype in entries["parts"]:
            entry = tensors.setdefault(key, {"shape": shape, "dtype": dtype, "parts": []})
            entry["parts"].append({"file": entries["file"]["name"], "name": name, "offset": offset, "size": size})
    return tensors


def _check_coverage(everything: list[dict[str, Any]]) -> None:
    """Raise unless the parts of a tensor cover each element exactly once."""
    for key, entry in _table(everything).items():
        elements = sum(torch.Size(part["size"]).numel() for part in entry["parts"])
        whole = torch.Size(entry["shape"]).numel()
        places = [tuple(part["offset"]) for part in entry["parts"]]
        if elements != whole or len(set(places)) != len(places):
            raise CheckpointingException(
                f"the parts of {key} hold {elements} elements of {whole}: some are missing, or written twice",
                where="dist_checkpointing.save",
                fix="one rank writes each part: give the others another replica_id",
                code="megatron.shards-incomplete",
            )


def _metadata(checkpoint_dir: str | Path) -> dict[str, Any]:
    folder = Path(checkpoint_dir)
    if not (folder / METADATA).is_file():
        fix = "its writing was not finished" if (folder / COMMON).exists() else "name the folder that save() wrote"
        raise CheckpointingException(
            "the folder contains no complete checkpoint", where=str(folder), fix=fix, code="megatron.no-checkpoint"
        )
    metadata = read_json_mapping(folder / METADATA)
    if metadata.get("sharded_backend") != BACKEND:
        raise CheckpointingException(
            f"the format {metadata.get('sharded_backend')!r} is not supported: its files contain pickles",
            where=str(folder / METADATA),
            fix="export the weights to safetensors where they were made, or load them there and save again",
            code="megatron.checkpoint-format",
        )
    return metadata


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> ShardedStateDict:
    """Load `sharded_state_dict`: each `ShardedTensor` becomes this rank's tensor, and plain values are added."""
    folder = Path(checkpoint_dir)
    metadata = _metadata(folder)
    if validate_access_integrity:
        with foreign_values(str(folder / METADATA)):
            sizes = {folder / record["name"]: record["size"] for record in metadata["files"]}
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointingException(
                    "a file of the checkpoint is missing or has another size",
                    where=str(path),
                    code="megatron.checkpoint-file-changed",
                )
    leaves: dict[tuple[Any, ...], Any] = {}
    with _OpenFiles(folder) as files, foreign_values(str(folder / METADATA)):
        for path, leaf in _leaves(sharded_state_dict):
            if isinstance(leaf, ShardedTensor):
                leaves[path] = _loaded(leaf, metadata["tensors"], files, folder)
            elif isinstance(leaf, ShardedObject):
                if leaf.unique_key not in metadata["objects"]:
                    raise _missing(leaf.unique_key, metadata["objects"], folder)
                leaves[path] = _from_json(metadata["objects"][leaf.unique_key])
            elif isinstance(leaf, LocalNonpersistentObject):
                leaves[path] = leaf.unwrap()
    state = _with_leaves(sharded_state_dict, leaves)
    merged: ShardedStateDict = _merged(load_common_state_dict(folder), state)
    return merged


def _merged(common: Any, state: Any) -> Any:
    """Merge two nested containers."""
    if isinstance(common, dict) and isinstance(state, dict):
        keys = [*common, *(key for key in state if key not in common)]
        return {key: _merged(common.get(key), state.get(key)) for key in keys}
    if isinstance(common, list) and isinstance(state, list) and len(common) == len(state):
        return [_merged(*pair) for pair in zip(common, state, strict=True)]
    return common if state is None else state


class _OpenFiles:
    """Keep files open while several parts are read from them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __getitem__(self, name: str) -> Any:
        if name not in self._open:
            manager = open_safetensors(self._folder / Path(name).name)
            self._open[name] = manager, manager.__enter__()
        return self._open[name][1]

    def __exit__(self, *error: Any) -> None:
        for manager, _ in self._open.values():
            manager.__exit__(None, None, None)


def _missing(key: str, stored: Mapping[str, Any], folder: Path) -> CheckpointingException:
    return CheckpointingException(
        f"the checkpoint has no {key!r}",
        where=str(folder),
        nearest=nearest(key, stored),
        code="megatron.checkpoint-key-missing",
    )


def _loaded(shard: ShardedTensor, tensors: Mapping[str, Any], files: _OpenFiles, folder: Path) -> Tensor:
    if shard.key not in tensors:
        raise _missing(shard.key, tensors, folder)
    entry = tensors[shard.key]
    if tuple(entry["shape"]) != shard.global_shape:
        raise CheckpointingException(
            f"{shard.key} has the shape {entry['shape']} in the checkpoint, {list(shard.global_shape)} in the model",
            where=str(folder),
            code="megatron.checkpoint-shape",
        )
    assert shard.data is not None
    result = torch.empty_like(shard.data.detach())
    target = ShardedTensor(**{**vars(shard), "data": result})
    for block, (offset, size) in target.boxes():
        for part in entry["parts"]:
            starts = [max(a, b) for a, b in zip(offset, part["offset"], strict=True)]
            ends = [min(a + s, b + t) for a, s, b, t in zip(offset, size, part["offset"], part["size"], strict=True)]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            sizes = [end - start for start, end in zip(starts, ends, strict=True)]
            inside = [start - at for start, at in zip(starts, part["offset"], strict=True)]
            here = tuple(slice(s - at, s - at + n) for s, at, n in zip(starts, offset, sizes, strict=True))
            block[here].copy_(read_box(files[part["file"]], part["name"], inside, sizes))
    return result


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint."""
    path = Path(checkpoint_dir) / COMMON
    with foreign_values(str(path)):
        common: dict[str, Any] = _from_json(read_json_mapping(path))
    return common


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """Return shape and type of every tensor, without its data."""
    return {
        key: ShardedTensor(
            key,
            None,
            DTYPES[entry["dtype"]],
            *(tuple(entry["shape"]), tuple(entry["shape"]), (0,) * len(entry["shape"]), (1,) * len(entry["shape"])),
        )
        for key, entry in _metadata(checkpoint_dir)["tensors"].items()
    }


def load_plain_tensors(checkpoint_dir: str | Path) -> dict[str, Tensor]:
    """Load all tensors of a checkpoint unsharded, on this rank."""
    whole = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(shard.global_shape, dtype=shard.dtype))
        for key, shard in load_tensors_metadata(checkpoint_dir).items()
    }
    folder = Path(checkpoint_dir)
    tensors = _metadata(folder)["tensors"]
    with _OpenFiles(folder) as files:
        return {key: _loaded(shard, tensors, files, folder) for key, shard in whole.items()}


def verify(checkpoint_dir: str | Path) -> None:
    """Compare every file with its recorded hash. Megatron has no function of this name."""
    folder = Path(checkpoint_dir)
    for record in _metadata(folder)["files"]:
        if hash_file(folder / record["name"]).sha256 != record["sha256"]:
            raise CheckpointingException(
                "the file has changed since it was written",
                where=str(folder / record["name"]),
                code="megatron.checkpoint-file-changed",
            )


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Return whether `save` has finished writing this folder."""
    return (Path(checkpoint_dir) / METADATA).is_file()
