"""Read archives of `torch.save` without unpickling: tensors, plain containers and scalars.

A tensor becomes a `StoredTensor`, which is memory-mapped when it is read. `torch_plan` plans archives to write.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tessera.checkpoint.legacy.pickles import LARGEST_PICKLE, Described, Keys, Name, PersistentId, describe
from tessera.errors import TesseraError
from tessera.runtime.byte_ranges import byte_ranges
from tessera.runtime.files import open_regular
from tessera.runtime.torch_internals import SAVED_PARAMETER, SAVED_TENSOR, SAVED_TENSOR_WITH_DTYPE
from tessera.weights.file_plan import map_elements

MOST_ENTRIES = 1_000_000
MOST_AXES = 64
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
STORAGES = {dtype: name for name, dtype in _DTYPES.items()}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}  # storage class -> bytes of an element
_BY_DTYPE_NAME = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*_DTYPES.values(), torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
}
REBUILD = Name(*SAVED_TENSOR)
_REBUILD_WITH_DTYPE = Name(*SAVED_TENSOR_WITH_DTYPE)
_PARAMETER = Name(*SAVED_PARAMETER)
ORDERED = Name("collections", "OrderedDict")
_SIZE = Name("torch", "Size")
_ENCODE = Name("_codecs", "encode")
# Prefixes of class names that training scripts pickle beside the weights. Their objects are never created.
_BESIDE = (
    *("argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "builtins.set", "__builtin__.set"),
    *("numpy.", "torch.", "collections."),
)
_NEVER = ("torch.hub", "torch.utils.cpp", "torch.load", "torch.jit", "numpy.load", "numpy.f2py", "numpy.testing")


_UNREADABLE = (
    *(zipfile.BadZipFile, struct.error, EOFError, OSError, RuntimeError),
    *(ValueError, TypeError, OverflowError, MemoryError),
)


def may_contain(name: Name, more: tuple[str, ...] = ()) -> bool:
    """Return whether a file of weights is allowed to refer to this name. `more`: further allowed prefixes."""
    full = str(name)
    return name == _ENCODE or (full.startswith((*_BESIDE, *more)) and not full.startswith(_NEVER))


def damaged(path: Path, what: str) -> TesseraError:
    """Return the error of a damaged file."""
    return TesseraError(f"damaged torch.save file: {what}", where=str(path), code="checkpoint.damaged-torch-file")


@dataclass(frozen=True)
class StoredTensor:
    """Locate a tensor in a file: its storage, and its offset and strides in the storage."""

    file: Path
    storage_offset: int
    """Position of the storage in the file, in bytes."""
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First element in the storage."""

    def check_size(self) -> None:
        """Raise if the tensor has more bytes than its storage: with a stride of 0 it could have any size."""
        if math.prod(self.shape) * self.dtype.itemsize > self.storage_bytes:
            raise damaged(self.file, "a tensor has more elements than its storage")

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the tensor, or a box (offsets and sizes) of it. A contiguous tensor is memory-mapped, not copied."""
        self.check_size()
        all_soon = sizes is None
        offsets, sizes = offsets or (0,) * len(self.shape), self.shape if sizes is None else sizes
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=self.dtype)
        begin = self.offset + sum(n * s for n, s in zip(offsets, self.stride, strict=True))
        span = sum((n - 1) * s for n, s in zip(sizes, self.stride, strict=True)) + 1
        position = self.storage_offset + begin * self.dtype.itemsize
        data = map_elements(self.file, position, span, self.dtype, all_soon=all_soon)
        return data.as_strided(tuple(sizes), self.stride).contiguous()


def read_torch_file(path: Path, classes: tuple[str, ...] = ()) -> Any:
    """Return the content of a `torch.save` file: containers, scalars and `StoredTensor`; other objects as `Described`.

    `classes`: prefixes of other class names than torch's and numpy's that are allowed. Their objects are not created.
    """
    with open_regular(path) as opened:
        return read_torch_archive(opened, path, 0, os.fstat(opened.fileno()).st_size, classes)


def read_torch_archive(opened: BinaryIO, path: Path, start: int, length: int, classes: tuple[str, ...] = ()) -> Any:
    """Return the content of the archive at `start` in an open file."""
    try:
        # zipfile may read at most `LARGEST_PICKLE` bytes; tensors are read from the file directly
        view = byte_ranges(opened, [(start, length)], LARGEST_PICKLE)
        with zipfile.ZipFile(view) as archive:
            entries = _entries(archive, path)
            pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1:
                raise zipfile.BadZipFile(f"it has {len(pickles)} files data.pkl instead of 1")
            folder = pickles[0].removesuffix("data.pkl")
            if entries.get(folder + "byteorder") and archive.read(folder + "byteorder") != b"little":
                raise TesseraError(
                    "the file has big-endian byte order",
                    where=str(path),
                    fix="save it again on an x86 or ARM machine",
                    code="checkpoint.big-endian-file",
                )
            reader = TorchReader(path, start, folder, entries, opened)
            return reader.build(describe(archive.read(pickles[0]), lambda name: may_contain(name, classes), str(path)))
    except _UNREADABLE as error:
        raise TesseraError(
            f"the file is not an archive of torch.save: {error}",
            where=str(path),
            fix="load and save files of torch before 1.6 with a newer torch",
            code="checkpoint.not-torch-file",
        ) from None


def _entries(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's entries by name. Raise unless all of them are plain, uncompressed files."""
    listed = archive.infolist()
    if len(listed) > MOST_ENTRIES:
        raise damaged(path, f"it has {len(listed):,} entries; the limit is {MOST_ENTRIES:,}")
    entries = {entry.filename: entry for entry in listed}
    if len(entries) != len(listed):
        raise damaged(path, "two entries have the same name")
    for entry in listed:
        plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        if not plain or entry.flag_bits & 1 or entry.external_attr & 0x10:  # 0x10 marks a folder: torch reads zeros
            raise damaged(path, f"{entry.filename!r} is compressed, encrypted or marked as a folder")
    return entries


