"""Read Parquet files, without reading their large row groups repeatedly.

pyarrow reads complete row groups, but a shuffled run needs single rows of many groups. So a large row group is spilled
to an Arrow file in the user's cache, which all processes map. A small row group stays in memory.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tessera.data.cache import CACHE_VARIABLE, digest_of, user_cache, warn_once
from tessera.data.sources.container import Container, RawRecord, RecordError, file_facts
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import open_regular, replacing

MAX_GROUP_BYTES = 2 << 30  # size limit of an uncompressed row group, which is in memory while it is spilled
MAX_RECORD_BYTES = 512 << 20  # size limit of a record with its images
SPILL_BYTES = 16 << 20  # row groups above this size are spilled to the cache
SPILLED_BYTES = 200 << 30  # size limit of all spilled row groups; the least recently used ones are deleted
_FREE_SHARE = 0.1  # share of the disk that spilling leaves free
_HELD_BYTES = 256 << 20  # size limit of row groups in the memory of a process; the newest one always stays
_HELD_GROUPS = 64
_HEADER_BYTES = 256 << 20  # size limit of a Parquet footer, passed to pyarrow
_FORMAT = 1  # version of spilled files: increase it when their layout changes


class _Group(NamedTuple):
    """Hold a row group of a Parquet file, or the reason why it is unreadable."""

    table: Any
    bytes: int  # size in the memory of this process; 0: the table is mapped from a file
    problem: RecordError | None = None


class ParquetFile(Container):
    """Read the records of a Parquet file. Images are paths, bytes, or {"bytes", "path"} as Hugging Face writes them."""

    def __init__(self, path: Path, name: str, groups: list[int], limit: int | None, facts: dict[str, Any]) -> None:
        self.starts = [0, *accumulate(groups)]
        super().__init__(name, self.starts[-1] if limit is None else min(limit, self.starts[-1]), facts)
        self.path = path
        # The two attributes below are not pickled.
        self._metadata: Any = None  # parsed footer: parsing takes long if there are many row groups
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # row groups in memory, the last used one at the end

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metadata": None, "_groups": OrderedDict()}

    def load(self, number: int) -> RawRecord:
        group = bisect_right(self.starts, number) - 1
        opened = self._group(group)
        if opened.problem is not None:
            raise RecordError(opened.problem.what, where=self.location(number), code=opened.problem.code)
        return self._raw(opened.table, group, number)

    def column(self, name: str) -> Iterator[Any]:
        """Yield the values of one column in order, without reading other columns, such as images."""
        try:
            with open_regular(self.path) as file:
                reader = _reader(file, self._metadata)
                for group in range(reader.num_row_groups):
                    rows = min(self.starts[group + 1], len(self)) - self.starts[group]
                    if rows <= 0:
                        return
                    if name not in reader.schema_arrow.names:
                        yield from [None] * rows
                        continue
                    if name in _expanding_columns(reader.metadata.row_group(group)):
                        raise ValueError(f"the column {name} has more than {MAX_GROUP_BYTES} bytes")
                    table = reader.read_row_group(group, columns=[name], use_threads=False)
                    yield from table.column(name).slice(0, rows).to_pylist()
        except TesseraError:
            raise
        except Exception as error:  # pyarrow raises undocumented errors on damaged files
            what = f"the column {name} is unreadable: {first_line(error)}"
            raise TesseraError(what, where=str(self.path), code="data.damaged-parquet") from None

    def _group(self, group: int) -> _Group:
        """Return a row group: from memory, mapped from its spilled file, or read from the Parquet file."""
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        self._groups[group] = opened = self._open_group(group)
        size = sum(held.bytes for held in self._groups.values())
        while len(self._groups) > 1 and (size > _HELD_BYTES or len(self._groups) > _HELD_GROUPS):
            size -= self._groups.popitem(last=False)[1].bytes
        return opened

    def _open_group(self, group: int) -> _Group:
        spilled = self._spill_file(group)
        table = _mapped(spilled, self.starts[group + 1] - self.starts[group])
        if table is not None:
            return _Group(table, 0)
        try:
            table = self._read(group)
        except RecordError as error:
            return _Group(None, 0, error)  # stored with its error, so that the group is not read again for each row
        mapped = _mapped(spilled, table.num_rows) if table.nbytes > SPILL_BYTES and _spill(table, spilled) else None
        return _Group(table, table.nbytes) if mapped is None else _Group(mapped, 0)

    def _spill_file(self, group: int) -> Path:
        return user_cache("parquet") / f"{digest_of([_FORMAT, self.facts, group])[:32]}.arrow"

    def _read(self, group: int) -> Any:
        expected = self.starts[group + 1] - self.starts[group]
        try:
            with open_regular(self.path) as file:
                reader = _reader(file, self._metadata)
                self._metadata = reader.metadata
                expanding = _expanding_columns(reader.metadata.row_group(group))
                reader = _reader(file, self._metadata, expanding) if expanding else reader
                table = reader.read_row_group(group, use_threads=False)
        except Exception as error:  # pyarrow raises undocumented errors on damaged files
            what = f"row group {group} is unreadable: {first_line(error)}"
            raise RecordError(what, code="data.damaged-parquet") from None
        if table.num_rows != expected:
            what = f"row group {group} has {table.num_rows} rows, the footer states {expected}"
            raise RecordError(what, code="data.damaged-parquet")
        return table

    def _raw(self, table: Any, group: int, row: int) -> RawRecord:
        import pyarrow

        try:
            record = table.slice(row - self.starts[group], 1)
            for number, column in enumerate(record.schema):
                if column.type != (plain := _without_dictionaries(column.type)):
                    record = record.set_column(number, column.name, record.column(number).cast(plain))
            if record.nbytes > MAX_RECORD_BYTES:
                raise ValueError(f"a record has {record.nbytes} bytes, the limit is {MAX_RECORD_BYTES}")
            content = record.to_pylist()[0]
        except (pyarrow.ArrowException, ValueError, KeyError, IndexError) as error:  # such as text that is not UTF-8
            what = f"the record is unreadable: {first_line(error)}"
            raise RecordError(what, where=self.location(row), code="data.damaged-parquet") from None
        return RawRecord({key: value for key, value in content.items() if value is not None})


def open_parquet(path: Path, name: str, limit: int | None) -> ParquetFile:
    """Open a Parquet file: read its footer. Raise `TesseraError` if the footer is damaged or inconsistent."""
    try:
        with open_regular(path) as file:
            reader = _reader(file)
            groups = [reader.metadata.row_group(number).num_rows for number in range(reader.num_row_groups)]
            total = reader.metadata.num_rows
            if len(set(reader.schema_arrow.names)) != len(reader.schema_arrow.names):
                raise TesseraError("two columns have the same name", where=str(path), code="data.column-twice")
    except TesseraError:
        raise
    except Exception as error:  # pyarrow raises undocumented errors on damaged files
        raise TesseraError(
            f"the Parquet file is unreadable: {first_line(error)}", where=str(path), code="data.damaged-parquet"
        ) from None
    if any(rows < 0 for rows in groups) or sum(groups) != total:
        raise TesseraError(
            f"the footer states {total} rows, but its row groups have {groups[:8]}",
            where=str(path),
            code="data.damaged-parquet",
        )
    return ParquetFile(path, name, groups, limit, file_facts(path))


def _reader(file: Any, metadata: Any = None, dictionaries: Sequence[str] = ()) -> Any:
    """Return a Parquet reader. `dictionaries`: columns that stay dictionary-encoded."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise TesseraError(
            "reading Parquet files needs pyarrow",
            fix="pip install 'tessera-mm[parquet]'",
            code="environment.no-pyarrow",
        ) from None
    return pyarrow.parquet.ParquetFile(
        file,
        metadata=metadata,
        read_dictionary=list(dictionaries) or None,
        thrift_string_size_limit=_HEADER_BYTES,
        thrift_container_size_limit=_HEADER_BYTES // 64,
    )


