"""Open a data set of a recipe: find its files, detect the format of the records, and read samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.config.run_config import RecordFormat, SourceSection
from tessera.core.sample import Message, Part, Sample
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import ArchiveMember
from tessera.data.sources.container import FOLDERS, Container, Joined, NothingUsable, RawRecord, RecordError
from tessera.data.sources.fields import RecordSchema, check_columns, media_kind
from tessera.data.sources.file_groups import METADATA, Metadata, open_files, open_tar, walk
from tessera.data.sources.file_names import source_files
from tessera.data.sources.formats import parse
from tessera.data.sources.parquet import open_parquet
from tessera.data.sources.regions import with_regions
from tessera.data.sources.speech_folders import has_transcripts, is_kaldi, open_kaldi, open_transcripts
from tessera.data.sources.text import TextKind, open_text_file
from tessera.errors import TesseraError
from tessera.hub.config import local_source
from tessera.hub.files import suffix_of
from tessera.runtime.files import leads_out, open_regular

# Record formats that need another `data.kind`, each with the `fix` of the error message.
KIND_OF_FORMAT: dict[RecordFormat, str] = {
    "preference": "data.kind=preference trains on pairs of answers, with train.task=dpo, orpo, simpo or reward",
    "unpaired_preference": "data.kind=unpaired_preference trains on answers with a label, with train.task=kto",
}
# (format of a data set, detected format of a row of it that lacks its recording or its codes)
_INCOMPLETE = (("transcript", "text"), ("speech", "text"), ("speech", "transcript"))
_FIRST_RECORDS = 1000  # records at the beginning that the format detection reads
_LATER_RECORDS = 16  # after the first 1000, the format detection reads about 16, at most 31, evenly spaced records
_RECORD_FILES = ("json", "jsonl", "parquet", "csv", "tsv", "tar")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}


@dataclass(eq=False)
class Source:
    """Read the samples of one data set by index. It is pickled for worker processes, so it keeps no open file."""

    path: Path  # path of the data set, as written in the recipe
    root: Path  # folder that media paths are relative to
    records: Container
    record_format: RecordFormat
    schema: RecordSchema
    format_given: bool  # whether the recipe sets the format
    instruction: str | None = None  # text of the user that follows each recording of a transcript data set

    def __len__(self) -> int:
        return len(self.records)

    def location(self, number: int) -> str:
        """Return the location of a record for messages, such as data.jsonl:17."""
        return self.records.location(number)

    def read(self, number: int) -> Sample:
        """Return a sample. Raise `RecordError` if its record is unusable, `TesseraError` if the data set is."""
        return self._parse(number, self.records.load(number))

    def scan(self, numbers: range | np.ndarray) -> Iterator[tuple[int, Sample | RecordError]]:
        """Yield samples. For a range this is faster than single calls of `read`."""
        records = self.records.scan(numbers) if isinstance(numbers, range) else self.records.pick(numbers.tolist())
        for number, record in records:
            if isinstance(record, RecordError):
                yield number, record
                continue
            try:
                yield number, self._parse(number, record)
            except RecordError as error:
                yield number, error

    def facts(self) -> dict[str, Any]:
        """Return JSON that changes whenever the samples may have changed. The file name of an index is a hash of it."""
        return {
            "rows": self.records.facts,
            "count": len(self),
            "root": str(self.root.resolve()),
            "form": self.record_format,
            "columns": self.schema.columns,
            **({"instruction": self.instruction} if self.instruction else {}),
        }

    @cached_property
    def _others_fit(self) -> bool:
        """Return whether some records have the recipe's format. Then a record of another format is a bad sample."""
        if not self.format_given or self.record_format not in KIND_OF_FORMAT:
            return False
        records = (record for _, record in _some(self.records) if not isinstance(record, RecordError))
        return any(self.schema.fits(record.content, self.record_format) for record in records)

    def _parse(self, number: int, record: RawRecord) -> Sample:
        content, chosen, names = record.content, self.record_format, self.schema.names[self.record_format]
        detected = self.schema.decide(content)
        if chosen in KIND_OF_FORMAT and not self.schema.fits(content, chosen):
            detected = next((other for other in KIND_OF_FORMAT if self.schema.fits(content, other)), detected)
        # A transcript without a recording and speech without codes are bad samples.
        if (chosen, detected) in _INCOMPLETE:
            detected = chosen
        if self.instruction and not content.get(names.prompt):
            content = {**content, names.prompt: self.instruction}
        fits = detected is None or detected == chosen or (self.format_given and self.schema.fits(content, chosen))
        if not fits and not self._others_fit:
            assert detected is not None, "a record of no known format fits any"
            raise TesseraError(
                f"a record has the format {detected!r}, but the format of the data set is {chosen!r}",
                where=f"{self.path}, {self.location(number)}",
                fix=KIND_OF_FORMAT.get(detected, "data.kind=chat trains on conversations")
                if chosen in KIND_OF_FORMAT
                else "divide the records into one data set per format, and list them under data.train; or set "
                f"`format: {detected}` if all records have this format",
                code="data.mixed-formats",
            )
        value = content.get(names.id)
        has_id = isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""
        id = str(value) if has_id else self.location(number)
        try:
            messages = with_regions(parse(content, chosen, names), content.get(names.objects))
        except RecordError as error:
            raise RecordError(error.what, where=id, code=error.code) from None
        return Sample(id, _with_members(messages, record.members) if record.members else messages)


