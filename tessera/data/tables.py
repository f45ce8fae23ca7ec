"""Named arrays in one file: written atomically, read through a memory map that all processes share.

Every file contains the SHA-256 of its content, which each rank checks when it opens the file. A damaged file is made
again, with a warning, because a flipped bit would change a run silently. Worker processes map the file without a check.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from tessera.data.cache import adopt, digest_of, share
from tessera.errors import TesseraError
from tessera.runtime.files import replacing

log = logging.getLogger("tessera")

_ARRAY_FORMAT = 3  # version of cached arrays: increase it when their meaning changes
_HASH = "sha256"  # metadata key of the hash of the file's arrays and other metadata
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
    """Map the arrays of a safetensors file, read-only. Only the path is pickled for worker processes."""

    def __init__(self, file: Path) -> None:
        """Map the arrays of a file. Raise `ValueError` or `OSError` if it is damaged."""
        if file.exists() and not file.is_file():  # opening a named pipe would block
            raise ValueError(f"not a regular file: {file.name}")
        try:
            with safe_open(file, framework="numpy") as checked:  # checks the header against the file size
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
        raise ValueError(f"{file.name}: arrays of type {entry['dtype']} are not supported")
    kind, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
    if 0 in shape:
        return np.empty(shape, kind)
    return np.memmap(file, kind, mode="r", offset=start + entry["data_offsets"][0], shape=shape)


def write_tables(file: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write a file of tables atomically, so that several processes can write the same file at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with replacing(file) as fresh:
        fresh.write_bytes(b"")
        # safetensors lets only the owner read its files. Restore the permissions that follow from the umask.
        permissions = fresh.stat().st_mode
        safetensors.numpy.save_file(dense, fresh, metadata={**about, _HASH: _content_hash(dense, about)})
        fresh.chmod(permissions)


def open_tables(file: Path, key: str) -> Tables | None:
    """Return the tables in a file; None if it is missing, or (with a warning) if it is damaged or has another key."""
    if not file.exists():
        return None
    problem = "its key is another"
    try:
        tables = Tables(file)
        if tables.about.get("key") == key:
            if tables.about.get(_HASH) == _content_hash(tables, tables.about):
                return tables
            problem = "its content does not match its hash"
    except (ValueError, OSError, KeyError, TypeError, OverflowError) as error:
        problem = str(error)
    log.warning("%s cannot be used and is written again: %s", file, problem)
    return None


def _content_hash(arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> str:
    """Return the hash of names, types, shapes and values of arrays, and of the metadata `about` them."""
    facts = {name: fact for name, fact in about.items() if name != _HASH}
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    digest = hashlib.sha256(json.dumps([facts, shapes], sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class MemoryTables(dict[str, np.ndarray]):
    """Hold arrays in memory, with the interface of `Tables`. A pickle contains the arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.about = dict(about)

    def __reduce__(self) -> tuple[object, ...]:
        return (MemoryTables, (dict(self), self.about))


AnyTables = Tables | MemoryTables


def keep_tables(file: Path | None, tables: MemoryTables, *, shared: bool = False) -> AnyTables:
    """Write tables to a file and return them mapped from it. If `file` is None, return the tables unchanged.

    `shared`: also put the file into the user's cache, for other runs over the same data.
    """
    if file is None:
        return tables
    try:
        write_tables(file, tables, tables.about)
    except (OSError, SafetensorError) as error:
        raise TesseraError(
            f"the index cannot be written: {error}",
            where=str(file),
            fix="check the free disk space and the permissions of the folder",
            code="data.index-not-writable",
        ) from None
    mapped = open_tables(file, tables.about["key"])
    if shared and mapped is not None:
        share(file)
    return tables if mapped is None else mapped


def open_or_adopt(file: Path, key: str) -> Tables | None:
    """Return the tables in a file of the run folder, or in the user's cache; None if neither has them."""
    tables = open_tables(file, key)
    return open_tables(file, key) if tables is None and adopt(file) else tables


def cached_tables(
    name: str,
    facts: Any,
    cache_folder: Path | None,
    make: Callable[[], Mapping[str, np.ndarray]],
    is_valid: Callable[[AnyTables], bool],
) -> AnyTables:
    """Return the arrays that `make` returns, from a cache if possible. `facts`: JSON of all that `make` depends on."""
    key = digest_of([_ARRAY_FORMAT, name, facts])
    file = None if cache_folder is None else cache_folder.absolute() / f"{name}-{key[:32]}.safetensors"
    tables: AnyTables | None = None if file is None else open_or_adopt(file, key)
    if tables is None or not is_valid(tables):
        tables = keep_tables(file, MemoryTables(make(), {"key": key}), shared=True)
    return tables


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert integers to int32 if all values fit, otherwise to int64."""
    bounds = np.iinfo(np.int32)
    fits = len(values) == 0 or (int(values.min()) >= bounds.min and int(values.max()) <= bounds.max)
    return values.astype(np.int32 if fits else np.int64)
