"""Parquet files: one row group is read at a time, and the last one is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError, first_line
from tessera.data.sources.container import Raw, file_facts
from tessera.data.sources.forms import RowError

MAX_GROUP_BYTES = 4 << 30  # of one row group, unpacked: it is in memory while its rows are read
MAX_ROW_BYTES = 512 << 20  # with pictures inside
_HEADER_BYTES = 256 << 20  # of what a footer may make the reader set aside


class ParquetFile:
    """Rows of one file. Pictures may be paths, bytes, or {"bytes", "path"} as Hugging Face writes them."""

    def __init__(self, path: Path, name: str, groups: list[int], limit: int | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.name = name
        self.starts = [0, *accumulate(groups)]
        self.count = self.starts[-1] if limit is None else min(limit, self.starts[-1])
        self._facts = facts
        self._last: tuple[int, Any] | None = None  # (group, its table): not carried to other processes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def __len__(self) -> int:
        return self.count

    def place(self, row: int) -> str:
        return f"{self.name}:{row + 1}"

    def facts(self) -> dict[str, Any]:
        return self._facts

    def load(self, row: int) -> Raw:
        group, at = self._find(row)
        table = self._group(group, row)
        return self._raw(table.slice(at, 1), row)

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        assert rows.step == 1
        row = rows.start
        while row < rows.stop:
            group, _ = self._find(row)
            until = min(rows.stop, self.starts[group + 1])
            try:
                table = self._group(group, row)
            except RowError as error:
                for lost in range(row, until):
                    yield lost, RowError(self.place(lost), error.reason)
                row = until
                continue
            for one in range(row, until):
                try:
                    yield one, self._raw(table.slice(one - self.starts[group], 1), one)
                except RowError as error:
                    yield one, error
            row = until

    def _find(self, row: int) -> tuple[int, int]:
        group = bisect_right(self.starts, row) - 1
        return group, row - self.starts[group]

    def _group(self, group: int, row: int) -> Any:
        if self._last is not None and self._last[0] == group:
            return self._last[1]
        self._last = None  # two groups are never held at once
        promised = self.starts[group + 1] - self.starts[group]
        try:
            with self.path.open("rb") as file:
                reader = _reader(file)
                _check_size(reader, group)
                table = reader.read_row_group(group, use_threads=False)
        except Exception as error:  # what a reader raises on foreign bytes is not listed anywhere
            raise RowError(self.place(row), f"row group {group} cannot be read: {first_line(error)}") from None
        if table.num_rows != promised:
            raise RowError(self.place(row), f"row group {group} has {table.num_rows} rows, its header says {promised}")
        self._last = (group, table)
        return table

    def _raw(self, one: Any, row: int) -> Raw:
        if one.nbytes > MAX_ROW_BYTES:
            raise RowError(self.place(row), f"a row of {one.nbytes} bytes is too large to be a sample")
        try:
            content = one.to_pylist()[0]
        except Exception as error:  # text that is not UTF-8, offsets that lie
            raise RowError(self.place(row), f"cannot be read: {first_line(error)}") from None
        return Raw({key: value for key, value in content.items() if value is not None})


def open_parquet(path: Path, name: str, limit: int | None, cache_folder: Path | None) -> ParquetFile:
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


def _reader(file: Any) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise TesseraError("reading Parquet files needs pyarrow", fix="pip install 'tessera-mm[parquet]'") from None
    return pyarrow.parquet.ParquetFile(
        file, thrift_string_size_limit=_HEADER_BYTES, thrift_container_size_limit=_HEADER_BYTES // 64
    )


def _check_size(reader: Any, group: int) -> None:
    about = reader.metadata.row_group(group)
    size = sum(max(0, about.column(number).total_uncompressed_size) for number in range(about.num_columns))
    if size > MAX_GROUP_BYTES:
        raise ValueError(f"it has {size} bytes unpacked, {MAX_GROUP_BYTES} are allowed; write smaller row groups")
