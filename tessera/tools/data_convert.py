"""Convert data sets of any format to a JSONL file of messages."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tessera.config.run_config import SourceSection
from tessera.core.sample import PLAIN, BadSample, Part, Sample, count_codes
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import ArchiveMember, resolve
from tessera.data.sources.container import RecordError, bad_sample
from tessera.data.sources.regions import objects_of
from tessera.data.sources.source import Source, open_source
from tessera.errors import TesseraError
from tessera.runtime.files import replacing

SHOWN = 5  # limit of skipped rows whose reasons are listed


@dataclass
class Converted:
    """Hold the result of a conversion: the number of written and of skipped rows, and reasons for skipping."""

    out: Path
    written: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # number of skipped rows by the code of the reason
    first: list[BadSample] = field(default_factory=list)  # the first skipped rows
    root: Path | None = None  # value of `root` for the new data set in a recipe; None: no `root` is needed

    def leave_out(self, error: RecordError) -> None:
        """Count a skipped row."""
        bad = bad_sample(str(error.where), error)
        self.skipped[bad.code] += 1
        if len(self.first) < SHOWN:
            self.first.append(bad)

    def lines(self) -> list[str]:
        """Return the result as lines for the terminal."""
        skipped = f", {self.skipped.total()} skipped: {count_codes(self.skipped.elements())}" if self.skipped else ""
        out = [f"{self.out}: {self.written} rows written{skipped}"]
        if self.root is not None:
            out.append(f"  the images are outside of the folder of this file: set root: {self.root} in the recipe")
        return out + [f"  {bad}" for bad in self.first]


def convert(
    section: SourceSection, out: str | Path, *, check_media: bool = False, overwrite: bool = False
) -> Converted:
    """Write a data set of any format as a JSONL file of messages. Media paths stay relative to the root of the set."""
    source = open_source(section)

    def row_of(sample: Sample) -> dict[str, Any]:
        for part in sample.media() if check_media else ():
            value = part.value.value if isinstance(part.value, AudioClip) else part.value
            if isinstance(value, str):
                try:
                    resolve(value, source.root)
                except TesseraError as error:
                    raise RecordError(error.what, where=sample.id, code=error.code) from None
        return messages_row(sample)

    return write_rows(source, out, overwrite, row_of, begin="", between="\n", end="\n")


def write_rows(
    source: Source,
    out: str | Path,
    overwrite: bool,
    row_of: Callable[[Sample], dict[str, Any]],
    *,
    begin: str,
    between: str,
    end: str,
) -> Converted:
    """Write a row of JSON for each sample to a file. The file gets its name when it is complete.

    A sample for which `row_of` raises `RecordError` is skipped and counted.
    """
    done = Converted(Path(out))
    with _fresh(done.out, overwrite, source.path) as file:
        for _, sample in source.scan(range(len(source))):
            try:
                if isinstance(sample, RecordError):
                    raise sample
                row = row_of(sample)
            except RecordError as error:
                done.leave_out(error)
                continue
            file.write((between if done.written else begin) + json.dumps(row, ensure_ascii=False))
            done.written += 1
        if done.written == 0:
            counts, reasons = count_codes(done.skipped.elements()), "; ".join(map(str, done.first))
            raise TesseraError(
                f"all rows were skipped ({counts}): {reasons}", where=str(done.out), code="data.no-row-written"
            )
        file.write(end)
    return done


def messages_row(sample: Sample) -> dict[str, Any]:
    if len(sample.messages) == 1 and sample.messages[0].role == PLAIN:
        return _plain_row(sample)
    messages: list[dict[str, Any]] = []
    for message in sample.messages:
        content: Any = [{"type": part.kind, part.kind: _value(sample.id, part)} for part in message.parts]
        if all(part.kind == "text" for part in message.parts):
            content = "".join(part.value for part in message.parts)
        speaker = {"speaker": message.speaker} if message.speaker else {}
        messages.append({"role": message.role, **speaker, "content": content})
    return {"id": sample.id, "messages": messages, **objects_of(sample)}


def _plain_row(sample: Sample) -> dict[str, Any]:
    """Return a row in the `text` format, for plain text without roles."""
    row: dict[str, Any] = {"id": sample.id, "text": "", **objects_of(sample)}
    for part in sample.messages[0].parts:
        if part.kind == "text":
            row["text"] += part.value
        else:
            row["text"] += f"<{part.kind}>"
            row.setdefault(f"{part.kind}s", []).append(_value(sample.id, part))
    return row


def _value(id: str, part: Part) -> Any:
    if part.kind == "codes":
        return part.value.tolist()
    value, span = (part.value.value, part.value.span) if isinstance(part.value, AudioClip) else (part.value, "")
    if isinstance(value, str):
        return value + span
    holder = "a tar file" if isinstance(value, ArchiveMember) else "the data file"
    what = f"{part.kind} inside {holder}: a row of text can only name files; train on this set as it is"
    raise RecordError(what, where=id, code="data.media-not-a-file")


@contextmanager
def _fresh(out: Path, overwrite: bool, *inputs: Path) -> Iterator[TextIO]:
    """Open an output file that is renamed into place when it is complete. It must not be one of `inputs`."""
    if out.exists() and not overwrite:
        raise TesseraError(
            f"the file {out} exists",
            where="out",
            fix="name another file, or add --overwrite (overwrite=True in Python)",
            code="output.exists",
        )
    if out.exists() and any(path.exists() and out.samefile(path) for path in inputs):
        raise TesseraError(
            f"{out} is the data set that is converted",
            where="out",
            fix="name another file",
            code="output.replaces-source",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as fresh, fresh.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
