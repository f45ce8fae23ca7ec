"""The fields of a record: names of keys and speakers in each format, and the media that a record has.

Media is listed beside the text and placed by placeholders, or named in the text. A value is a path below the data root,
bytes, a decoded image, `{"bytes", "path"}` as Hugging Face stores it, a `data:` URL in base64, or an http(s) URL, which
is fetched only if the recipe allows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NoReturn, get_args

from PIL import Image

from tessera.config.run_config import RecordFormat
from tessera.core.sample import Message, Part, PartKind
from tessera.data.media.data_urls import decode_data_url, is_data_url
from tessera.data.media.files import ArchiveMember
from tessera.data.sources.container import RecordError
from tessera.errors import TesseraError, nearest

ROLES = ("system", "user", "assistant", "tool")
MEDIA: tuple[PartKind, ...] = ("image", "video", "audio")
FORMATS: tuple[RecordFormat, ...] = get_args(RecordFormat)

# Speaker -> role. Calls of functions are the assistant's words, their results are the tool's.
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
}
_CALLERS = ("function_call", "tool_call")
# Names in `columns` that do not rename a key but a speaker.
_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}
_KEYS = ("id", "messages", "role_tag", "content_tag", "system", "tools", "images", "videos", "audios")
_ALPACA_KEYS = ("prompt", "query", "response", "history")
# Keys of the formats that are like alpaca, where these differ: question and answer.
_ASKED_BY: Mapping[RecordFormat, Mapping[str, str]] = {
    "query_response": {"prompt": "query", "query": "", "response": "response"},
    "question_answer": {"prompt": "question", "query": "", "response": "answer"},
}
_PAIR_KEYS = ("chosen", "rejected", "completion")
_TEXT_KEYS = ("text", "content")
_CAPTION_KEYS = ("cap", "caption", "text", "prompt", "content")
COLUMNS = (*_KEYS, *_TAGS, *_ALPACA_KEYS, *_PAIR_KEYS, "label", "text", "path", "references")
# Formats of one question and its answer.
_QUESTION_FORMATS: tuple[RecordFormat, ...] = ("alpaca", "query_response", "question_answer")
WORSE_ANSWERS = ("rejected_response", "rejected_messages")


@dataclass(frozen=True)
class ColumnMap:
    """Name the keys of a record that a parser reads. Several names for one thing are tried in order."""

    messages: str
    role: str
    content: str
    media: Mapping[PartKind, tuple[str, ...]]
    speakers: Mapping[str, str] = field(default_factory=lambda: _SPEAKERS)
    callers: tuple[str, ...] = _CALLERS  # speakers whose words are calls of functions
    id: str = "id"
    system: str = "system"
    tools: str = "tools"
    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str = "history"
    text: tuple[str, ...] = _TEXT_KEYS
    path: str = "path"  # an image or video, by the end of its name
    references: str = "references"  # images that are to be edited
    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str = "completion"  # an answer that was found good or bad
    label: tuple[str, ...] = ("label", "kto_tag")  # whether it was


def column_map(record_format: RecordFormat, columns: Mapping[str, str]) -> ColumnMap:
    """Return the keys of a format, with those that `columns` (checked before) gives another name."""
    renamed = {
        key: columns[key]
        for key in ("id", "system", "tools", *_ALPACA_KEYS, *_PAIR_KEYS, "path", "references")
        if key in columns
    }
    for ours, theirs in _ASKED_BY.get(record_format, {}).items():
        renamed.setdefault(ours, theirs)
    chat = record_format in ("sharegpt", "llava")
    speakers = {**_SPEAKERS, **{columns[tag]: role for tag, role in _TAGS.items() if tag in columns}}
    texts = _CAPTION_KEYS if record_format == "generation" else _TEXT_KEYS
    callers = (*_CALLERS, *([columns["function_tag"]] if "function_tag" in columns else []))
    return ColumnMap(
        messages=columns.get("messages", "conversations" if chat else "messages"),
        role=columns.get("role_tag", "from" if chat else "role"),
        content=columns.get("content_tag", "value" if chat else "content"),
        media={kind: _media_keys(record_format, kind, columns) for kind in MEDIA},
        speakers=speakers,
        callers=callers,
        text=(columns["text"],) if "text" in columns else texts,
        label=(columns["label"],) if "label" in columns else ColumnMap.label,
        **renamed,
    )


def _media_keys(record_format: RecordFormat, kind: PartKind, columns: Mapping[str, str]) -> tuple[str, ...]:
    if f"{kind}s" in columns:
        return (columns[f"{kind}s"],)
    return (kind,) if record_format == "llava" else (f"{kind}s", kind)


def check_columns(columns: Mapping[str, str], where: str) -> None:
    """Raise if `columns` of a recipe has a name that no format knows, or an empty one."""
    for name, key in columns.items():
        if name not in COLUMNS:
            raise TesseraError(
                f"unknown name in `columns`: {name!r}",
                where=where,
                allowed=COLUMNS,
                nearest=nearest(name, COLUMNS),
                fix="write our name first, then the one in your records: columns: {messages: dialogue}",
                code="data.unknown-column",
            )
        if not key:
            raise TesseraError(f"`columns` gives {name!r} an empty name", where=where, code="data.empty-column-name")


class RecordSchema:
    """Tell records of one format from another, under the key names that a data set uses."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = dict(columns)
        self.names = {one: column_map(one, columns) for one in FORMATS}
        self._media_named = any(f"{kind}s" in columns for kind in MEDIA)

    def decide(self, record: Mapping[str, Any]) -> RecordFormat | None:
        """Return the format of a record; None when its keys fit several (a conversation without media) or none."""
        key = self.names["messages"].messages
        # `columns` may give both kinds of conversation one name: the key of the speaker tells them apart.
        if has(record, key) and ("messages" not in self.columns or not self._speaks(record[key])):
            return "messages"
        if self.is_conversation(record):
            for record_format in ("llava", "sharegpt"):
                if any(has(record, key) for keys in self.names[record_format].media.values() for key in keys):
                    return "sharegpt" if self._media_named else record_format
            return None
        formats: tuple[RecordFormat, ...] = (*_QUESTION_FORMATS, "text")
        return next((fitting for fitting in formats if self.fits(record, fitting)), None)

    def is_conversation(self, record: Mapping[str, Any]) -> bool:
        return has(record, self.names["sharegpt"].messages)

    def fits(self, record: Mapping[str, Any], record_format: RecordFormat) -> bool:
        """Return whether a record has the keys of a format that the recipe names, whatever else it has."""
        names = self.names[record_format]
        if record_format == "preference":
            pair = has(record, names.chosen) and has(record, names.rejected)
            return pair or has_worse_answer(record)
        if record_format == "unpaired_preference":
            return any(has(record, key) for key in names.label)
        if record_format == "generation":  # whatever is missing is a fault of that record alone
            return True
        if record_format == "text":
            return any(has(record, key) for key in names.text)
        if record_format in _QUESTION_FORMATS:
            return has(record, names.prompt) and has(record, names.response)
        return "messages" in self.columns and has(record, names.messages)

    def _speaks(self, turns: Any) -> bool:
        first = turns[0] if isinstance(turns, list) and turns else None
        return isinstance(first, dict) and self.names["sharegpt"].role in first


