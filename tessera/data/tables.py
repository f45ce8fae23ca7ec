"""Named arrays in one file: written whole or not at all, read through a memory map that all processes share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from tessera.core.errors import TesseraError

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
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, beside, metadata=dict(about)
    )
    os.replace(beside, file)


def open_tables(file: Path, key: str) -> Tables | None:
    """None when there is no such file, or it is not what its name says: it is then made again."""
    try:
        found = Tables(file)
    except (ValueError, OSError):
        return None
    return found if found.about.get("key") == key else None


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
