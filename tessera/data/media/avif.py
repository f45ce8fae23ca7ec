"""What the pictures in an AVIF really are: the decoder makes room for the size in its stream, not for the header's."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tessera.core.errors import TesseraError
from tessera.data.media.boxes import boxes
from tessera.data.media.files import Opened, size_of

_META = 1 << 20  # bytes of the box that says where pictures lie
_STREAM = 256  # bytes of a picture that are looked at
_SEQUENCE, _DELIMITER = 1, 2  # kinds of units in an AV1 stream


def check_streams(source: Opened, width: int, height: int) -> None:
    """Refuses a file in which a picture is much larger than the header says."""
    for start in _starts(source):
        source.file.seek(start)
        found = _coded_size(source.file.read(_STREAM))
        if found is not None and found[0] * found[1] > 2 * width * height + (1 << 20):
            raise TesseraError(
                f"damaged image: {source.name} (its header says {width}x{height}, the picture is {found[0]}x{found[1]})"
            )


def _starts(source: Opened) -> Iterator[int]:
    """Where the bytes of each picture begin."""
    found: list[int] = []
    for name, start, end in boxes(source, "image", size_of(source.file)):
        source.file.seek(start)
        if name == b"meta":
            data = source.file.read(min(end - start, _META))
            place = data.find(b"iloc")
            try:
                found += _items(data[place + 4 :]) if place >= 0 else []
            except (struct.error, IndexError):
                raise TesseraError(f"unreadable image: {source.name} (it ends within its header)") from None
        elif name in (b"stco", b"co64"):  # a moving picture: its first frame tells the size of all
            wide = name == b"co64"
            first = source.file.read(16)[8 : 16 if wide else 12]
            found += [int.from_bytes(first, "big")] if first else []
    yield from found


def _items(data: bytes) -> list[int]:
    version, sizes, more = data[0], data[4], data[5]
    numbers = _Numbers(data, 6)
    offset_size, length_size, base_size = sizes >> 4, sizes & 15, more >> 4
    index_size = more & 15 if version in (1, 2) else 0
    starts = []
    for _ in range(numbers.take(2 if version < 2 else 4)):
        numbers.take(2 if version < 2 else 4)  # its name
        inside = numbers.take(2) & 15 if version in (1, 2) else 0
        numbers.take(2)
        base = numbers.take(base_size)
        for extent in range(numbers.take(2)):
            numbers.take(index_size)
            offset = numbers.take(offset_size)
            numbers.take(length_size)
            if extent == 0 and not inside:
                starts.append(base + offset)
    return starts


class _Numbers:
    """Big-endian numbers of given sizes, one after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def take(self, size: int) -> int:
        if self._at + size > len(self._data):
            raise IndexError
        self._at += size
        return int.from_bytes(self._data[self._at - size : self._at], "big")


def _coded_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) in the sequence header of an AV1 stream that begins here; None where none does."""
    at = 0
    while at + 2 <= len(data):
        head = data[at]
        kind, extended, sized = head >> 3 & 15, head >> 2 & 1, head >> 1 & 1
        if head >> 7 or kind not in (_SEQUENCE, _DELIMITER) or not sized:
            return None
        at += 1 + extended
        size = shift = 0
        while at < len(data):
            size |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if not data[at - 1] & 128:
                break
        if kind == _SEQUENCE:
            return _sequence(data[at : at + size])
        at += size
    return None


def _sequence(data: bytes) -> tuple[int, int] | None:
    bits = _Bits(data)
    bits.take(4)  # profile, still picture
    if bits.take(1):  # the short form that still pictures have
        bits.take(5)
    else:
        buffered = 0
        if bits.take(1):  # times of frames
            bits.take(64)
            if bits.take(1):
                bits.skip_counted()
            if bits.take(1):
                buffered = bits.take(5) + 1
                bits.take(42)
        delayed = bits.take(1)
        for _ in range(bits.take(5) + 1):
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if buffered and bits.take(1):
                bits.take(2 * buffered + 1)
            if delayed and bits.take(1):
                bits.take(4)
    wide, high = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(wide) + 1, bits.take(high) + 1


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        return self._value >> self._left & (1 << count) - 1 if self._left >= 0 else 0

    def skip_counted(self) -> None:
        """A number that begins with as many zeros as it has further bits."""
        zeros = 0
        while self._left > 0 and not self.take(1):
            zeros += 1
        self.take(zeros)
