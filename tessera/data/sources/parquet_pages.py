"""Single values of large columns of a Parquet file, such as images: of a row group only the page they lie in is read.

The Parquet reader of pyarrow knows row groups and nothing smaller, and a shuffled run asks for one row of a group after
another. This module reads what that needs of the format: page headers (Thrift's compact protocol), levels and indices
(runs and bit-packed numbers), values as they are or by a dictionary. Anything else is left to pyarrow: `Unknown`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

LARGE = 8 << 10  # bytes of a mean value from which on a column is read by pages
MAX_PAGE_BYTES = 512 << 20  # unpacked
_HEADERS = (1 << 12, 1 << 16, 1 << 20)  # so much is read for a page header, then more if it is longer
_CODECS = ("UNCOMPRESSED", "SNAPPY", "ZSTD", "GZIP", "BROTLI")
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_PLAIN, _BY_DICTIONARY = 0, (2, 8)  # encodings


class Unknown(Exception):
    """Report a form of Parquet that this file does not read, or damaged bytes."""


class Column(NamedTuple):
    """Describe a column of one row group: text or bytes, one value per row."""

    path: tuple[str, ...]  # names of structs around it, and its own
    start: int  # of its pages in the file
    size: int
    codec: str
    nested: int  # definition level of a value that is there
    text: bool


def large_columns(reader: Any, group: int) -> list[Column]:
    """Return the columns with values so large that they are read one by one, not for a whole row group."""
    import pyarrow

    about, found = reader.metadata.row_group(group), []
    for number in range(about.num_columns):
        chunk, leaf = about.column(number), reader.schema.column(number)
        path = tuple(chunk.path_in_schema.split("."))
        kind = _type_at(reader.schema_arrow, path)
        fits = (
            chunk.physical_type == "BYTE_ARRAY"
            and leaf.max_repetition_level == 0
            and chunk.compression in _CODECS
            and chunk.total_uncompressed_size > LARGE * max(1, about.num_rows)
            and kind in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.string(), pyarrow.large_string())
        )
        if fits:
            starts = [chunk.data_page_offset, *([chunk.dictionary_page_offset] if chunk.has_dictionary_page else [])]
            text = kind in (pyarrow.string(), pyarrow.large_string())
            size = chunk.total_compressed_size
            found.append(Column(path, min(starts), size, chunk.compression, leaf.max_definition_level, text))
    return found


def expanding_columns(reader: Any, file: BinaryIO, group: int, limit: int) -> list[str]:
    """Return the columns that take more than `limit` bytes if every value is the longest of the column's dictionary.

    A page of indices into a dictionary may stand for any number of copies of a long value, which no header tells.
    """
    about, expanding = reader.metadata.row_group(group), []
    for number in range(about.num_columns):
        chunk = about.column(number)
        count, size = chunk.num_values, chunk.total_uncompressed_size
        if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page or count * size <= limit:
            continue
        try:
            longest = _longest_in_dictionary(file, chunk.dictionary_page_offset, chunk.compression)
        except Exception:  # of another form, or damaged: pyarrow shall say so
            longest = size
        if count * longest > limit:
            expanding.append(chunk.path_in_schema)
    return expanding


def _longest_in_dictionary(file: BinaryIO, start: int, codec: str) -> int:
    header, length = _header(file, start)
    page = _Page(start + length, _number(header, 3), _number(header, 2), header)
    body = _unpacked(_read(file, page), page.unpacked, codec)
    at = longest = 0
    while at + 4 <= len(body):
        (size,) = struct.unpack_from("<I", body, at)
        at, longest = at + 4 + size, max(longest, size)
    return longest


def _type_at(schema: Any, path: tuple[str, ...]) -> Any:
    """Return the type of a column inside of structs; None for anything else."""
    import pyarrow

    if path[0] not in schema.names:  # a name with a dot in it, say
        return None
    kind = schema.field(path[0]).type
    for name in path[1:]:
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


@dataclass(frozen=True)
class _Page:
    start: int  # of what follows its header
    size: int  # there
    unpacked: int
    header: dict[int, Any]


@dataclass
class ColumnPages:
    """Hold the offsets of a column's pages, which `find` reads from their headers, and read single values."""

    column: Column
    rows: int
    pages: list[_Page] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)  # row of the group that each page begins with
    dictionary: _Page | None = None

    @staticmethod
    def find(file: BinaryIO, column: Column, rows: int) -> ColumnPages:
        found, at, row, end = ColumnPages(column, rows), column.start, 0, column.start + column.size
        while at < end and row < rows:
            header, length = _header(file, at)
            page = _Page(at + length, _number(header, 3), _number(header, 2), header)
            kind = _number(header, 1)
            if kind == _DICTIONARY:
                found.dictionary = page
            elif kind in (_DATA, _DATA_V2):
                found.pages.append(page)
                found.firsts.append(row)
                row += _number(_about(header), 1)
            at = page.start + page.size
        if row != rows or at > end:
            raise Unknown(f"pages hold {row} values of {rows} rows")
        return found

    def value(self, path: Path, row: int) -> bytes | str | None:
        """Return the value of a row; None where it has none."""
        page_number = bisect_right(self.firsts, row) - 1
        page = self.pages[page_number]
        with path.open("rb") as file:
            levels, body = self._parts(file, page)
            at = row - self.firsts[page_number]
            if levels[at] != self.column.nested:
                return None
            number = sum(level == self.column.nested for level in levels[:at])
            encoding = _number(_about(page.header), 4 if 8 in page.header else 2)
            count = sum(level == self.column.nested for level in levels)
            if encoding in _BY_DICTIONARY and self.dictionary is not None:
                number = _hybrid(body[1:], body[0], count)[number]
                body = _unpacked(_read(file, self.dictionary), self.dictionary.unpacked, self.column.codec)
            elif encoding != _PLAIN:
                raise Unknown(f"encoding {encoding}")
        found = bytes(_plain(body, number))
        return found.decode() if self.column.text else found

    def _parts(self, file: BinaryIO, page: _Page) -> tuple[list[int], memoryview]:
        """Return the definition levels of a page, and its values."""
        data, about, nested = _read(file, page), _about(page.header), self.column.nested
        count = _number(about, 1)
        if 8 in page.header:
            levels_size, repetition = about.get(5, 0), about.get(6, 0)
            if repetition or not 0 <= levels_size <= len(data):
                raise Unknown("repeated values")
            levels, body = data[:levels_size], data[levels_size:]
            if about.get(7, True):
                body = _unpacked(body, page.unpacked - levels_size, self.column.codec)
        else:
            body, levels = _unpacked(data, page.unpacked, self.column.codec), data[:0]
            if nested:
                (size,) = struct.unpack_from("<I", body)
                levels, body = body[4 : 4 + size], body[4 + size :]
        width = nested.bit_length()
        return (_hybrid(levels, width, count) if nested else [0] * count), body


