"""The media of a record: listed beside its text and named by placeholders, or named in the text itself.

What a value may be: a path below the data root, bytes, an image that is decoded already, `{"bytes", "path"}` as Hugging
Face stores it, a `data:` URL in base64, or an http(s) URL, which is fetched only where the recipe allows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, NoReturn

from PIL import Image

from tessera.core.sample import Message, Part, PartKind
from tessera.data.media.data_urls import decode_data_url, is_data_url
from tessera.data.media.files import ArchiveMember
from tessera.data.sources.columns import MEDIA, ColumnMap
from tessera.data.sources.container import RecordError
from tessera.data.sources.file_groups import media_kind
from tessera.errors import TesseraError

# <img>a.jpg</img>, as rows of Qwen-VL and ms-swift have it; or a placeholder for the next of a list.
_MARKS = re.compile(r"<(img|image|video|audio)>([^<>\r\n]+)</\1>|<(image|video|audio)>")
_TAGS: Mapping[str, PartKind] = {"img": "image", **{kind: kind for kind in MEDIA}}
_URLS = ("http://", "https://", "data:")


class RecordMedia:
    """Assign the media listed beside a sample to its placeholders, in order.

    A kind that has no list has no placeholders either: "<image>" in a text is then only a word. A path between tags
    needs no list.
    """

    def __init__(self, record: Mapping[str, Any], names: ColumnMap, always: tuple[PartKind, ...] = ()) -> None:
        self.listed: dict[PartKind, list[Any]] = {}
        self.alone: set[PartKind] = set()  # not a list beside the text, but one file under the name of the kind
        self._record = record
        for kind in MEDIA:
            key = next((key for key in names.media[kind] if has(record, key)), None)
            if key is not None or kind in always:
                self.listed[kind] = [] if key is None else values_of(record[key], key)
            if key == kind:
                self.alone.add(kind)
        self.used: dict[PartKind, int] = dict.fromkeys(self.listed, 0)

    def fill(self, text: str) -> list[Part]:
        """Return a text as parts: words, and the media that stand between them."""
        parts: list[Part] = []
        words, end = "", 0
        text = text_of(text)
        for mark in _MARKS.finditer(text):
            part = self._tagged(mark[1], mark[2].strip()) if mark[3] is None else self._placed(mark[3])
            if part is None:
                continue
            words += text[end : mark.start()]
            if words:
                parts.append(Part("text", words))
            parts.append(part)
            words, end = "", mark.end()
        words += text[end:]
        return [*parts, Part("text", words)] if words else parts

    def _tagged(self, tag: str, value: str) -> Part | None:
        """Return what a pair of tags names; None where it is no path of that kind of media: then it is a text."""
        kind = _TAGS[tag]
        names_media = value.lower().startswith(_URLS) or media_kind(value) == kind
        return Part(kind, value_of(value, tag)) if names_media else None

    def _placed(self, name: str) -> Part | None:
        kind = next((kind for kind in self.listed if kind == name), None)
        if kind is not None:
            return self.next(kind)
        for key, value in self._record.items():  # is it really only a word?
            if name in key.lower() and isinstance(value, (str, bytes, list, dict)) and value:
                fail(f"<{name}> in the text, and what it stands for may be under {key!r}: columns: {{{name}s: {key}}}")
        return None

    def next(self, kind: PartKind) -> Part:
        listed, at = self.listed.get(kind, []), self.used.get(kind, 0)
        self.used[kind] = at + 1
        # Placeholders beyond the list are counted too, so that `check_used` can name both numbers.
        return Part(kind, listed[at] if at < len(listed) else None)

    def rest_if_none_used(self) -> list[Part]:
        """Return all media of a sample without placeholders: they come first."""
        if any(self.used.values()):
            return []
        return [self.next(kind) for kind, listed in self.listed.items() for _ in listed]

    def check_used(self, messages: Iterable[Message] = ()) -> None:
        """Raise if placeholders and media differ in number. `messages`: a file that they name themselves may stand in
        the record once more, by itself."""
        named = {part.kind for message in messages for part in message.parts}
        for kind, used in self.used.items():
            given = len(self.listed.get(kind, []))
            if used != given and not (used == 0 and kind in self.alone & named):
                fail(f"{kind} token count that cannot match: {used} <{kind}> placeholders, {given} {kind}s")


def values_of(value: Any, key: str) -> list[Any]:
    listed = value if isinstance(value, list) else [] if isinstance(value, str) and not value else [value]
    return [value_of(item, key) for item in listed]


def value_of(value: Any, key: str) -> Any:
    """Return a path or URL, or the media itself. {"bytes", "path"} is how Hugging Face stores it."""
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, ArchiveMember, Image.Image)) or hasattr(value, "__array__"):
        return value
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str) or not value:
        fail(f"{key}: a path is expected, got {value!r:.80}")
    if is_data_url(value):
        try:
            return decode_data_url(value)
        except TesseraError as error:
            fail(f"{key}: {error.what}")
    return value


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        fail(f"text is a {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            fail("text is not valid Unicode (half of a surrogate pair)")
    return value


def has(record: Mapping[str, Any], key: str) -> bool:
    return record.get(key) is not None


def fail(reason: str) -> NoReturn:
    raise RecordError("", reason)
