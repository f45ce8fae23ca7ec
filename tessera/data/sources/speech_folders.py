"""Folders of recordings with their texts: LibriSpeech (`1-2.trans.txt` beside 1-2-0000.flac), and Kaldi and ESPnet.

A folder of Kaldi has `wav.scp` (recording, path), `text` (utterance, words), and `segments` (utterance, recording,
start, end) if utterances are parts of recordings. Commands in place of paths are never run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tessera.data.sources.container import Container, RawRecord, file_facts
from tessera.data.sources.fields import media_kind
from tessera.data.sources.file_groups import walk
from tessera.data.sources.text import load_object, load_text
from tessera.data.tables import AnyTables, cached_tables
from tessera.errors import TesseraError
from tessera.runtime.files import open_regular

_TRANSCRIPTS = ".trans.txt"
_MAX_LINE_BYTES = 1 << 20
_MAX_UTTERANCES = 50_000_000


class Utterances(Container):
    """Read records of utterances.

    `tables` has arrays: `letters` are the bytes of all records as JSON, concatenated, and `ends` is where each record
    ends.
    """

    def __init__(self, name: str, tables: AnyTables, limit: int | None, facts: Any) -> None:
        count = len(tables["ends"]) - 1
        super().__init__(name, count if limit is None else min(limit, count), facts)
        self.tables = tables

    def load(self, number: int) -> RawRecord:
        start, end = self.tables["ends"][number : number + 2].tolist()
        return RawRecord(load_object(self.tables["letters"][start:end].tobytes(), self.location(number)))


def has_transcripts(folder: Path) -> bool:
    """Return whether a folder has transcript files of LibriSpeech."""
    return any(folder.glob(f"*{_TRANSCRIPTS}"))


def transcript_files(folder: Path) -> list[Path]:
    """Return the transcript files in a folder of LibriSpeech, at any depth."""
    return [folder / name for name, _ in walk(folder) if name.endswith(_TRANSCRIPTS)]


def is_kaldi(folder: Path) -> bool:
    return (folder / "wav.scp").is_file() and (folder / "text").is_file()


def open_transcripts(folder: Path, limit: int | None, cache_folder: Path | None) -> Utterances:
    """Open a folder of LibriSpeech, with all folders below it."""
    digest, files, recordings = hashlib.sha256(), [], {}
    for name, stat in walk(folder):
        if name.endswith(_TRANSCRIPTS):
            files.append(name)
        elif media_kind(name) == "audio":
            recordings[os.path.splitext(name)[0]] = name
        else:
            continue
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))

    def records() -> Iterator[dict[str, Any]]:
        for file in files:
            for id, words in _lines(folder, file):
                stem = os.path.join(os.path.dirname(file), id)
                yield {"id": id, "audio": recordings.get(stem, f"{stem}.flac"), "text": words}

    facts = {"path": str(folder.resolve()), "files": len(files), "listing": digest.hexdigest()}
    return _open("librispeech", folder, facts, records(), limit, cache_folder)


def open_kaldi(folder: Path, limit: int | None, cache_folder: Path | None) -> Utterances:
    """Open a data folder of Kaldi or ESPnet."""
    names = [name for name in ("wav.scp", "text", "segments") if (folder / name).is_file()]

    def records() -> Iterator[dict[str, Any]]:
        paths = dict(_lines(folder, "wav.scp"))
        command = next((id for id, path in paths.items() if path.endswith("|")), None)
        if command is not None:
            raise TesseraError(
                f"the recording {command!r:.100} is a command, which is not run",
                where=str(folder / "wav.scp"),
                fix="write the recordings to files, and their paths to wav.scp",
                code="data.recording-is-command",
            )
        parts = {id: rest.split() for id, rest in _lines(folder, "segments")} if "segments" in names else None
        for id, words in _lines(folder, "text"):
            recording, *span = [id] if parts is None else parts.get(id, [id])
            record: dict[str, Any] = {"id": id, "audio": paths.get(recording, ""), "text": words}
            if len(span) == 2 and all(map(_is_number, span)):
                record |= {"offset": span[0], "duration": round(float(span[1]) - float(span[0]), 9)}
            elif parts is not None:
                # An empty path makes the sample unusable: it is unknown which part of the recording belongs to it.
                record["audio"] = ""
            yield record

    facts = [file_facts(folder / name) for name in names]
    return _open("kaldi", folder, facts, records(), limit, cache_folder)


def _open(
    name: str, folder: Path, facts: Any, records: Iterable[dict[str, Any]], limit: int | None, cache_folder: Path | None
) -> Utterances:
    def find() -> dict[str, np.ndarray]:
        letters, ends = bytearray(), [0]
        for record in records:
            letters += json.dumps(record).encode()
            ends.append(len(letters))
            if len(ends) > _MAX_UTTERANCES:
                raise _damaged(folder, f"there are more than {_MAX_UTTERANCES} utterances")
        return {"letters": np.frombuffer(bytes(letters), np.uint8), "ends": np.array(ends, np.int64)}

    def is_valid(tables: AnyTables) -> bool:
        return {"letters", "ends"} <= set(tables) and int(tables["ends"][-1]) == len(tables["letters"])

    return Utterances(folder.name, cached_tables(name, [facts], cache_folder, find, is_valid), limit, facts)


def _lines(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the first word and the rest of each line that is not blank."""
    with open_regular(folder / name) as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            where = f"{folder / name}, line {number}"
            if len(line) == _MAX_LINE_BYTES:
                raise _damaged(where, f"a line has more than {_MAX_LINE_BYTES} bytes")
            words = load_text(line, where).split(None, 1)
            if words:
                yield words[0], words[1].strip() if len(words) > 1 else ""


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and text.isascii()


def _damaged(where: Path | str, what: str) -> TesseraError:
    return TesseraError(what, where=str(where), fix="correct or remove this file", code="data.damaged-transcripts")
