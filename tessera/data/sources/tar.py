"""Tar shards as WebDataset writes them: files of one stem that follow each other are one sample."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.data.sources.beside import Shown, assemble, media_kind, stem_of, suffix_of
from tessera.data.sources.container import MAX_ROW_BYTES, Raw, file_facts
from tessera.data.sources.forms import RowError
from tessera.data.sources.table import Table, kept
from tessera.data.sources.tar_members import MAX_MEMBERS, Member, MemberReader, members
from tessera.data.sources.text_files import load_object, load_text
from tessera.data.sources.within import Within


class TarFile:
    """`headers` holds [sample, place of its header] of each member; names and sizes are read again when asked for."""

    def __init__(
        self, path: Path, name: str, headers: Table, limit: int | None, columns: Mapping[str, str], facts: Any
    ) -> None:
        self.path = path
        self.name = name
        self.headers = headers
        self.columns = dict(columns)
        samples = int(headers.array[0, -1]) + 1 if headers.array.size else 0
        self.count = samples if limit is None else min(limit, samples)
        self._facts = facts

    def __len__(self) -> int:
        return self.count

    def place(self, row: int) -> str:
        return f"{self.name}:{row + 1}"

    def facts(self) -> Any:
        return self._facts

    def load(self, row: int) -> Raw:
        with self.path.open("rb") as file:
            return self._sample(MemberReader(self.path, file.fileno()), row)

    def scan(self, rows: range) -> Iterator[tuple[int, Raw | RowError]]:
        with self.path.open("rb") as file:
            reader = MemberReader(self.path, file.fileno())
            for row in rows:
                try:
                    yield row, self._sample(reader, row)
                except RowError as error:
                    yield row, error

    def _members(self, reader: MemberReader, row: int) -> list[Member]:
        samples, headers = self.headers.array
        first, last = np.searchsorted(samples, [row, row + 1]).tolist()
        found: list[Member] = []
        for header in headers[first:last].tolist():
            member = (reader.next(header) or (None, 0))[0]
            if member is None or (found and stem_of(member.name) != stem_of(found[0].name)):
                raise RowError(self.place(row), "the tar file changed since it was opened")
            found.append(member)
        return found

    def _sample(self, reader: MemberReader, row: int) -> Raw:
        found, place = self._members(reader, row), self.place(row)
        about: dict[str, Any] | None = None
        words: str | None = None
        media: list[Shown] = []
        for member in found:
            if member.problem is not None:
                raise RowError(place, member.problem)
            suffix, kind = suffix_of(member.name), media_kind(member.name)
            if kind is not None:
                within = Within(self.path, member.start, member.size, member.name)
                media.append(Shown(kind, member.name, within))
            elif suffix == "json":
                about = load_object(_bytes(reader, member, place), place)
            elif suffix in ("txt", "caption"):
                words = load_text(_bytes(reader, member, place), place)
        if about is None and words is None:
            names = ", ".join(member.name for member in found[:4])
            raise RowError(place, f"no .json or .txt in this sample of the tar file, only {names}")
        return assemble(stem_of(found[0].name), about, words, media, self.columns)


def _bytes(reader: MemberReader, member: Member, place: str) -> bytes:
    if member.size > MAX_ROW_BYTES:
        raise RowError(place, f"{member.name}: {member.size} bytes are too many for a conversation")
    return os.pread(reader.file, member.size, member.start)


def open_tar(
    path: Path, name: str, limit: int | None, cache_folder: Path | None, columns: Mapping[str, str]
) -> TarFile:
    facts = file_facts(path)

    def find() -> np.ndarray:
        table = array("q")
        sample, stem = -1, None
        for member in members(path):
            if stem_of(member.name) != stem:
                sample, stem = sample + 1, stem_of(member.name)
                if limit is not None and sample >= limit:
                    break
            table.extend((sample, member.header))
            if len(table) > 2 * MAX_MEMBERS:
                raise TesseraError(f"the tar file has over {MAX_MEMBERS} members", where=str(path))
        return np.frombuffer(table, dtype=np.int64).reshape(-1, 2).T.copy()  # searched by sample: that lies together

    def sound(headers: np.ndarray) -> bool:
        whole = headers.dtype == np.int64 and headers.ndim == 2 and headers.shape[0] == 2
        return whole and (headers.size == 0 or 0 <= int(headers[1, -1]) < facts["size"])

    return TarFile(path, name, kept("tar", [limit, facts], cache_folder, find, sound=sound), limit, columns, facts)
