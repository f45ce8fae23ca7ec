"""Samples that are several files of one stem: a picture, clip or sound, and words about it beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tessera.core.types import PartKind
from tessera.data.sources.container import Raw
from tessera.data.sources.names import MEDIA
from tessera.data.sources.within import Within

_SUFFIXES: dict[str, PartKind] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif"), "image"),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"), "audio"),
}
WORDS = ("json", "txt", "caption")


def stem_of(name: str) -> str:
    """What the files of one sample have in common: the name up to the first dot behind its last folder."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def suffix_of(name: str) -> str:
    base, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return suffix.lower() if base and dot else ""


def media_kind(name: str) -> PartKind | None:
    return _SUFFIXES.get(suffix_of(name))


class Shown(NamedTuple):
    """Media of a sample. `value` is a path under the root, or where the bytes lie."""

    kind: PartKind
    name: str
    value: str | Within


def assemble(
    stem: str, about: Mapping[str, Any] | None, words: str | None, media: Sequence[Shown], columns: Mapping[str, str]
) -> Raw:
    """One row of what lies together. A row that names media itself means those of its own sample first; a row that
    names none shows all of them."""
    row = dict(about or {})
    row.setdefault(columns.get("id", "id"), stem)
    text_key = columns.get("text", "text")
    if words is not None:
        row.setdefault(text_key, words)
    elif text_key not in row and isinstance(row.get("caption"), str):
        row[text_key] = row["caption"]
    listed = any(row.get(key) is not None for kind in MEDIA for key in (columns.get(f"{kind}s", f"{kind}s"), kind))
    if not listed and not _parts_name_media(row.get(columns.get("messages", "messages"))):
        for kind in MEDIA:
            shown = [one.value for one in media if one.kind == kind]
            if shown:
                row[columns.get(f"{kind}s", f"{kind}s")] = shown
    inside: dict[str, Within] = {}
    for one in media:
        if isinstance(one.value, Within):
            # Rows name their media in full, by the last part alone, or by what follows the stem.
            for name in (one.name, one.name.rpartition("/")[2], one.name[len(stem) + 1 :]):
                inside.setdefault(name, one.value)
    return Raw(row, inside)


def _parts_name_media(turns: Any) -> bool:
    for turn in turns if isinstance(turns, list) else []:
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and any(part.get(key) is not None for key in (*MEDIA, "path", "url")):
                return True
    return False
