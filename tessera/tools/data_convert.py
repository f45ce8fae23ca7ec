"""Convert data sets: any set to a JSONL file of messages, LLaVA-Instruct to the `mllm` format."""

from __future__ import annotations

import functools
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
from tessera.data.media.files import ArchiveMember, folder_of, resolve
from tessera.data.sources.container import RecordError, bad_sample
from tessera.data.sources.source import Source, open_source
from tessera.errors import TesseraError

SHOWN = 5  # keep the reasons of the first so many skipped rows


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
            if isinstance(part.value, str):
                try:
                    resolve(part.value, source.root)
                except TesseraError as error:
                    raise RecordError(error.what, where=sample.id, code=error.code) from None
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
    """Write LLaVA-Instruct rows about COCO images in the `mllm` format: a JSON array of

        {"images": ["./data/COCO2017/train2017/000000033471.jpg"], "messages": [{"role": "user", ...}, ...]}

    `images`: the folder that contains `folder`; written paths begin with it, here with `data/COCO2017`. Rows without
    an image have an empty list. Rows with a missing image are skipped and counted, unless `check_images` is False.
    """
    base = Path(images)
    relative = not base.is_absolute() and ".." not in base.parts  # the reader of data sets refuses paths with '..'
    prefix = f"./{base / folder}" if relative else os.path.abspath(base / folder)
    if check_images and not (base / folder).is_dir():
        raise TesseraError(
            f"{base} does not contain the folder {folder!r}",
            where="images",
            fix="set --images (images= in Python) to the folder that unpacking COCO2017 created",
            code="data.no-image-folder",
        )

    @functools.cache  # list a folder once, instead of checking each of 100,000 files
    def names_in(inner: str) -> frozenset[str]:
        here = base / folder / inner
        return frozenset(os.listdir(here)) if here.is_dir() else frozenset()

    def row_of(sample: Sample) -> dict[str, Any]:
        row = _mllm_row(sample, prefix)
        for path in row["images"] if check_images else ():
            inner, _, name = path.removeprefix(f"{prefix}/").rpartition("/")
            if inner.startswith("/") or ".." in Path(inner).parts or name not in names_in(inner):
                raise RecordError(f"no such image: {path}", where=sample.id, code="media.no-such-file")
        return row

    source = open_source(SourceSection(path=Path(annotations), format="llava", root=base if base.is_dir() else None))
    done = _convert(source, out, overwrite, row_of, begin="[", between=",\n", end="]\n")
    if (base / folder).is_dir() and not _is_found_from(done.out, prefix):
        done.root = Path.cwd() if relative else Path(prefix).parent
    return done


def _is_found_from(out: Path, images: str) -> bool:
    """Return whether a data set file finds its images without `root`, below the folder of the file."""
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
            counts, reasons = count_codes(done.skipped.elements()), "; ".join(map(str, done.first))
            raise TesseraError(
                f"all rows were skipped ({counts}): {reasons}", where=str(done.out), code="data.no-row-written"
            )
        file.write(end)
    return done


def _mllm_row(sample: Sample, prefix: str) -> dict[str, Any]:
    images: list[str] = []
    messages: list[dict[str, str]] = []
    for message in sample.messages:
        if message.role not in ("user", "assistant"):
            what = f"a message has the role {message.role!r}: the mllm format has user and assistant only"
            raise RecordError(what, where=sample.id, code="data.not-in-mllm-format")
        text = ""
        for part in message.parts:
            if part.kind == "image" and isinstance(part.value, str):
                images.append(f"{prefix}/{part.value}")
                text += "<image>"
            elif part.kind == "text":
                text += part.value
            else:
                what = f"a part is {part.kind}: the mllm format has text and image files only"
                raise RecordError(what, where=sample.id, code="data.not-in-mllm-format")
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
    """Return a row in the `text` format, for plain text without roles."""
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
    holder = "a tar file" if isinstance(part.value, ArchiveMember) else "the data file"
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
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, out)
    finally:
        beside.unlink(missing_ok=True)
