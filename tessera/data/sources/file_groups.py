"""Samples made of several files with one stem, in a folder or in a tar shard: media, and a text or JSON file.

Nothing is unpacked: `tarfile` reads the headers of a shard once, and members are read in place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tarfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

import numpy as np

from tessera.core.sample import PartKind
from tessera.data.media.files import ArchiveMember, opened
from tessera.data.sources.container import (
    MAX_RECORD_BYTES,
    Container,
    RawRecord,
    RecordError,
    bad_sample,
    fail,
    file_facts,
)
from tessera.data.sources.fields import MEDIA, media_kind, stem_of
from tessera.data.sources.text import load_object, load_text
from tessera.data.tables import AnyTables, cached_tables
from tessera.errors import TesseraError, first_line
from tessera.hub.files import suffix_of
from tessera.runtime.files import open_regular

log = logging.getLogger("tessera")

FolderKind = Literal["media", "documents"]
MAX_MEMBERS = 50_000_000
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_TEXT_SUFFIXES = ("txt", "caption")
_FILE_NAME_KEYS = {"file_name": None, "file_names": None, **{f"{kind}_file_name": kind for kind in MEDIA}}
_MAX_READ_BYTES = 1 << 20  # size limit of a pax or long-name header, which tarfile reads into memory at once
_SPECIAL = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file"}


# ---------------------------------------------------------------------------------------------- records


class MediaFile(NamedTuple):
    """Hold a media file of a sample. `value`: a path below the root, or a member of an archive."""

    kind: PartKind
    name: str
    value: str | ArchiveMember


def assemble(
    stem: str,
    attributes: Mapping[str, Any] | None,
    text: str | None,
    media: Sequence[MediaFile],
    columns: Mapping[str, str],
) -> RawRecord:
    """Make a record of the files with one stem. `attributes`: content of its JSON file. `text`: of its text file.

    If the JSON does not name media, the record gets all media files of the stem.
    """
    record = dict(attributes or {})
    record.setdefault(columns.get("id", "id"), stem)
    text_key = columns.get("text", "text")
    if text is not None:
        record.setdefault(text_key, text)
    elif text_key not in record and isinstance(record.get("caption"), str):
        record[text_key] = record["caption"]
    listed = any(record.get(key) is not None for kind in MEDIA for key in (columns.get(f"{kind}s", f"{kind}s"), kind))
    if not listed and not _parts_name_media(record.get(columns.get("messages", "messages"))):
        for kind in MEDIA:
            values = [item.value for item in media if item.kind == kind]
            if values:
                record[columns.get(f"{kind}s", f"{kind}s")] = values
    members: dict[str, ArchiveMember] = {}
    for item in media:
        if isinstance(item.value, ArchiveMember):
            # A record may name its media by the full path, by the file name, or by the part after the stem.
            for name in (item.name, item.name.rpartition("/")[2], item.name[len(stem) + 1 :]):
                members.setdefault(name, item.value)
    return RawRecord(record, members)


def _parts_name_media(turns: Any) -> bool:
    for turn in turns if isinstance(turns, list) else []:
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and any(part.get(key) is not None for key in (*MEDIA, "path", "url")):
                return True
    return False


class FileGroups(Container):
    """Read samples that consist of several files.

    `tables` has arrays: `sample` is the sample index of each file, `letters` are the bytes of all file names,
    concatenated, and `ends` is where each name ends.
    """

    def __init__(
        self, path: Path, name: str, tables: AnyTables, limit: int | None, columns: Mapping[str, str], facts: Any
    ) -> None:
        count = int(tables["sample"][-1]) + 1 if len(tables["sample"]) else 0
        super().__init__(name, count if limit is None else min(limit, count), facts)
        self.path = path
        self.tables = tables
        self.columns = dict(columns)

    def _files(self, number: int) -> dict[str, int]:
        """Return {file name: file index} of the files of a sample."""
        first, last = np.searchsorted(self.tables["sample"], [number, number + 1]).tolist()
        letters, bounds = self.tables["letters"], self.tables["ends"][first : last + 1].tolist()
        names = [os.fsdecode(letters[start:end].tobytes()) for start, end in pairwise(bounds)]
        return {name: first + offset for offset, name in enumerate(names)}

    def _record(
        self, location: str, files: Mapping[str, int], content: Callable[[str], bytes], media: Sequence[MediaFile]
    ) -> RawRecord:
        attributes: dict[str, Any] | None = None
        text: str | None = None
        for name in files:
            if suffix_of(name) == "json":
                attributes = load_object(content(name), location)
            elif suffix_of(name) in _TEXT_SUFFIXES:
                text = load_text(content(name), location)
        if attributes is None and text is None:
            what = f"the sample has no .json or .txt file, only {', '.join([*files][:4])}"
            raise RecordError(what, where=location, code="data.no-text-file")
        return assemble(stem_of(next(iter(files))), attributes, text, media, self.columns)


def _are_groups(tables: AnyTables) -> bool:
    if not {"sample", "letters", "ends"} <= set(tables):
        return False
    return len(tables["ends"]) == len(tables["sample"]) + 1 and int(tables["ends"][-1]) == len(tables["letters"])


def _name_arrays(names: Sequence[str]) -> dict[str, np.ndarray]:
    """Store file names in two arrays, which can be mapped from a file and shared by processes."""
    encoded = [os.fsencode(name) for name in names]
    letters = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    return {"letters": letters, "ends": np.cumsum([0, *map(len, encoded)], dtype=np.int64)}


# ---------------------------------------------------------------------------------------------- folders


class FolderFiles(FileGroups):
    """Read the files of a folder as samples. Kind `documents`: every text file is one sample."""

    kind: FolderKind = "media"

    def location(self, number: int) -> str:
        return next(iter(self._files(number)))

    def load(self, number: int) -> RawRecord:
        files = self._files(number)
        location = next(iter(files))

        def content(name: str) -> bytes:
            try:
                # `opened` checks the path as it does for media: it must name a regular file below the folder
                with opened(name, self.path, "text") as source:
                    data = source.file.read(MAX_RECORD_BYTES + 1)
            except (TesseraError, OSError) as error:
                bad = bad_sample(location, error)
                raise RecordError(bad.reason, where=location, code=bad.code) from None
            if len(data) > MAX_RECORD_BYTES:
                fail("data.record-too-large", f"{name} has more than {MAX_RECORD_BYTES} bytes", where=location)
            return data

        if not location.isprintable():
            fail("data.bad-file-name", "the file name is not UTF-8 or not printable", where=repr(location))
        if self.kind == "documents":
            return RawRecord({"text": load_text(content(location), location)})
        media = [MediaFile(kind, name, name) for name in files if (kind := media_kind(name)) is not None]
        return self._record(location, files, content, media)


class Metadata(Container):
    """Read the records of metadata.jsonl, .csv or .parquet. The key `file_name` names media in the same folder."""

    def __init__(self, records: Container, columns: Mapping[str, str]) -> None:
        super().__init__(records.name, len(records), records.facts)
        self.records = records
        self.columns = dict(columns)

    def location(self, number: int) -> str:
        return self.records.location(number)

    def load(self, number: int) -> RawRecord:
        return self._with_media(self.records.load(number), number)

    def scan(self, numbers: range) -> Iterator[tuple[int, RawRecord | RecordError]]:
        for number, record in self.records.scan(numbers):
            try:
                yield number, record if isinstance(record, RecordError) else self._with_media(record, number)
            except RecordError as error:
                yield number, error

    def _with_media(self, record: RawRecord, number: int) -> RawRecord:
        content = dict(record.content)
        media: list[MediaFile] = []
        for key, kind in _FILE_NAME_KEYS.items():
            value = content.pop(key, None)
            for name in value if isinstance(value, list) else [] if value is None else [value]:
                media_type = kind or (media_kind(name) if isinstance(name, str) else None)
                if media_type is None:
                    what = f"{key} is not the name of an image, video or audio file: {name!r:.80}"
                    raise RecordError(what, where=self.location(number), code="data.bad-media-value")
                media.append(MediaFile(media_type, name, name))
        return assemble(self.location(number), content, None, media, self.columns)


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, stat) of all files below a folder, sorted, without hidden files. Linked folders are not entered."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = os.path.relpath(here, folder)
        for name in sorted(files):
            if not name.startswith("."):
                path = os.path.join(here, name)
                try:
                    stat = os.stat(path)
                except OSError:  # the file is a broken link: list it, so that its sample is reported as unreadable
                    stat = os.lstat(path)
                yield name if inner == "." else f"{inner}/{name}", stat


def open_files(
    path: Path, kind: FolderKind, limit: int | None, cache_folder: Path | None, columns: Mapping[str, str]
) -> FolderFiles:
    """Open a folder of samples. `kind`: "media" (media files, texts with the same stem) or "documents" (.txt files)."""
    wanted: list[str] = []
    digest = hashlib.sha256()
    for name, stat in walk(path):
        if _belongs(name, kind):
            wanted.append(name)
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    facts = {"path": str(path.resolve()), "files": len(wanted), "listing": digest.hexdigest()}
    groups = _group_by_stem(wanted) if kind == "media" else [[name] for name in wanted]
    if not groups:
        raise TesseraError(f"the folder {path} has no samples", where="data", code="data.empty-folder")

    def find() -> dict[str, np.ndarray]:
        sample = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        return {"sample": sample, **_name_arrays([name for group in groups for name in group])}

    tables = cached_tables("folder", [kind, facts], cache_folder, find, _are_groups)
    opened = FolderFiles(path, path.name, tables, limit, columns, facts)
    opened.kind = kind
    return opened


def _belongs(name: str, kind: FolderKind) -> bool:
    if kind == "documents":
        return suffix_of(name) == "txt"
    return media_kind(name) is not None or suffix_of(name) in ("json", *_TEXT_SUFFIXES)


def _group_by_stem(names: list[str]) -> list[list[str]]:
    """Group files by stem, media first. Text files without media, such as a README, are left out."""
    groups: list[list[str]] = []
    without_media = 0
    for _, same in groupby(sorted(names, key=lambda name: (stem_of(name), name)), key=stem_of):
        group = sorted(same, key=lambda name: (media_kind(name) is None, name))
        if media_kind(group[0]) is None:
            without_media += 1
        else:
            groups.append(group)
    if without_media:
        log.warning("text files of %d names have no image, video or audio of the same name: skipped", without_media)
    return groups


# ---------------------------------------------------------------------------------------------- tar shards


class TarShard(FileGroups):
    """Read the samples of a WebDataset shard: consecutive members with one stem.

    `tables` also has `start` (first byte), `size` and `type` of each tar member.
    """

    def load(self, number: int) -> RawRecord:
        location, files, media = self.location(number), self._files(number), []
        for name, member in files.items():
            problem = _problem(name, bytes([self.tables["type"][member]]))
            if problem is not None:
                raise RecordError(f"the tar member {problem}", where=location, code="data.bad-tar-member")
            kind = media_kind(name)
            if kind is not None:
                media.append(MediaFile(kind, name, ArchiveMember(self.path, *self._span(member), name)))
        with open_regular(self.path) as file:
            stat = os.fstat(file.fileno())
            if (stat.st_size, stat.st_mtime_ns) != (self.facts["size"], self.facts["time"]):
                fail("data.archive-changed", "the tar file changed since it was opened", where=location)

            def content(name: str) -> bytes:
                start, size = self._span(files[name])
                if size > MAX_RECORD_BYTES:
                    what = f"{name} has {size} bytes, the limit is {MAX_RECORD_BYTES}"
                    raise RecordError(what, where=location, code="data.record-too-large")
                file.seek(start)
                return file.read(size)

            return self._record(location, files, content, media)

    def _span(self, member: int) -> tuple[int, int]:
        return int(self.tables["start"][member]), int(self.tables["size"][member])


def _problem(name: str, kind: bytes) -> str | None:
    """Return why a tar member is refused; None for a regular file with a safe name."""
    if kind in _SPECIAL:
        return f"{name!r:.120} is {_SPECIAL[kind]}"
    if kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
        return f"{name!r:.120} has the unknown type {kind!r}"
    if not name or "\0" in name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
        return f"{name!r:.120} has a path outside of the archive"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"{name!r:.120} has a name that is not UTF-8"
    return None


def open_tar(
    path: Path, name: str, limit: int | None, cache_folder: Path | None, columns: Mapping[str, str]
) -> TarShard:
    """Open a tar shard. The list of its members is read from the headers, or from the cache."""
    facts = file_facts(path)

    def find() -> dict[str, np.ndarray]:
        members, names = array("q"), []
        sample, stem = -1, None
        for member in _members(path, int(facts["size"])):
            if stem_of(member.name) != stem:
                sample, stem = sample + 1, stem_of(member.name)
                if limit is not None and sample >= limit:
                    break
            kind = tarfile.GNUTYPE_SPARSE if member.issparse() else member.type
            members.extend((sample, member.offset_data, member.size, kind[0]))
            names.append(member.name)
            if len(names) > MAX_MEMBERS:
                raise TesseraError(
                    f"the tar file has more than {MAX_MEMBERS} members", where=str(path), code="data.tar-too-large"
                )
        columns = np.array(members, dtype=np.int64).reshape(-1, 4).T
        return {**dict(zip(("sample", "start", "size", "type"), columns, strict=True)), **_name_arrays(names)}

    def is_valid(tables: AnyTables) -> bool:
        if not _are_groups(tables) or not {"start", "size", "type"} <= set(tables):
            return False
        start, size = tables["start"], tables["size"]
        return len(start) == 0 or 0 <= int(start[-1]) <= facts["size"] - int(size[-1])

    tables = cached_tables("tar", [limit, facts], cache_folder, find, is_valid)
    return TarShard(path, name, tables, limit, columns, facts)


def _members(path: Path, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar archive, without folders. Raise if the archive is damaged or truncated."""
    with open_regular(path) as file:
        bounded = _BoundedFile(file)
        try:
            with tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[call-overload]
                while (member := archive.next()) is not None:
                    archive.members.clear()  # tarfile would keep all members in memory
                    if not member.isreg():
                        member.size = 0  # links, devices and pipes have no content, whatever the header states
                    if member.size < 0 or member.offset_data + member.size > size:
                        remaining = size - member.offset_data
                        what = f"is truncated: a member has {member.size} bytes, and only {remaining} follow"
                        _fail(path, what, member.offset)
                    if not (member.isdir() or member.name.endswith("/")):
                        yield member
                end = archive.offset
        except TesseraError:
            raise
        except Exception as error:  # tarfile raises undocumented errors on damaged headers
            cut = "end of data" in str(error) or "truncated" in str(error) or "empty" in str(error)
            _fail(path, "is truncated" if cut else f"has a damaged header ({first_line(error)})", file.tell())
        # tarfile treats an unreadable header as the end of the archive.
        file.seek(end)
        block = file.read(tarfile.BLOCKSIZE)
        if block.strip(b"\0"):
            cut = len(block) < tarfile.BLOCKSIZE
            _fail(path, "is truncated in a header" if cut else "has a damaged header", end)


class _BoundedFile:
    """Wrap a file and limit the size of single reads: tarfile may read headers and names, but no large content."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise ValueError(f"a name has {size} bytes, the limit is {_MAX_READ_BYTES}")
        return self._file.read(size)


def _fail(path: Path, what: str, offset: int) -> NoReturn:
    raise TesseraError(
        f"the tar file {what}",
        where=f"{path}, byte {offset}",
        fix="download or write the file again",
        code="data.damaged-tar",
    )
