"""Plan archives of `torch.save`: the pickle, the zip directory, and the positions of tensors.

The plan needs only shapes and dtypes (`PlannedTensor`). Storages are aligned to 64 bytes, as in torch, so that readers
can memory-map them.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.checkpoint.legacy.pickles import Described, Name, PersistentId
from tessera.checkpoint.legacy.torch_files import ORDERED, REBUILD, STORAGES
from tessera.errors import TesseraError
from tessera.weights.file_plan import Place, PlannedTensor

ALIGNMENT = 64
_FOLDER = "archive"
_PADDING = 0x4246  # zip extra field that torch uses for padding
_LIMIT = 0xFFFFFFFF  # larger sizes and positions need zip64 fields
_DATE = 1 << 5 | 1  # 1980-01-01, the earliest date in zip files


@dataclass(frozen=True)
class TorchFilePlan:
    """Describe an archive for `torch.load`: its end, all bytes that are not tensors, and the positions of tensors."""

    end: int
    pieces: tuple[tuple[int, bytes], ...]
    tensors: tuple[Place, ...]
    """In the order of the pickled content, without a file name."""


def plan_torch_file(content: Any, start: int = 0) -> TorchFilePlan:
    """Plan the archive of `content`: containers, scalars, and a `PlannedTensor` for each tensor.

    `start`: the position of the archive in its file, a multiple of 64.
    """
    pickled = PickleWriter()
    archive = _Archive(start)
    archive.add("data.pkl", pickled.dumps(content))
    archive.add("byteorder", b"little")
    places = [archive.announce(f"data/{number}", plan.nbytes) for number, plan in enumerate(pickled.plans)]
    archive.add("version", b"3\n")
    directory = archive.close()
    tensors = tuple(
        Place("", offset, checksums=(header + 14, directory[entry] + 16)) for entry, header, offset in places
    )
    return TorchFilePlan(archive.position, tuple(archive.pieces), tensors)


class _Archive:
    """Lay out a zip file with uncompressed entries."""

    def __init__(self, start: int) -> None:
        assert start % ALIGNMENT == 0
        self.start = self.position = start
        self.pieces: list[tuple[int, bytes]] = []
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, CRC-32, size, position of the header

    def add(self, name: str, data: bytes) -> None:
        _, _, offset = self.announce(name, len(data), zlib.crc32(data))
        self.pieces.append((offset, data))

    def announce(self, name: str, size: int, checksum: int = 0) -> tuple[int, int, int]:
        """Add an entry and reserve space for its data; return (its index, position of its header, of its data)."""
        header, full = self.position, f"{_FOLDER}/{name}".encode()
        extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
        padding = -(header + 30 + len(full) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<HH", _PADDING, padding) + bytes(padding)
        start = b"PK\3\4" + self._common(size, checksum) + struct.pack("<HH", len(full), len(extra))
        self._put(start + full + extra)
        offset = self.position
        self.position += size
        self._entries.append((full, checksum, size, header - self.start))
        return len(self._entries) - 1, header, offset

    def close(self) -> list[int]:
        """Add the zip directory; return the position of each entry in the directory."""
        begin, positions = self.position, []
        for name, checksum, size, header in self._entries:
            positions.append(self.position)
            wide = [size, size] * (size >= _LIMIT) + [header] * (header >= _LIMIT)
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            lengths = struct.pack("<HHHHHLL", len(name), len(extra), 0, 0, 0, 0, min(header, _LIMIT))
            version = struct.pack("<H", 45)
            self._put(b"PK\1\2" + version + self._common(size, checksum) + lengths + name + extra)
        count, length, offset = len(self._entries), self.position - begin, begin - self.start
        if count >= 0xFFFF or length >= _LIMIT or offset >= _LIMIT:
            end = self.position - self.start
            self._put(b"PK\6\6" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, length, offset))
            self._put(b"PK\6\7" + struct.pack("<LQL", 0, end, 1))
        few = min(count, 0xFFFF)
        self._put(b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, few, few, min(length, _LIMIT), min(offset, _LIMIT), 0))
        return positions

    def _common(self, size: int, checksum: int) -> bytes:
        """Return the fields that a local header and a directory entry have in common."""
        short = min(size, _LIMIT)
        return struct.pack("<HHHHHLLL", 45 if size >= _LIMIT else 20, 0, 0, 0, _DATE, checksum, short, short)

    def _put(self, data: bytes) -> None:
        self.pieces.append((self.position, data))
        self.position += len(data)


class PickleWriter:
    """Write pickle protocol 2 for containers, scalars, tensors and `Described` objects."""

    def __init__(self) -> None:
        self.plans: list[PlannedTensor] = []

    def dumps(self, content: Any) -> bytes:
        """Return the pickle. Afterwards, `plans` lists its tensors."""
        return b"\x80\x02" + self._value(content) + b"."

    def _value(self, value: Any) -> bytes:
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                size = value.bit_length() // 8 + 1
                return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
            case float():
                return b"G" + struct.pack(">d", value)
            case str():
                data = value.encode("utf-8")
                return b"X" + len(data).to_bytes(4, "little") + data
            case PlannedTensor():
                return self._tensor(value)
            case Name():
                return b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
            case PersistentId():
                return self._value(value.value) + b"Q"
            case Described():
                called = self._value(value.name) + self._value(value.arguments) + (b"\x81" if value.new else b"R")
                return called if value.state is None else called + self._value(value.state) + b"b"
            case Mapping():
                return b"}(" + b"".join(self._value(k) + self._value(v) for k, v in value.items()) + b"u"
            case tuple():
                return b"(" + b"".join(map(self._value, value)) + b"t"
            case list():
                return b"](" + b"".join(map(self._value, value)) + b"e"
        raise AssertionError(f"{type(value).__name__} cannot be written to a torch.save file")

    def _tensor(self, plan: PlannedTensor) -> bytes:
        """Pickle a tensor that has a storage of its own."""
        if plan.dtype not in STORAGES:
            raise TesseraError(
                f"{plan.dtype} cannot be stored in a file that all versions of torch load",
                fix="convert the weights to bfloat16",
                code="weights.dtype-not-in-torch-files",
            )
        key = str(len(self.plans))
        self.plans.append(plan)
        stride = tuple(math.prod(max(size, 1) for size in plan.shape[axis + 1 :]) for axis in range(len(plan.shape)))
        class_name = Name("torch", STORAGES[plan.dtype])
        storage = PersistentId(("storage", class_name, key, "cpu", math.prod(plan.shape)))
        arguments = (storage, 0, plan.shape, stride, False, Described(ORDERED))
        return self._value(Described(REBUILD, arguments))
