"""Folders of media with words beside them, or with a `metadata` file, or of plain documents."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tessera.core.errors import TesseraError
from tessera.data.sources.beside import WORDS, Shown, assemble, media_kind, stem_of, suffix_of
from tessera.data.sources.container import MAX_ROW_BYTES, Container, Raw
from tessera.data.sources.forms import RowError
from tessera.data.sources.names import MEDIA
from tessera.data.sources.table import Table, kept
from tessera.data.sources.text_files import load_object, load_text

log = logging.getLogger("tessera")

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_CALLED = {"file_name": None, "file_names": None, **{f"{kind}_file_name": kind for kind in MEDIA}}


class FolderFiles:
    """Samples of files that lie in a folder. Their names are one long text, cut at `bounds`: no object for each."""

    def __init__(
        self,
        path: Path,
        kind: Literal["media", "documents"],
        letters: Table,
        bounds: Table,
        limit: int | None,
        columns: Mapping[str, str],
        facts: Any,
    ) -> None:
        self.path = path
        self.kind = kind
        self.letters, self.bounds = letters, bounds
        self.columns = dict(columns)
        samples = int(bounds.array[0, -1]) + 1
        self.count = samples if limit is None else min(limit, samples)
        self._facts = facts

    def __len__(self) -> int:
        return self.count

    def _names(self, row: int) -> list[str]:
        samples, starts, ends = self.bounds.array
        first, last = np.searchsorted(samples, [row, row + 1]).tolist()
        spans = zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True)
        return [os.fsdecode(self.letters.array[start:end].tobytes()) for start, end in spans]

    def place(self, row: int) -> str:
        return self._names(row)[0]

    def facts(self) -> Any:
        return self._facts

    def load(self, row: int) -> Raw:
        names = self._names(row)
        place = names[0]
        if not place.isprintable():
            raise RowError(repr(place), "a file name that is not UTF-8, or not printable")
        if self.kind == "documents":
            return Raw({"text": load_text(self._bytes(names[0], place), place)})
        about: dict[str, Any] | None = None
        words: str | None = None
        media: list[Shown] = []
        for name in names:
            kind = media_kind(name)
            if kind is not None:
                media.append(Shown(kind, name, name))
            elif suffix_of(name) == "json":
                about = load_object(self._bytes(name, place), place)
            else:
                words = load_text(self._bytes(name, place), place)
        if about is None and words is None:
            stem = stem_of(place)
            raise RowError(place, f"no words beside it ({stem}.txt or {stem}.json)")
        return assemble(stem_of(place), about, words, media, self.columns)

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        for row in rows:
            try:
                yield row, self.load(row)
            except RowError as error:
                yield row, error

    def _bytes(self, name: str, place: str) -> bytes:
        try:
            with (self.path / name).open("rb") as file:
                data = file.read(MAX_ROW_BYTES + 1)
        except OSError as error:
            raise RowError(place, f"cannot be read: {name} ({error.strerror})") from None
        if len(data) > MAX_ROW_BYTES:
            raise RowError(place, f"{name} is too large to be a text")
        return data


class Metadata:
    """Rows of a `metadata` file, whose `file_name` is media in its folder."""

    def __init__(self, rows: Container, columns: Mapping[str, str]) -> None:
        self.rows = rows
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, row: int) -> str:
        return self.rows.place(row)

    def load(self, row: int) -> Raw:
        return self._named(self.rows.load(row), row)

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        for row, raw in self.rows.scan(rows):
            try:
                yield row, raw if isinstance(raw, RowError) else self._named(raw, row)
            except RowError as error:
                yield row, error

    def facts(self) -> Any:
        return self.rows.facts()

    def _named(self, raw: Raw, row: int) -> Raw:
        content = dict(raw.content)
        media: list[Shown] = []
        for key, kind in _CALLED.items():
            value = content.pop(key, None)
            for name in value if isinstance(value, list) else [] if value is None else [value]:
                found = kind or (media_kind(name) if isinstance(name, str) else None)
                if found is None:
                    raise RowError(self.place(row), f"{key} names no picture, clip or sound: {name!r:.80}")
                media.append(Shown(found, name, name))
        return assemble(self.place(row), content, None, media, self.columns)


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names of files below a folder, sorted, with what the disk knows of them. Linked folders are not entered."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        within = os.path.relpath(here, folder)
        for name in sorted(files):
            if not name.startswith("."):
                yield name if within == "." else f"{within}/{name}", os.stat(os.path.join(here, name))


def open_files(
    path: Path,
    kind: Literal["media", "documents"],
    limit: int | None,
    cache_folder: Path | None,
    columns: Mapping[str, str],
) -> FolderFiles:
    """`media`: pictures, clips or sounds with words of the same stem; `documents`: each .txt is one."""
    wanted: list[str] = []
    digest = hashlib.sha256()
    for name, stat in walk(path):
        if suffix_of(name) == "txt" if kind == "documents" else media_kind(name) or suffix_of(name) in WORDS:
            wanted.append(name)
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    facts = {"path": str(path.resolve()), "files": len(wanted), "listing": digest.hexdigest()}
    groups = _together(wanted) if kind == "media" else [[name] for name in wanted]
    if not groups:
        raise TesseraError(f"nothing to read in the folder {path}", where="data")
    names = [os.fsencode(name) for group in groups for name in group]

    def bounds() -> np.ndarray:
        ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        lengths = np.array([len(name) for name in names], dtype=np.int64)
        sample = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        return np.stack([sample, ends - lengths, ends])

    def letters() -> np.ndarray:
        return np.frombuffer(b"".join(names), dtype=np.uint8)

    return FolderFiles(
        path,
        kind,
        kept("names", [kind, facts], cache_folder, letters),
        kept("bounds", [kind, facts], cache_folder, bounds),
        limit,
        columns,
        facts,
    )


def _together(names: list[str]) -> list[list[str]]:
    """Files of one stem, media first. Words without media (a README, a list of classes) are no sample."""
    groups: list[list[str]] = []
    alone = 0
    for _, same in groupby(sorted(names, key=lambda name: (stem_of(name), name)), key=stem_of):
        group = sorted(same, key=lambda name: (media_kind(name) is None, name))
        if media_kind(group[0]) is None:
            alone += 1
        else:
            groups.append(group)
    if alone:
        log.warning("%d files of words have no picture, clip or sound beside them and are passed over", alone)
    return groups