def _expanding_columns(group: Any) -> list[str]:
    """Return the columns of a row group that could exceed the memory limit if they were dictionary-decoded.

    A dictionary bomb is a long value with very many indices. Raise if the row group itself is too large.
    """
    columns = [group.column(number) for number in range(group.num_columns)]
    size = sum(max(0, column.total_uncompressed_size) for column in columns)
    if size > MAX_GROUP_BYTES:
        raise ValueError(f"{size} bytes uncompressed, the limit is {MAX_GROUP_BYTES}; write smaller row groups")
    return [
        column.path_in_schema
        for column in columns
        if column.physical_type == "BYTE_ARRAY"
        and column.has_dictionary_page
        and column.num_values * column.total_uncompressed_size > MAX_GROUP_BYTES
    ]


def _without_dictionaries(kind: Any) -> Any:
    """Return an Arrow type in which every dictionary type is replaced by its value type."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return kind.value_type
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_without_dictionaries(field.type)) for field in kind])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_without_dictionaries(kind.value_type)))
    return kind


# ---------------------------------------------------------------------------------------------- spilled row groups

_SPILLED = b"tessera.spilled"  # key in the schema metadata of the Arrow file of a spilled row group


def _mapped(file: Path, rows: int) -> Any:
    """Map the table of a spilled file; None if the file is missing or damaged."""
    import pyarrow

    try:
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
        os.utime(file)
    except (OSError, pyarrow.ArrowException):
        return None
    return table if table.num_rows == rows and _SPILLED in (table.schema.metadata or {}) else None


def _spill(table: Any, file: Path) -> bool:
    """Write a table to a file of the cache. If disk space or permission is missing, log a warning and return False."""
    import pyarrow

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not _make_room(file.parent, table.nbytes):
            raise OSError(f"less than {_FREE_SHARE:.0%} of the disk would stay free")
        marked = table.unify_dictionaries().replace_schema_metadata({_SPILLED: b"1"})
        with (
            replacing(file) as fresh,
            pyarrow.OSFile(str(fresh), "wb") as sink,
            pyarrow.ipc.new_file(sink, marked.schema) as writer,
        ):
            writer.write_table(marked)
    except (OSError, pyarrow.ArrowException) as error:
        warn_once(
            f"row groups of Parquet files cannot be spilled to {file.parent}: {first_line(error)}; reading shuffled "
            f"rows is slow; fix: set {CACHE_VARIABLE} to a folder with disk space, or write row groups of a few MB"
        )
        return False
    return True


def _make_room(folder: Path, needed: int) -> bool:
    """Delete the least recently used spilled files until `needed` bytes fit. Return whether they fit."""
    files = sorted(folder.glob("*.arrow"), key=lambda file: file.stat().st_mtime)
    total = sum(file.stat().st_size for file in files)
    disk = shutil.disk_usage(folder)
    free = disk.free
    while files and (total + needed > SPILLED_BYTES or free - needed < _FREE_SHARE * disk.total):
        file = files.pop(0)
        size = file.stat().st_size
        file.unlink(missing_ok=True)  # processes that have mapped the file can still read it
        total, free = total - size, free + size
    return free - needed >= _FREE_SHARE * disk.total
