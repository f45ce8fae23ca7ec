"""Convert data sets: any set to `messages` rows, LLaVA-Instruct to the `mllm` form."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tessera.config.run_config import SourceSection
from tessera.core.sample import PLAIN, Part, Sample
from tessera.data.media.files import ArchiveMember, folder_of, resolve
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source, open_source
from tessera.errors import TesseraError

SHOWN = 5  # refused rows whose reasons are listed


class MissingMediaError(RecordError):
    """Report that a record names a media file that does not exist."""


@dataclass
class Converted:
    """Hold the result of a conversion: how many rows were written, and how many were left out and why."""

    out: Path
    written: int = 0
    missing: int = 0  # rows with a missing media file
    bad: int = 0  # rows that cannot be read
    reasons: list[tuple[str, str]] = field(default_factory=list)  # of the first rows that were left out
    root: Path | None = None  # the `root` of the new set in a recipe; None where it needs none

    def leave_out(self, error: RecordError) -> None:
        """Count a row that is left out."""
        self.missing += isinstance(error, MissingMediaError)
        self.bad += not isinstance(error, MissingMediaError)
        if len(self.reasons) < SHOWN:
            self.reasons.append((error.id, error.reason))

    def lines(self) -> list[str]:
        """Return the result as lines for the terminal."""
        left_out = f", left out {self.missing} with missing media and {self.bad} that cannot be read"
        out = [f"{self.out}: {self.written} rows written" + (left_out if self.missing or self.bad else "")]
        if self.root is not None:
            out.append(f"  its images lie outside of its folder: train on it with root: {self.root}")
        return out + [f"  {id}: {reason}" for id, reason in self.reasons]


def convert(
    section: SourceSection, out: str | Path, *, check_media: bool = False, overwrite: bool = False
) -> Converted:
    """Write any data set that can be read as `messages` rows in a JSONL file. Media paths stay relative to its root."""
    source = open_source(section)

    def row_of(sample: Sample) -> dict[str, Any]:
        for part in sample.media() if check_media else ():
            if isinstance(part.value, str):
                try:
                    resolve(part.value, source.root)
                except TesseraError as error:
                    raise MissingMediaError(sample.id, error.what) from None
        return _messages_row(sample)

    return _convert(source, out, overwrite, row_of, begin="", between="\n", end="\n")


def convert_llava(
    annotations: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    folder: str = "train2017",
    check_images: bool = True,
    overwrite: bool = False,
) -> Converted:
    """Write LLaVA-Instruct rows about the images of COCO in the `mllm` form: a JSON array of

        {"images": ["./data/COCO2017/train2017/000000033471.jpg"], "messages": [{"role": "user", ...}, ...]}

    `images` is the folder that holds `folder`; paths begin with it as it is given, here `data/COCO2017`. Rows without
    an image have an empty list. Rows whose image is not there are counted and left out, unless `check_images` is off.
    """
    base = Path(images)
    relative = not base.is_absolute() and ".." not in base.parts  # a path with '..' would not be read
    prefix = f"./{base / folder}" if relative else os.path.abspath(base / folder)
    if check_images and not (base / folder).is_dir():
        raise TesseraError(
            f"no folder {folder!r} in {base}",
            where="images",
            fix="give the folder that was made by unpacking COCO2017",
            code="data.no-image-folder",
        )

    @functools.cache  # lists a folder once, and does not check each of its hundred thousand files
    def names_in(inner: str) -> frozenset[str]:
        here = base / folder / inner
        return frozenset(os.listdir(here)) if here.is_dir() else frozenset()

    def row_of(sample: Sample) -> dict[str, Any]:
        row = _mllm_row(sample, prefix)
        for path in row["images"] if check_images else ():
            inner, _, name = path.removeprefix(f"{prefix}/").rpartition("/")
            if inner.startswith("/") or ".." in Path(inner).parts or name not in names_in(inner):
                raise MissingMediaError(sample.id, f"no such image: {path}")
        return row

    source = open_source(SourceSection(path=Path(annotations), format="llava", root=base if base.is_dir() else None))
    done = _convert(source, out, overwrite, row_of, begin="[", between=",\n", end="]\n")
    if (base / folder).is_dir() and not _is_found_from(done.out, prefix):
        done.root = Path.cwd() if relative else Path(prefix).parent
    return done


def _is_found_from(out: Path, images: str) -> bool:
    """Return whether a data set finds its images without a key `root`: below its own folder."""
    try:
        return folder_of(images, out.parent) is not None
    except TesseraError:
        return False


def _convert(
    source: Source,
    out: str | Path,
    overwrite: bool,
    row_of: Callable[[Sample], dict[str, Any]],
    *,
    begin: str,
    between: str,
    end: str,
) -> Converted:
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
            counts = f"{done.missing} with missing media, {done.bad} that cannot be read"
            reasons = "; ".join(dict.fromkeys(reason for _, reason in done.reasons))
            raise TesseraError(
                f"no row could be written; {counts}: {reasons}", where=str(done.out), code="data.no-row-written"
            )
        file.write(end)
    return done


def _mllm_row(sample: Sample, prefix: str) -> dict[str, Any]:
    images: list[str] = []
    messages: list[dict[str, str]] = []
    for message in sample.messages:
        if message.role not in ("user", "assistant"):
            raise RecordError(sample.id, f"a turn of {message.role!r}: rows of this form have users and assistants")
        text = ""
        for part in message.parts:
            if part.kind == "image" and isinstance(part.value, str):
                images.append(f"{prefix}/{part.value}")
                text += "<image>"
            elif part.kind == "text":
                text += part.value
            else:
                raise RecordError(sample.id, f"{part.kind} in a row of images")
        messages.append({"role": message.role, "content": text})
    return {"images": images, "messages": messages}


def _messages_row(sample: Sample) -> dict[str, Any]:
    if len(sample.messages) == 1 and sample.messages[0].role == PLAIN:
        return _plain_row(sample)
    messages: list[dict[str, Any]] = []
    for message in sample.messages:
        content: Any = [{"type": part.kind, part.kind: _value(sample.id, part)} for part in message.parts]
        if all(part.kind == "text" for part in message.parts):
            content = "".join(part.value for part in message.parts)
        messages.append({"role": message.role, "content": content})
    return {"id": sample.id, "messages": messages}


def _plain_row(sample: Sample) -> dict[str, Any]:
    """Return a `text` row. Plain text has no role, so it cannot be a message."""
    row: dict[str, Any] = {"id": sample.id, "text": ""}
    for part in sample.messages[0].parts:
        if part.kind == "text":
            row["text"] += part.value
        else:
            row["text"] += f"<{part.kind}>"
            row.setdefault(f"{part.kind}s", []).append(_value(sample.id, part))
    return row


def _value(id: str, part: Part) -> str:
    if isinstance(part.value, str):
        return part.value
    what = "inside a tar file" if isinstance(part.value, ArchiveMember) else "inside the data file"
    raise RecordError(id, f"{part.kind} {what}: a row of text can only name files; train on this set as it is")


@contextmanager
def _fresh(out: Path, overwrite: bool, *inputs: Path) -> Iterator[TextIO]:
    """Open a file for writing that appears complete, or not at all. It may not be one of `inputs`."""
    if out.exists() and not overwrite:
        raise TesseraError(
            f"{out} is already there",
            where="out",
            fix="name another file, or --overwrite (overwrite=True in Python)",
            code="output.exists",
        )
    if out.exists() and any(path.exists() and out.samefile(path) for path in inputs):
        raise TesseraError(
            f"{out} is what is read", where="out", fix="name another file", code="output.replaces-source"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, out)
    finally:
        beside.unlink(missing_ok=True)