class TorchReader:
    """Convert a decoded pickle to containers, scalars and stored tensors."""

    def __init__(
        self, path: Path, start: int, folder: str, entries: Mapping[str, zipfile.ZipInfo], opened: BinaryIO
    ) -> None:
        self.path, self.start, self.folder, self.entries, self.opened = path, start, folder, entries, opened
        self.keys = Keys()
        self.built: dict[int, Any] = {}  # id of a `Described` -> the value built from it
        self.storages: dict[str, tuple[int, int]] = {}
        self.kinds: dict[str, Name] = {}  # storage key -> storage class

    def build(self, described: Any, depth: int = 0) -> Any:
        if depth > 200:
            raise damaged(self.path, "its content is nested more than 200 levels deep")
        if isinstance(described, (Described, list, tuple, dict)):
            if id(described) not in self.built:
                self.built[id(described)] = None  # inside of itself, a container is replaced by None
                self.built[id(described)] = (
                    self.build_described(described, depth)
                    if isinstance(described, Described)
                    else self.build_container(described, depth)
                )
            return self.built[id(described)]
        if isinstance(described, Name) and described.module == "torch" and described.name in _BY_DTYPE_NAME:
            return _BY_DTYPE_NAME[described.name]
        return described

    def build_container(self, described: Any, depth: int) -> Any:
        if isinstance(described, dict):
            return {
                self.keys(self.build(key, depth + 1)): self.build(item, depth + 1) for key, item in described.items()
            }
        return type(described)(self.build(value, depth + 1) for value in described)

    def build_described(self, described: Described, depth: int) -> Any:
        if described.name in (REBUILD, _REBUILD_WITH_DTYPE):
            return self.tensor(described)
        if described.name == _PARAMETER and described.arguments:
            return self.build(described.arguments[0], depth + 1)
        if described.name == ORDERED:
            pairs = described.arguments[0] if described.arguments else []
            # `build` is not called, since it caches by id: Python may reuse the id of this temporary dictionary.
            items = {self.keys(key): value for key, value in pairs}
            return self.build_container({**items, **described.items}, depth + 1)
        if described.name == _SIZE and len(described.arguments) == 1:
            return tuple(described.arguments[0])
        if described.name == _ENCODE and len(described.arguments) == 2 and isinstance(described.arguments[0], str):
            return described.arguments[0].encode("latin-1")
        return described

    def tensor(self, described: Described) -> StoredTensor:
        try:
            storage, offset, shape, stride = described.arguments[:4]
            # files of torch before 1.6 have a sixth item: a view
            kind, class_name, key, _, elements = storage.value[:5]
            if described.name == _REBUILD_WITH_DTYPE:
                dtype = _BY_DTYPE_NAME[described.arguments[6].name]
            else:
                dtype = _DTYPES[class_name.name]
            shape, stride = self.build(shape), self.build(stride)
            width = 1 if class_name.name == "UntypedStorage" else _DTYPES[class_name.name].itemsize
            numbers = [offset, elements, *shape, *stride]
            sound = kind == "storage" and isinstance(key, str) and isinstance(storage, PersistentId)
            sound = sound and len(shape) == len(stride) <= MOST_AXES
            sound = sound and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
            sound = sound and math.prod(max(size, 1) for size in shape) * dtype.itemsize < 1 << 62
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            sound = False
        if not sound:
            raise damaged(self.path, "the description of a tensor is invalid")
        begin, length = self.storage(key)
        if elements * width != length or self.kinds.setdefault(key, class_name) != class_name:
            raise damaged(self.path, f"the storage {key!r} has another size or dtype than its tensors state")
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if 0 not in shape and last * dtype.itemsize > length:
            raise damaged(self.path, f"a tensor reaches beyond its storage {key!r}")
        return StoredTensor(self.path, begin, length, dtype, tuple(shape), tuple(stride), offset)

    def storage(self, key: str) -> tuple[int, int]:
        """Return the position and the number of bytes of a storage."""
        if key not in self.storages:
            entry = self.entries.get(f"{self.folder}data/{key}")
            if entry is None:
                raise damaged(self.path, f"the storage {key!r} is missing")
            self.opened.seek(self.start + entry.header_offset)
            header = self.opened.read(30)
            if len(header) != 30 or header[:4] != b"PK\x03\x04":
                raise damaged(self.path, f"the zip header of the storage {key!r} is damaged")
            name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            begin = self.start + entry.header_offset + 30 + name + extra
            if begin + entry.file_size > os.fstat(self.opened.fileno()).st_size:
                raise damaged(self.path, f"the storage {key!r} reaches beyond the end of the file")
            self.storages[key] = begin, entry.file_size
        return self.storages[key]