def _unpacked(data: memoryview, size: int, codec: str) -> memoryview:
    if not 0 <= size <= MAX_PAGE_BYTES:
        raise Unknown(f"a page of {size} bytes")
    if codec == "UNCOMPRESSED":
        return data
    import pyarrow

    return memoryview(pyarrow.Codec(codec.lower()).decompress(data, decompressed_size=size))


def _about(header: dict[int, Any]) -> dict[int, Any]:
    found = header.get(5) or header.get(8)
    if not isinstance(found, dict):
        raise Unknown("a page without a header of its kind")
    return found


def _number(fields: dict[int, Any], name: int) -> int:
    found = fields.get(name)
    if not isinstance(found, int) or found < 0:
        raise Unknown("a page header that says nothing")
    return found


def _read(file: BinaryIO, page: _Page) -> memoryview:
    if page.size > MAX_PAGE_BYTES:
        raise Unknown(f"a page of {page.size} bytes")
    file.seek(page.start)
    data = file.read(page.size)
    if len(data) != page.size:
        raise Unknown("the file ends within a page")
    return memoryview(data)


def _plain(body: memoryview, number: int) -> memoryview:
    """Return one of several values that each follow their length."""
    at = 0
    for _ in range(number):
        at += 4 + struct.unpack_from("<I", body, at)[0]
    (size,) = struct.unpack_from("<I", body, at)
    if at + 4 + size > len(body):
        raise Unknown("a value that goes beyond its page")
    return body[at + 4 : at + 4 + size]


def _hybrid(data: memoryview, width: int, count: int) -> list[int]:
    """Return numbers of `width` bits, stored as runs of equal ones and as bit-packed groups of eight."""
    found: list[int] = []
    at, wide = 0, (width + 7) // 8
    while len(found) < count:
        head, at = _varint(data, at)
        if head & 1:
            for group in range(at, at + (head >> 1) * width, width) if width else ():
                packed = int.from_bytes(data[group : group + width], "little")
                found += [packed >> (n * width) & ((1 << width) - 1) for n in range(8)]
                if len(found) >= count:
                    break
            found += [] if width else [0] * min((head >> 1) * 8, count)
            at += (head >> 1) * width
            if len(found) >= count:
                break
        else:
            found += [int.from_bytes(data[at : at + wide], "little")] * min(head >> 1, count - len(found))
            at += wide
        if at > len(data):
            raise Unknown("numbers that go beyond their page")
    return found[:count]


# ---------------------------------------------------------------------------------------------- Thrift


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """Return the page header at an offset of the file, and its length."""
    for size in _HEADERS:
        file.seek(at)
        data = memoryview(file.read(size))
        try:
            return _struct(data, 0, 0)
        except (IndexError, struct.error):
            continue
    raise Unknown("no page header")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise Unknown("a number without an end")


def _struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by their numbers. Lists and maps occur in no page header."""
    fields: dict[int, Any] = {}
    name = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        kind = head & 0x0F
        if head >> 4:
            name += head >> 4
        else:
            name, at = _signed(data, at)
        if kind in (1, 2):
            fields[name] = kind == 1
        elif kind == 3:
            fields[name], at = data[at], at + 1
        elif kind in (4, 5, 6):
            fields[name], at = _signed(data, at)
        elif kind == 7:
            at += 8
        elif kind == 8:
            size, at = _varint(data, at)
            at += size
            if at > len(data):
                raise IndexError
        elif kind == 12 and depth < 4:
            fields[name], at = _struct(data, at, depth + 1)
        else:
            raise Unknown("a page header of another form")


def _signed(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