def _with_members(messages: tuple[Message, ...], members: Mapping[str, ArchiveMember]) -> tuple[Message, ...]:
    """Replace media paths by members of the record's archive with the same name."""

    def replaced(part: Part) -> Part:
        clip = part.value if isinstance(part.value, AudioClip) else None
        name = part.value if clip is None else clip.value
        member = members.get(name) if part.kind != "text" and isinstance(name, str) else None
        if member is None:
            return part
        return Part(part.kind, member if clip is None else replace(clip, value=member))

    return tuple(Message(message.role, tuple(map(replaced, message.parts))) for message in messages)


def open_source(section: SourceSection, cache_folder: Path | None = None, *, answered: bool = True) -> Source:
    """Open a data set. With `format: auto`, the first record whose keys fit exactly one format decides.

    `answered` False: questions without an answer are usable samples.
    """
    section = local_source(section, "train")
    where = f"data source {section.path}"
    check_columns(section.columns, where)
    paths, base = source_files(section.path)
    records = _open_all(paths, base, section, cache_folder)
    if len(records) == 0:
        raise NothingUsable("the data set has no records", where=str(section.path), code="data.no-records")
    root = base if section.root is None else section.root
    if not root.is_dir():
        raise TesseraError(
            f"the media folder does not exist: {root}", where=where, fix="correct `root`", code="data.no-media-root"
        )
    schema = RecordSchema(section.columns, answered)
    record_format = _detect(section.path, records, schema) if section.format == "auto" else section.format
    if section.instruction and record_format != "transcript":
        raise TesseraError(
            f"`instruction` is for transcripts, and these records have the format {record_format!r}",
            where=where,
            fix="leave it out: questions are in the records",
            code="data.instruction-without-effect",
        )
    format_given = section.format != "auto"
    return Source(section.path, root, records, record_format, schema, format_given, section.instruction)


def _open_all(paths: list[Path], base: Path, section: SourceSection, cache_folder: Path | None) -> Container:
    if len(paths) == 1 and paths[0].is_dir():
        return _open_folder(paths[0], section, cache_folder)
    parts: list[Container] = []
    remaining = section.max_samples
    for path in paths:
        name = str(path.relative_to(base))
        parts.append(open_record_file(path, name, remaining, section.columns, cache_folder))
        remaining = None if remaining is None else remaining - len(parts[-1])
        if remaining is not None and remaining <= 0:
            break
    return parts[0] if len(parts) == 1 else Joined(parts)


def open_record_file(
    path: Path,
    name: str,
    limit: int | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    cache_folder: Path | None = None,
) -> Container:
    """Open one file of records by its suffix. `name`: the file name that messages show for its records."""
    _refuse_compressed(path)
    suffix = suffix_of(path.name)
    if suffix == "parquet":
        return open_parquet(path, name, limit)
    if suffix == "tar":
        return open_tar(path, name, limit, cache_folder, columns)
    if media_kind(path.name) is not None:
        raise TesseraError(
            f"{path.name} is media, not records about it",
            where=str(path),
            fix="set the path of the data set to the folder of the media",
            code="data.media-as-records",
        )
    kinds: dict[str, TextKind] = {"csv": "csv", "tsv": "tsv", "txt": "text", "text": "text"}
    kind = kinds.get(suffix, "json")
    return open_text_file(path, name, kind, limit, cache_folder)


def _refuse_compressed(path: Path) -> None:
    with open_regular(path) as file:
        head = file.read(8)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise TesseraError(
                f"this file is compressed ({name})",
                where=str(path),
                fix="decompress the file: records are read in place",
                code="data.compressed-file",
            )


