"""Write small copies of the images and recordings of evaluated questions into the run folder, for the report.

A report embeds only files of the run folder: the records of a run from somebody else may name any file of this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.core.sample import Part
from tessera.data.media.clips import AudioClip, clip_of
from tessera.data.media.files import Limits
from tessera.data.media.images import TINY, read_image, small_copy
from tessera.data.media.sound_preview import PREVIEW, beginning, encode_preview
from tessera.data.sources.fields import media_kind
from tessera.errors import TesseraError
from tessera.runtime.files import replace_file

FOLDER = "answer_images"
COPIES = "shown"  # key that `with_copies` adds to a row of `answers.jsonl`: {file, width, height} or None per image
MOST_COPIES = 400
_MOST_IMAGES = 6  # limit of copied files per row of `answers.jsonl`


def with_copies(folder: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy images and recordings of rows of `answers.jsonl` into a run folder. Return the rows with their names.

    At most `MOST_COPIES` files are copied, first those of wrong answers, and at most 6 of a row.
    """
    copies: dict[str, dict[str, Any] | None] = {}
    for row in sorted(rows, key=lambda row: bool(row["correct"])):
        for path in row["images"][:_MOST_IMAGES]:
            if path not in copies and len(copies) < MOST_COPIES:
                copies[path] = _copy(folder, path)
    return [{**row, COPIES: [copies.get(path) for path in row["images"]]} if row["images"] else row for row in rows]


def _copy(folder: Path, path: str) -> dict[str, Any] | None:
    """Write a copy of an image and return its file name and size; None if the image cannot be read.

    For a recording, write its beginning.
    """
    clip = clip_of(path)
    if isinstance(clip, AudioClip) or media_kind(path) == "audio":
        return _preview(folder, clip)
    try:
        changed = Path(path).stat().st_mtime_ns
        image = read_image(Path(path), Limits())
    except (TesseraError, OSError, ValueError):  # missing, no image, or an invalid path
        return None
    width, height = image.size
    name = hashlib.sha256(f"{path} {changed}".encode("utf-8", "surrogateescape")).hexdigest()[:20]
    file = f"{FOLDER}/{name}.{'png' if max(image.size) <= TINY else 'jpg'}"
    if not (folder / file).exists():
        (folder / FOLDER).mkdir(exist_ok=True)
        replace_file(folder / file, small_copy(image)[0])
    return {"file": file, "width": width, "height": height}


def _preview(folder: Path, value: Any) -> dict[str, Any] | None:
    """Write the beginning of a recording, and return its file name; None if it cannot be read."""
    path = Path(value.value if isinstance(value, AudioClip) else value)
    try:
        content = encode_preview(*beginning(Part("audio", value), path.parent, Limits()))
    except (TesseraError, OSError, ValueError):
        return None
    if content is None:
        return None
    file = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:20]}{PREVIEW}"
    if not (folder / file).exists():
        (folder / FOLDER).mkdir(exist_ok=True)
        replace_file(folder / file, content)
    return {"file": file}
