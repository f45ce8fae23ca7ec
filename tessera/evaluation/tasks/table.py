"""Find and open the files of a benchmark: a file or a folder of the user, or a data set on a hub."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import is_hub_id, parse_hub_id
from tessera.data.sources.container import Container, Joined, RecordError
from tessera.data.sources.file_names import source_files
from tessera.data.sources.parquet import ParquetFile
from tessera.data.sources.source import open_record_file
from tessera.data.sources.speech_folders import open_transcripts, transcript_files
from tessera.errors import TesseraError, few_names, nearest_file
from tessera.evaluation.tasks.sections import BenchmarkData
from tessera.evaluation.tasks.template import plain
from tessera.hub.download import Wanted, fetch
from tessera.hub.files import RECORD_SUFFIXES, suffix_of
from tessera.runtime.files import leads_out, open_regular

log = logging.getLogger("tessera")


@dataclass(eq=False)
class Table:
    """Hold the records of a benchmark, and their source."""

    records: Container
    files: list[Path]
    root: Path  # folder that media paths are relative to
    source: str  # hub id with its commit, or names of files

    @cached_property
    def sums(self) -> list[str]:
        """Return the MD5 sum of each file, which publishers of benchmarks list."""
        return [_md5(file) for file in self.files]

    def column(self, name: str) -> Iterator[Any]:
        """Yield the values of a column in order; None for records without a value, and for unreadable ones."""
        parts = self.records.parts if isinstance(self.records, Joined) else [self.records]
        for part in parts:
            if isinstance(part, ParquetFile):
                yield from part.column(name)
            else:
                for _, record in part.scan(range(len(part))):
                    yield None if isinstance(record, RecordError) else record.content.get(name)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return {value of the column `index`: row index}."""
        return {plain(value): number for number, value in enumerate(self.column("index")) if value is not None}


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open_regular(file) as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def open_table(section: BenchmarkData, folder: Path | None, data: Path | None, root: Path | None, where: str) -> Table:
    """Open the files of a benchmark.

    `folder`: folder of the task file. `data`: a file or folder that the user names instead; None: none.
    """
    source = ""
    spoken = transcript_files(data) if data is not None and data.is_dir() else []
    if data is not None and spoken:
        records: Container = open_transcripts(data, None, None)
        return Table(records, spoken, data if root is None else root, f"{data.name}: {len(spoken)} transcripts")
    if data is not None:
        base = data if data.is_dir() else data.parent
        files = _in_folder(data, section, where) if data.is_dir() else source_files(data)[0]
    elif section.path is not None:
        path = (folder or Path()) / section.path
        files, base = source_files(path)
        files = _in_folder(path, section, where) if path.is_dir() else files
    elif section.hub is not None:
        id = parse_hub_id(section.hub if is_hub_id(section.hub) else f"hf://{section.hub}", "dataset", where)
        fetched = fetch(id, where, wanted=Wanted(include=tuple(_patterns(section))))
        base, source = fetched.folder, str(fetched.id)
        files = _in_folder(base, section, where)
    else:
        raise TesseraError(
            f"the data of this benchmark are not on a hub{f': {section.file} is needed' if section.file else ''}",
            where=where,
            fix="name the file, or the folder that contains it: --data PATH",
            code="evaluation.no-data",
        )
    parts = [open_record_file(file, file.name) for file in files]
    records = parts[0] if len(parts) == 1 else Joined(parts)
    if len(records) == 0:
        raise TesseraError("the table has no rows", where=str(files[0]), code="evaluation.empty-table")
    media = root if root is not None else base / section.media if section.media else base
    return Table(records, files, media, source or few_names([file.name for file in files], 3))


def _patterns(section: BenchmarkData) -> list[str]:
    """Return patterns of published file names, the most exact first."""
    if section.file is not None:
        return [section.file, f"*/{section.file}"]
    split = section.split or "*"
    folders = [f"{section.config}/"] if section.config else ["data/", ""]
    return [f"{folder}{split}{rest}" for folder in folders for rest in ("-*.parquet", "/*.parquet", ".parquet")]


def _in_folder(folder: Path, section: BenchmarkData, where: str) -> list[Path]:
    """Return the files of the split in a folder: those with published names.

    Without a published name, the only file of records in the folder is used.
    """
    for pattern in _patterns(section):
        files = sorted(file for file in folder.glob(pattern) if file.is_file() and not leads_out(file, folder))
        if files:
            return files
    beside = sorted(file for file in folder.glob("*") if file.is_file() and suffix_of(file.name) in RECORD_SUFFIXES)
    if len(beside) == 1 and section.file is None and not leads_out(beside[0], folder):
        return beside
    names = [file.name for file in beside]
    raise TesseraError(
        f"the folder {folder} contains no file of this benchmark",
        where=where,
        allowed=_patterns(section),
        nearest=nearest_file(section.file, names) if section.file else None,
        fix="name the file itself: --data FILE",
        code="evaluation.no-data",
    )


def check_sums(table: Table, published: Sequence[str]) -> bool | None:
    """Return whether the file is the published one, and warn if it is not.

    Return None if no sum is published, or if the table has several files.
    """
    if not published or len(table.files) != 1:
        return None
    (actual,) = table.sums
    if actual not in published:
        log.warning(
            "%s is not the published file: its MD5 sum is %s, not %s. Scores may not be comparable",
            table.files[0],
            actual,
            " or ".join(published),
        )
    return actual in published