def _inside(files: list[Path]) -> list[Path]:
    """Return the files; raise if one is a link out of its folder. Only files that the recipe names can be one."""
    for file in files:
        if leads_out(file, file.parent):
            raise TesseraError(
                f"{file.name} is a link out of the folder of the data set, to {os.path.realpath(file)}",
                where=str(file.parent),
                fix=f"name the files instead of the folder, such as {file.parent / '*'}{file.suffix}",
                code="data.link-out-of-folder",
            )
    return files


def _open_folder(folder: Path, section: SourceSection, cache_folder: Path | None) -> Container:
    """Open a folder by its content.

    The first of these decides: a registered marker file, a metadata file, record files (if any is not .json), Kaldi,
    LibriSpeech, media files with texts, .json files, text documents.
    """
    limit, columns = section.max_samples, section.columns
    for name in FOLDERS.names():
        if (folder / FOLDERS.get(name).marker).is_file():
            return FOLDERS.get(name).open(folder, limit)
    for name in METADATA:
        if (folder / name).is_file():
            return Metadata(_open_all(_inside([folder / name]), folder, section, cache_folder), columns)
    here = sorted(entry for entry in folder.iterdir() if not (entry.is_dir() or entry.name.startswith(".")))
    files = [entry for entry in here if suffix_of(entry.name) in _RECORD_FILES]
    if any(suffix_of(entry.name) != "json" for entry in files):
        return _open_all(_inside(files), folder, section, cache_folder)
    if is_kaldi(folder):
        return open_kaldi(folder, limit, cache_folder)
    first = next((name for name, _ in walk(folder) if media_kind(name)), None)
    if first is not None and has_transcripts((folder / first).parent):
        return open_transcripts(folder, limit, cache_folder)
    if first is not None:
        return open_files(folder, "media", limit, cache_folder, columns)
    if files:
        return _open_all(_inside(files), folder, section, cache_folder)
    if any(suffix_of(name) == "txt" for name, _ in walk(folder)):
        return open_files(folder, "documents", limit, cache_folder, columns)
    raise TesseraError(
        f"the folder {folder} has no samples",
        where="data",
        allowed=[
            "metadata.jsonl or metadata.csv",
            "JSON, JSONL, Parquet, CSV, TSV or tar files",
            "a.jpg with a.txt or a.json",
            "1-2-0000.flac with 1-2.trans.txt",
            "wav.scp and text",
            "*.txt",
        ],
        code="data.empty-folder",
    )


def _detect(path: Path, records: Container, schema: RecordSchema) -> RecordFormat:
    """Return the format of the first record that fits exactly one format. LLaVA and ShareGPT differ only with media."""
    keys: list[str] | None = None
    location, conversation = "", False
    for number, record in _some(records):
        if isinstance(record, RecordError):
            location = location or str(record.where)
            continue
        detected = schema.decide(record.content)
        if detected is not None:
            return detected
        if not schema.is_conversation(record.content):
            keys, location = sorted(record.content)[:8], records.location(number)
            break
        conversation = True
    if conversation and keys is None:
        return "sharegpt"
    if keys is not None and {"chosen", "rejected"} <= set(keys):
        raise TesseraError(
            "the records are pairs of answers, not conversations",
            where=f"{path}, {location}",
            fix="set data.kind=preference; check them with `tessera data doctor FILE --recipe RECIPE`",
            code="data.wrong-kind",
        )
    why = "no record is readable" if keys is None else f"a record has the keys {keys}"
    raise TesseraError(
        f"the format of the records is unknown: {why}",
        where=f"{path}, {location}",
        allowed=[
            "messages",
            "sharegpt (conversations, images)",
            "llava (conversations, image)",
            "alpaca (instruction, output)",
            "query_response (query, response)",
            "question_answer (question, answer)",
            "text (text or content)",
            "transcript (audio_filepath or audio, text)",
            "speech (audio_codes, text)",
        ],
        fix="if only the names of keys differ, map them: columns: {messages: dialogue, role_tag: speaker}",
        code="data.unknown-format",
    )


def _some(records: Container) -> Iterator[tuple[int, RawRecord | RecordError]]:
    yield from records.scan(range(min(_FIRST_RECORDS, len(records))))
    step = max(1, (len(records) - _FIRST_RECORDS) // _LATER_RECORDS)
    yield from records.pick(range(_FIRST_RECORDS, len(records), step))