def has_worse_answer(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a worse answer beside a full conversation."""
    return any(has(record, key) for key in WORSE_ANSWERS)


# ---------------------------------------------------------------------------------------------- media of a record


# <img>a.jpg</img>, as rows of Qwen-VL and ms-swift have it; or a placeholder for the next of a list.
_MARKS = re.compile(r"<(img|image|video|audio)>([^<>\r\n]+)</\1>|<(image|video|audio)>")
_MEDIA_TAGS: Mapping[str, PartKind] = {"img": "image", **{kind: kind for kind in MEDIA}}
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
        kind = _MEDIA_TAGS[tag]
        names_media = value.lower().startswith(_URLS) or media_kind(value) == kind
        return Part(kind, value_of(value, tag)) if names_media else None

    def _placed(self, name: str) -> Part | None:
        kind = next((kind for kind in self.listed if kind == name), None)
        if kind is not None:
            return self.next(kind)
        for key, value in self._record.items():  # is it really only a word?
            if name in key.lower() and isinstance(value, (str, bytes, list, dict)) and value:
                fail(f"<{name}> in the text, and its {name} may be under {key!r}: columns: {{{name}s: {key}}}")
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
            count = len(self.listed.get(kind, []))
            if used != count and not (used == 0 and kind in self.alone & named):
                fail(f"{kind} token count that cannot match: {used} <{kind}> placeholders, {count} {kind}s")


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


# ---------------------------------------------------------------------------------------------- names of files


_SUFFIXES: dict[str, PartKind] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif"), "image"),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"), "audio"),
}


def stem_of(name: str) -> str:
    """Return the stem that the files of one sample share: the path up to the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def suffix_of(name: str) -> str:
    """Return the letters behind the last dot of a file name, in lower case."""
    base, dot, suffix = name.rpartition("/")[2].rpartition(".")
    return suffix.lower() if base and dot else ""


def media_kind(name: str) -> PartKind | None:
    """Return which kind of media a file is by its name; None for other files."""
    return _SUFFIXES.get(suffix_of(name))
