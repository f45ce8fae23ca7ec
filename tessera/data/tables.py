"""Named arrays in one file: written whole or not at all, read through a memory map that all processes share.

Every file says the SHA-256 of all that is in it. It is compared when the file is opened, once by each rank: a cache
with a flipped bit would change a run without a word, so it is made again, and that is said. Hashing 10^7 samples takes
less than a second. Worker processes map the file that was checked and do not check it once more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from tessera.core.errors import TesseraError

log = logging.getLogger("tessera")

_HASH = "sha256"  # the entry among a file's facts that holds the hash of everything else in it
_TYPES = {
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "U64": np.uint64,
    "U32": np.uint32,
    "U8": np.uint8,
    "F64": np.float64,
    "F32": np.float32,
}


class Tables(Mapping[str, np.ndarray]):
    """Arrays of a safetensors file, read-only and mapped; what travels to a worker process is the path alone."""

    def __init__(self, file: Path) -> None:
        """`ValueError` or `OSError` when the file is not whole."""
        if file.exists() and not file.is_file():  # opening a pipe would wait for ever
            raise ValueError(f"not a regular file: {file.name}")
        try:
            with safe_open(file, framework="numpy") as checked:  # the library checks the header against the size
                self.about: dict[str, str] = checked.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"not a readable safetensors file: {file.name}: {error}") from None
        self.file = file
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size))
        self._arrays = {
            name: _mapped(file, 8 + size, entry) for name, entry in header.items() if name != "__metadata__"
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tables, (self.file,))


def _mapped(file: Path, start: int, entry: Mapping[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _TYPES:
        raise ValueError(f"{file.name}: arrays of {entry['dtype']} are not kept in tables")
    kind, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
    if 0 in shape:
        return np.empty(shape, kind)
    return np.memmap(file, kind, mode="r", offset=start + entry["data_offsets"][0], shape=shape)


def write_tables(file: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Several processes may write the same file at once: each reader sees a whole one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    beside.write_bytes(b"")
    rights = beside.stat().st_mode  # the library makes files that nobody else may read, unlike all others of a run
    safetensors.numpy.save_file(dense, beside, metadata={**about, _HASH: _content_hash(dense, about)})
    beside.chmod(rights)
    os.replace(beside, file)


def open_tables(file: Path, key: str) -> Tables | None:
    """None when there is no such file, or it is not what its name says: it is then made again, and that is logged."""
    if not file.exists():
        return None
    problem = "it holds something else"
    try:
        found = Tables(file)
        if found.about.get("key") == key:
            if _HASH not in found.about:
                problem = "an earlier version wrote it without a hash"
            elif found.about[_HASH] == _content_hash(found, found.about):
                return found
            else:
                problem = "its content does not match its hash"
    except (ValueError, OSError, KeyError, TypeError, OverflowError) as error:
        problem = str(error)
    log.warning("%s cannot be trusted and is made again: %s", file, problem)
    return None


def _content_hash(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Of names, types, shapes and values, and of the facts beside them. Two files with the same hash mean the same."""
    facts = {name: fact for name, fact in about.items() if name != _HASH}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    digest = hashlib.sha256(json.dumps([facts, shapes], sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class MemoryTables(dict[str, np.ndarray]):
    """As `Tables`, without a file behind it: it travels whole."""

    def __init__(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.about = dict(about)

    def __reduce__(self) -> tuple[object, ...]:
        return (MemoryTables, (dict(self), self.about))


AnyTables = Tables | MemoryTables


def keep_tables(file: Path | None, tables: MemoryTables) -> AnyTables:
    if file is None:
        return tables
    try:
        write_tables(file, tables, tables.about)
    except (OSError, SafetensorError) as error:
        raise TesseraError(
            f"what was found out about the data cannot be kept: {error}", where=str(file), fix="see to room and rights"
        ) from None
    kept = open_tables(file, tables.about["key"])
    return tables if kept is None else kept


def narrow(values: np.ndarray) -> np.ndarray:
    """Integers in four bytes each where they fit."""
    bounds = np.iinfo(np.int32)
    fits = len(values) == 0 or (int(values.min()) >= bounds.min and int(values.max()) <= bounds.max)
    return values.astype(np.int32 if fits else np.int64)
