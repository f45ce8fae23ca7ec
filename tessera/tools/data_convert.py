"""From one spelling of a data set to another: any set to `messages` rows, LLaVA-Instruct to the `mllm` form."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tessera.core.errors import TesseraError
from tessera.core.run_config import SourceSection
from tessera.core.types import PLAIN, Message, Part, Sample
from tessera.data.media.read import resolve
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.sources.open import open_source
from tessera.data.sources.within import Within

SHOWN = 5  # refused rows of which the reason is kept
_LLAVA_SPEAKERS = {"user", "assistant"}


@dataclass
class Converted:
    """What became of the rows."""

    out: Path
    written: int = 0
    missing: int = 0  # rows whose media are not there
    bad: int = 0  # rows that cannot be read
    reasons: list[tuple[str, str]] = field(default_factory=list)  # of the first rows that were left out

    def leave_out(self, error: RowError, *, missing: bool = False) -> None:
        self.missing += missing
        self.bad += not missing
        if len(self.reasons) < SHOWN:
            self.reasons.append((error.id, error.reason))

    def lines(self) -> list[str]:
        left = f", left out {self.missing} with missing media and {self.bad} that cannot be read"
        out = [f"{self.out}: {self.written} rows written" + (left if self.missing or self.bad else "")]
        return out + [f"  {id}: {reason}" for id, reason in self.reasons]


def convert(
    section: SourceSection, out: str | Path, *, check_media: bool = False, overwrite: bool = False
) -> Converted:
    """Any data set that can be read, as `messages` rows in a JSONL file. Media paths stay relative to its root."""
    source = open_source(section)
    done = Converted(Path(out))
    with _fresh(done.out, overwrite, source.path) as file:
        for sample in _samples(source, done):
            if check_media and not _media_are_there(sample, source, done):
                continue
            try:
                row = _messages_row(sample)
            except RowError as error:
                done.leave_out(error)
                continue
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            done.written += 1
        _check_some(done)
    return done


def convert_llava(
    annotations: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    folder: str = "train2017",
    check_images: bool = True,
    overwrite: bool = False,
) -> Converted:
    """LLaVA-Instruct rows about the pictures of COCO, as the `mllm` form that MindSpeed-MM trains on: a JSON array of

        {"images": ["./train2017/000000033471.jpg"], "messages": [{"role": "user", "content": "<image>..."}, ...]}

    `images` is the folder that holds `folder`, and what the paths are relative to. Rows without a picture have an empty
    list. Rows whose picture is not there are counted and left out, unless `check_images` is off.
    """
    base = Path(images)
    if check_images and not (base / folder).is_dir():
        raise TesseraError(
            f"no folder {folder!r} in {base}", where="images", fix="give the folder that was made by unpacking COCO2017"
        )
    source = open_source(SourceSection(path=Path(annotations), format="llava", root=base if base.is_dir() else None))
    there = _Listing(base)
    done = Converted(Path(out))
    with _fresh(done.out, overwrite, source.path) as file:
        for sample in _samples(source, done):
            try:
                row, shown = _mllm_row(sample, folder)
            except RowError as error:
                done.leave_out(error)
                continue
            gone = [path for path in shown if check_images and not there.has(path)]
            if gone:
                done.leave_out(RowError(sample.id, f"no such picture: {gone[0]}"), missing=True)
                continue
            file.write(("[" if done.written == 0 else ",\n") + json.dumps(row, ensure_ascii=False))
            done.written += 1
        _check_some(done)
        file.write("]\n")
    return done


def _mllm_row(sample: Sample, folder: str) -> tuple[dict[str, Any], list[str]]:
    images: list[str] = []
    messages: list[dict[str, str]] = []
    for message in sample.messages:
        if message.role not in _LLAVA_SPEAKERS:
            raise RowError(sample.id, f"a turn of {message.role!r}: rows of this form have users and assistants")
        text = ""
        for part in message.parts:
            if part.kind == "image" and isinstance(part.value, str):
                images.append(f"./{folder}/{part.value}")
                text += "<image>"
            elif part.kind == "text":
                text += part.value
            else:
                raise RowError(sample.id, f"{part.kind} in a row of pictures")
        messages.append({"role": message.role, "content": text})
    return {"images": images, "messages": messages}, images


def _messages_row(sample: Sample) -> dict[str, Any]:
    if len(sample.messages) == 1 and sample.messages[0].role == PLAIN:
        return _plain_row(sample)
    return {"id": sample.id, "messages": [_message(sample.id, message) for message in sample.messages]}


def _message(id: str, message: Message) -> dict[str, Any]:
    if all(part.kind == "text" for part in message.parts):
        return {"role": message.role, "content": "".join(part.value for part in message.parts)}
    return {"role": message.role, "content": [_part(id, part) for part in message.parts]}


def _part(id: str, part: Part) -> dict[str, Any]:
    return {"type": part.kind, part.kind: part.value if part.kind == "text" else _path(id, part)}


def _plain_row(sample: Sample) -> dict[str, Any]:
    """Text that nobody says has no role that a message could have; it stays a `text` row."""
    row: dict[str, Any] = {"id": sample.id, "text": ""}
    for part in sample.messages[0].parts:
        if part.kind == "text":
            row["text"] += part.value
        else:
            row["text"] += f"<{part.kind}>"
            row.setdefault(f"{part.kind}s", []).append(_path(sample.id, part))
    return row


def _path(id: str, part: Part) -> str:
    if isinstance(part.value, str):
        return part.value
    what = "inside a tar file" if isinstance(part.value, Within) else "inside the data file"
    raise RowError(id, f"{part.kind} {what}: a row of text can only name files; train on this set as it is")


def _samples(source: Source, done: Converted) -> Iterator[Sample]:
    for _, sample in source.scan(range(len(source))):
        if isinstance(sample, RowError):
            done.leave_out(sample)
        else:
            yield sample


def _media_are_there(sample: Sample, source: Source, done: Converted) -> bool:
    for part in sample.media():
        if isinstance(part.value, str):
            try:
                resolve(part.value, source.root)
            except TesseraError as error:
                done.leave_out(RowError(sample.id, error.what), missing=True)
                return False
    return True


class _Listing:
    """Which files there are: a folder is listed once instead of asked for each of its hundred thousand files."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folders: dict[str, set[str]] = {}

    def has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        if ".." in Path(path).parts or path.startswith("/"):
            return False
        if folder not in self.folders:
            here = self.base / folder
            self.folders[folder] = set(os.listdir(here)) if here.is_dir() else set()
        return name in self.folders[folder]


def _check_some(done: Converted) -> None:
    if done.written == 0:
        reasons = Counter(reason for _, reason in done.reasons)
        raise TesseraError(
            f"no row could be written; {done.missing} with missing media, {done.bad} that cannot be read: "
            + "; ".join(reasons),
            where=str(done.out),
        )


@contextmanager
def _fresh(out: Path, overwrite: bool, *kept: Path) -> Iterator[TextIO]:
    """A file that appears whole, or not at all."""
    if out.exists() and not overwrite:
        raise TesseraError(f"{out} is already there", where="out", fix="name another file, or say overwrite")
    if any(_same(out, path) for path in kept):
        raise TesseraError(f"{out} is what is read", where="out", fix="name another file")
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


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
