"""The box structure of MP4 and its relatives, as far as we ask it ourselves: how a clip is turned, and lies about size.

FFmpeg builds a table of all samples that a header claims, before anything is read: a header of a few hundred bytes can
ask for gigabytes. So the claim is compared with the file first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from tessera.core.errors import TesseraError
from tessera.data.media.files import Opened, size_of

_INSIDE = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}
_MANY = 100_000
# (a, b, c, d) of the matrix in a track's header -> quarters of a turn, clockwise
_QUARTERS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 1, (-1, 0, 0, -1): 2, (0, -1, 1, 0): 3}


def check_boxes(source: Opened, kind: str) -> None:
    """Refuses a header that claims more samples than the file has bytes, or that hides in a compressed box."""
    if not _is_mp4(source.file):
        return
    size, claimed = size_of(source.file), 0
    for name, start, _ in boxes(source, kind, size):
        if name == b"cmov":
            raise TesseraError(f"unreadable {kind}: {source.name} (a compressed header)")
        if name in (b"stsz", b"stz2", b"trun"):
            source.file.seek(start + (4 if name == b"trun" else 8))
            claimed += int.from_bytes(source.file.read(4), "big")
            if claimed > size:
                raise TesseraError(
                    f"unreadable {kind}: {source.name} (its header claims {claimed} samples in {size} bytes)"
                )


def quarters(source: Opened, kind: str) -> int:
    """Quarter turns, clockwise, that show the first track with pictures the right way up."""
    if not _is_mp4(source.file):
        return 0
    turned = 0
    for name, start, end in boxes(source, kind, size_of(source.file)):
        source.file.seek(start)
        if name == b"tkhd":
            data = source.file.read(min(end - start, 128))
            at = 52 if data[:1] == b"\x01" else 40
            if len(data) >= at + 20:
                a, b, c, d = (struct.unpack_from(">i", data, at + place)[0] / 65536 for place in (0, 4, 12, 16))
                turned = _QUARTERS.get((round(a), round(b), round(c), round(d)), 0)
        elif name == b"hdlr" and source.file.read(12)[8:] == b"vide":
            return turned
    return 0


def _is_mp4(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(8)[4:] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


def boxes(source: Opened, kind: str, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, start, end) of what each box holds, in the order of the file; boxes of boxes are opened."""
    at, seen = 0, 0
    while at + 8 <= size:
        seen += 1
        if seen > _MANY:
            raise TesseraError(f"unreadable {kind}: {source.name} (more than {_MANY} boxes)")
        source.file.seek(at)
        head = source.file.read(16)
        if len(head) < 8:
            return
        length, name = struct.unpack_from(">I4s", head)
        start = at + 8
        if length == 1 and len(head) == 16:
            (length,) = struct.unpack_from(">Q", head, 8)
            start = at + 16
        end = at + length if length else size
        if end < start:
            return
        yield name, start, min(end, size)
        at = start if name in _INSIDE else end
