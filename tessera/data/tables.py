"""Named arrays in one file: written atomically, read through a memory map that all processes share.

Every file holds the SHA-256 of its content, which each rank compares when it opens the file: a cache with a flipped bit
would change a run silently, so it is made again, with a line in the log. Worker processes map the checked file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from tessera.data.cache import adopt, share, unique_name
from tessera.errors import TesseraError

log = logging.getLogger("tessera")

_ARRAY_FORMAT = 3  # of what cached arrays mean: raise it when that changes
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
    """Map the arrays of a safetensors file, read-only. Only the path is pickled for a worker process."""

    def __init__(self, file: Path) -> None:
        """Map the arrays of a file. Raise `ValueError` or `OSError` if it is damaged."""
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
    """Write a file of tables, atomically: several processes may write the same one at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = unique_name(file)
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    beside.write_bytes(b"")
    permissions = beside.stat().st_mode  # the library makes files that other users may not read
    safetensors.numpy.save_file(dense, beside, metadata={**about, _HASH: _content_hash(dense, about)})
    beside.chmod(permissions)
    os.replace(beside, file)


def open_tables(file: Path, key: str) -> Tables | None:
    """Return the tables in a file; None if it is missing, or, with a warning, if it is damaged or of another key."""
    if not file.exists():
        return None
    problem = "it holds something else"
    try:
        tables = Tables(file)
        if tables.about.get("key") == key:
            if _HASH not in tables.about:
                problem = "an earlier version wrote it without a hash"
            elif tables.about[_HASH] == _content_hash(tables, tables.about):
                return tables
            else:
                problem = "its content does not match its hash"
    except (ValueError, OSError, KeyError, TypeError, OverflowError) as error:
        problem = str(error)
    log.warning("%s cannot be trusted and is made again: %s", file, problem)
    return None


def _content_hash(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Return the hash of names, types, shapes and values, and of the facts beside them."""
    facts = {name: fact for name, fact in about.items() if name != _HASH}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    digest = hashlib.sha256(json.dumps([facts, shapes], sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class MemoryTables(dict[str, np.ndarray]):
    """Hold arrays like `Tables`, but without a file: a pickle contains all of them."""

    def __init__(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.about = dict(about)

    def __reduce__(self) -> tuple[object, ...]:
        return (MemoryTables, (dict(self), self.about))


AnyTables = Tables | MemoryTables


def keep_tables(file: Path | None, tables: MemoryTables, *, shared: bool = False) -> AnyTables:
    """Write tables to a file and return them mapped from it; without a file, return them as they are.

    `shared`: put the file into the user's cache, too, for other runs over the same data.
    """
    if file is None:
        return tables
    try:
        write_tables(file, tables, tables.about)
    except (OSError, SafetensorError) as error:
        raise TesseraError(
            f"the index of the data cannot be written: {error}",
            where=str(file),
            fix="check free disk space and the permissions of the folder",
            code="data.index-not-writable",
        ) from None
    mapped = open_tables(file, tables.about["key"])
    if shared and mapped is not None:
        share(file)
    return tables if mapped is None else mapped


def open_or_adopt(file: Path, key: str) -> Tables | None:
    """Return the tables in a file of a run; if it is missing, those that another run has put into the user's cache."""
    tables = open_tables(file, key)
    return open_tables(file, key) if tables is None and adopt(file) else tables


def cached_tables(
    name: str,
    facts: Any,
    cache_folder: Path | None,
    make: Callable[[], Mapping[str, np.ndarray]],
    is_valid: Callable[[AnyTables], bool],
) -> AnyTables:
    """Return the arrays that `make` returns, from a cache if they are there. They depend on `facts` alone."""
    key = hashlib.sha256(json.dumps([_ARRAY_FORMAT, name, facts], sort_keys=True).encode()).hexdigest()
    file = None if cache_folder is None else cache_folder.absolute() / f"{name}-{key[:32]}.safetensors"
    tables: AnyTables | None = None if file is None else open_or_adopt(file, key)
    if tables is None or not is_valid(tables):
        tables = keep_tables(file, MemoryTables(make(), {"key": key}), shared=True)
    return tables


def narrow(values: np.ndarray) -> np.ndarray:
    """Return integers in four bytes each where they fit."""
    bounds = np.iinfo(np.int32)
    fits = len(values) == 0 or (int(values.min()) >= bounds.min and int(values.max()) <= bounds.max)
    return values.astype(np.int32 if fits else np.int64)
