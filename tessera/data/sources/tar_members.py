"""Headers of uncompressed tar files, read in place. Nothing is unpacked, and nothing a header says is believed twice.

Known are plain tar, ustar, the pax records `path` and `size`, and GNU long names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from tessera.core.errors import TesseraError

BLOCK = 512
MAX_MEMBERS = 50_000_000
_MAX_NAME_RECORD = 1 << 20  # bytes of a pax or long-name record
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_KINDS = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file"}


class Member(NamedTuple):
    header: int  # where its records begin
    start: int  # of its bytes
    size: int
    name: str
    problem: str | None  # why it is not read


def looks_like_tar(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(BLOCK)
    return len(head) == BLOCK and head[257:262] == b"ustar"


def members(path: Path) -> Iterator[Member]:
    """Files and what pretends to be one, in order; folders are passed over."""
    with path.open("rb") as file:
        reader = MemberReader(path, file.fileno())
        at = 0
        while (found := reader.next(at)) is not None:
            member, at = found
            if member is not None:
                yield member


class MemberReader:
    """Reads headers of an open file."""

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self.file = file
        self.end = os.fstat(file).st_size

    def next(self, at: int) -> tuple[Member | None, int] | None:
        """(member, where the next begins), or None at the end of the archive."""
        first, long_name, records = at, None, dict[str, str]()
        while True:
            block = os.pread(self.file, BLOCK, at)
            if not block and at > 0 and first == at:
                return None  # without the two empty blocks that should end it, as some writers leave it
            if len(block) < BLOCK:
                self._fail("is cut off in a header", at)
            if not block.strip(b"\0"):
                return None
            self._check_sum(block, at)
            kind, size = block[156:157], self._number(block[124:136], at)
            data = at + BLOCK
            if kind not in b"xgLK":
                break
            if size > _MAX_NAME_RECORD:
                self._fail(f"has a name record of {size} bytes", at)
            text = os.pread(self.file, size, data)
            if kind == b"L":
                long_name = text.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"x":
                records = _pax(text)
            at = data + _blocks(size)
        if "size" in records:
            if not records["size"].isdigit() or len(records["size"]) > 18:
                self._fail("has a size that is no number", at)
            size = int(records["size"])
        if kind in b"123456":
            size = 0  # links, devices, folders and pipes have no bytes behind them, whatever they claim
        if data + size > self.end:
            self._fail(f"is cut off: a member of {size} bytes begins where {self.end - data} are left", at)
        after = data + _blocks(size)
        name = records.get("path") or long_name or _plain_name(block)
        if kind == b"5" or name.endswith("/"):
            return None, after
        return Member(first, data, size, name, _problem(kind, name, records)), after

    def _check_sum(self, block: bytes, at: int) -> None:
        said = self._number(block[148:156], at)
        if sum(block) - sum(block[148:156]) + 8 * 32 != said:
            self._fail("has a damaged header", at)

    def _number(self, field: bytes, at: int) -> int:
        if field[0] & 0x80:  # too large for octal digits
            number = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        else:
            digits = field.strip(b" \0")
            if digits.strip(b"01234567"):
                self._fail("has a damaged header", at)
            number = int(digits or b"0", 8)
        if number > 1 << 60:
            self._fail("has a damaged header", at)
        return number

    def _fail(self, what: str, at: int) -> NoReturn:
        raise TesseraError(
            f"the tar file {what}",
            where=f"{self.path}, byte {at}",
            fix="download or write it again: what follows cannot be found",
        )


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _plain_name(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _pax(text: bytes) -> dict[str, str]:
    """Records "length key=value\\n". What is damaged is left out: the plain name stands then."""
    records: dict[str, str] = {}
    at = 0
    while at < len(text):
        digits, space, _ = text[at : at + 20].partition(b" ")
        if not space or not digits.isdigit() or not (length := int(digits)):
            break
        key, equals, value = text[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if equals:
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records


def _problem(kind: bytes, name: str, records: dict[str, str]) -> str | None:
    if kind in _KINDS or any(key.startswith("GNU.sparse") for key in records):
        return f"the tar member {name!r:.120} is {_KINDS.get(kind, 'a sparse file')}"
    if kind not in (b"0", b"\0", b"7"):
        return f"the tar member {name!r:.120} is of an unknown kind {kind!r}"
    if not name or "\0" in name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
        return f"the tar member {name!r:.120} has a name that leads outside"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"the tar member {name!r:.120} has a name that is not UTF-8"
    return None


def refuse_compressed(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(8)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise TesseraError(
                f"this file is compressed ({name})",
                where=str(path),
                fix="unpack it first: rows are read where they lie, which needs plain files",
            )
