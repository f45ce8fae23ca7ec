"""Parquet files.

A scan reads one row group after another. A single record is put together from the small columns of its row group, which
are kept for a while, and from the one page in which each of its large values lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tessera.data.sources.container import Container, RawRecord, RecordError, file_facts
from tessera.data.sources.parquet_pages import ColumnPages, expanding_columns, large_columns
from tessera.errors import TesseraError, first_line

MAX_GROUP_BYTES = 4 << 30  # of one row group, unpacked: it is in memory while its rows are read
MAX_RECORD_BYTES = 512 << 20  # with images inside
_KEPT_BYTES = 256 << 20  # of groups that rows were read from, in each process; the last one is kept whatever it takes
_HEADER_BYTES = 256 << 20  # of what a footer may make the reader set aside


@dataclass(frozen=True)
class _Group:
    """Hold a row group: a table of the columns that are read whole, and the offsets of the pages of the others."""

    table: Any
    pages: tuple[ColumnPages, ...]


class ParquetFile(Container):
    """Read the records of one file. Images may be paths, bytes, or {"bytes", "path"} as Hugging Face writes them."""

    def __init__(self, path: Path, name: str, groups: list[int], limit: int | None, facts: dict[str, Any]) -> None:
        self.starts = [0, *accumulate(groups)]
        super().__init__(name, self.starts[-1] if limit is None else min(limit, self.starts[-1]), facts)
        self.path = path
        # Neither is carried to other processes.
        self._metadata: Any = None  # of the footer, which takes long to read where there are many groups
        self._kept: OrderedDict[int, _Group] = OrderedDict()  # groups that rows were read from, the last one last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": None, "_kept": OrderedDict()}

    def load(self, number: int) -> RawRecord:
        group, at = self._find(number)
        found = self._group(group, number)
        try:
            large = [(pages.column.path, pages.value(self.path, at)) for pages in found.pages]
        except Exception:  # of a form that only pyarrow knows, or damaged: pyarrow shall say so
            found = self._keep(group, _Group(self._table(group, number), ()))
            large = []
        return self._raw(found.table.slice(at, 1), number, large)

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        assert numbers.step == 1
        number = numbers.start
        while number < numbers.stop:
            group, _ = self._find(number)
            until = min(numbers.stop, self.starts[group + 1])
            try:
                table = self._table(group, number)
            except RecordError as error:
                for lost in range(number, until):
                    yield lost, RecordError(self.location(lost), error.reason)
                number = until
                continue
            for one in range(number, until):
                try:
                    yield one, self._raw(table.slice(one - self.starts[group], 1), one)
                except RecordError as error:
                    yield one, error
            number = until

    def _find(self, row: int) -> tuple[int, int]:
        group = bisect_right(self.starts, row) - 1
        return group, row - self.starts[group]

    def _group(self, group: int, row: int) -> _Group:
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        try:
            with self.path.open("rb") as file:
                reader = self._reader(file)
                rows = reader.metadata.row_group(group).num_rows
                found = tuple(ColumnPages.find(file, column, rows) for column in large_columns(reader, group))
            names = _without(reader, found)
        except Exception:  # see `load`
            found, names = (), None
        return self._keep(group, _Group(self._table(group, row, names), () if names is None else found))

    def _keep(self, group: int, found: _Group) -> _Group:
        self._kept[group] = found
        self._kept.move_to_end(group)
        while len(self._kept) > 1 and sum(one.table.nbytes for one in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def _table(self, group: int, row: int, names: list[str] | None = None) -> Any:
        """Return all columns of a row group, or those named."""
        expected = self.starts[group + 1] - self.starts[group]
        try:
            with self.path.open("rb") as file:
                reader = self._reader(file)
                _check_size(reader, group, names)
                if expanding := expanding_columns(reader, file, group, MAX_GROUP_BYTES):
                    reader = _reader(file, self._metadata, expanding)
                table = reader.read_row_group(group, columns=names, use_threads=False)
        except Exception as error:  # what a reader raises on foreign bytes is not listed anywhere
            raise RecordError(self.location(row), f"row group {group} cannot be read: {first_line(error)}") from None
        if table.num_rows != expected:
            raise RecordError(
                self.location(row), f"row group {group} has {table.num_rows} rows, its header says {expected}"
            )
        return table

    def _reader(self, file: Any) -> Any:
        reader = _reader(file, self._metadata)
        self._metadata = reader.metadata
        return reader

    def _raw(self, one: Any, row: int, large: Sequence[tuple[tuple[str, ...], bytes | str | None]] = ()) -> RawRecord:
        size = one.nbytes + sum(len(value) for _, value in large if value is not None)
        if size > MAX_RECORD_BYTES:
            raise RecordError(self.location(row), f"a record of {size} bytes is too large to be a sample")
        try:
            content = one.to_pylist()[0]
        except Exception as error:  # text that is not UTF-8, offsets that lie
            raise RecordError(self.location(row), f"cannot be read: {first_line(error)}") from None
        for path, value in large:
            within = content
            for name in path[:-1]:
                within = None if within is None else within[name]
            if within is not None:  # no struct, no value in it
                within[path[-1]] = value
        return RawRecord({key: value for key, value in content.items() if value is not None})


def _without(reader: Any, large: Sequence[ColumnPages]) -> list[str] | None:
    """Return the columns that are left to pyarrow; None: all, where it could not tell what is around the others."""
    about = reader.metadata.row_group(0)
    paths = [about.column(number).path_in_schema for number in range(about.num_columns)]
    others = [path for path in paths if path not in {".".join(pages.column.path) for pages in large}]
    around = {pages.column.path[:-1] for pages in large} - {()}
    known = all(any(path.startswith(".".join(names) + ".") for path in others) for names in around)
    return others if large and others and known else None


def open_parquet(path: Path, name: str, limit: int | None) -> ParquetFile:
    """Open a file by its footer. Raise `TesseraError` if that lies or cannot be read."""
    try:
        with path.open("rb") as file:
            reader = _reader(file)
            groups = [reader.metadata.row_group(number).num_rows for number in range(reader.num_row_groups)]
            total = reader.metadata.num_rows
            if len(set(reader.schema_arrow.names)) != len(reader.schema_arrow.names):
                raise TesseraError("two columns have one name", where=str(path))
    except TesseraError:
        raise
    except Exception as error:  # see ParquetFile._group
        raise TesseraError(f"not readable as Parquet: {first_line(error)}", where=str(path)) from None
    if any(rows < 0 for rows in groups) or sum(groups) != total:
        raise TesseraError(f"the footer says {total} rows, its row groups {groups[:8]}", where=str(path))
    return ParquetFile(path, name, groups, limit, file_facts(path))


def _reader(file: Any, metadata: Any = None, dictionaries: Sequence[str] = ()) -> Any:
    """Return a reader of a file. `dictionaries`: columns whose values are not copied out of their dictionary."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise TesseraError("reading Parquet files needs pyarrow", fix="pip install 'tessera-mm[parquet]'") from None
    return pyarrow.parquet.ParquetFile(
        file,
        metadata=metadata,
        read_dictionary=list(dictionaries) or None,
        thrift_string_size_limit=_HEADER_BYTES,
        thrift_container_size_limit=_HEADER_BYTES // 64,
    )


def _check_size(reader: Any, group: int, names: list[str] | None) -> None:
    about = reader.metadata.row_group(group)
    columns = [about.column(number) for number in range(about.num_columns)]
    size = sum(max(0, one.total_uncompressed_size) for one in columns if names is None or one.path_in_schema in names)
    if size > MAX_GROUP_BYTES:
        raise ValueError(f"it has {size} bytes unpacked, {MAX_GROUP_BYTES} are allowed; write smaller row groups")
