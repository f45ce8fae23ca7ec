"""The fields of a record: names of keys and of speakers in each record format, and the media of a record.

Media is listed beside the text and placed by placeholders, or named in the text. A value is a path below the data root,
bytes, a decoded image, `{"bytes", "path"}` as Hugging Face stores it, a `data:` URL in base64, or an http(s) URL, which
is downloaded only if the recipe allows it. Audio may also be `{"array", "sampling_rate"}`, or a part of a recording:
talk.flac#t=12.5,17.25.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, get_args

from PIL import Image

from tessera.config.run_config import RecordFormat
from tessera.core.sample import Message, Part, PartKind
from tessera.data.media.clips import AudioClip, AudioSamples, clip_of
from tessera.data.media.data_urls import decode_data_url, is_data_url
from tessera.data.media.files import ArchiveMember
from tessera.data.media.urls import is_url
from tessera.data.sources.container import fail
from tessera.errors import TesseraError, nearest
from tessera.hub.files import AUDIOS, IMAGES, VIDEOS, suffix_of

ROLES = ("system", "user", "assistant", "tool")
MEDIA: tuple[PartKind, ...] = ("image", "video", "audio")
FORMATS: tuple[RecordFormat, ...] = get_args(RecordFormat)

# Speaker -> role. The assistant calls functions, the tool returns their results.
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
# Names in `columns` of a recipe that rename a speaker ("human", "gpt"), not a key of the record.
_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}
_KEYS = ("id", "messages", "role_tag", "content_tag", "system", "tools", "images", "videos", "audios", "objects")
_SPEECH_KEYS = ("codes", "speaker")
_ALPACA_KEYS = ("prompt", "query", "response", "history")
# Keys of the formats with one question and one answer, where they differ from alpaca.
_ASKED_BY: Mapping[RecordFormat, Mapping[str, str]] = {
    "query_response": {"prompt": "query", "query": "", "response": "response"},
    "question_answer": {"prompt": "question", "query": "", "response": "answer"},
}
_PAIR_KEYS = ("chosen", "rejected", "completion")
_TEXT_KEYS = ("text", "content")
_TRANSCRIPT_KEYS = ("text", "sentence", "transcription", "transcript", "normalized_text")
_CAPTION_KEYS = ("cap", "caption", "text", "prompt", "content")
_TEXTS_OF: Mapping[RecordFormat, tuple[str, ...]] = {
    "generation": _CAPTION_KEYS,
    "transcript": _TRANSCRIPT_KEYS,
    "speech": _TRANSCRIPT_KEYS,
}
_CLIP_KEYS = ("offset", "duration")
_RENAMED = (*_ALPACA_KEYS, *_PAIR_KEYS, *_CLIP_KEYS, *_SPEECH_KEYS, "path", "references")
COLUMNS = (*_KEYS, *_TAGS, *_RENAMED, "label", "text")
# Formats with one question and one answer.
QUESTION_FORMATS: tuple[RecordFormat, ...] = ("alpaca", "query_response", "question_answer")
WORSE_ANSWERS = ("rejected_response", "rejected_messages")


@dataclass(frozen=True)
class ColumnMap:
    """Name the keys of a record that a parser reads. If a field has several names, the first in the record is used."""

    messages: str
    role: str
    content: str
    media: Mapping[PartKind, tuple[str, ...]]
    speakers: Mapping[str, str] = field(default_factory=lambda: _SPEAKERS)
    callers: tuple[str, ...] = _CALLERS  # names of speakers whose messages are function calls
    id: str = "id"
    system: str = "system"
    tools: str = "tools"
    objects: str = "objects"  # boxes, points and names of objects
    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str = "history"
    text: tuple[str, ...] = _TEXT_KEYS
    path: str = "path"  # path of an image or a video; the suffix decides which
    references: str = "references"  # images to edit
    offset: str = "offset"  # start of the transcribed part of a recording, in seconds
    duration: str = "duration"  # length of this part, in seconds
    codes: str = "audio_codes"  # speech as codes: frames x codebooks
    speaker: str = "speaker"  # name or number of the voice
    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str = "completion"  # an answer that is labelled good or bad
    label: tuple[str, ...] = ("label", "kto_tag")  # true: a good answer
    answered: bool = True  # whether a record without an answer is unusable


def column_map(record_format: RecordFormat, columns: Mapping[str, str]) -> ColumnMap:
    """Return the keys of a record format, renamed by `columns`. `check_columns` must have accepted these."""
    renamed: dict[str, Any] = {
        key: columns[key] for key in ("id", "system", "tools", "objects", *_RENAMED) if key in columns
    }
    for ours, theirs in _ASKED_BY.get(record_format, {}).items():
        renamed.setdefault(ours, theirs)
    chat = record_format in ("sharegpt", "llava")
    speakers = {**_SPEAKERS, **{columns[tag]: role for tag, role in _TAGS.items() if tag in columns}}
    texts = _TEXTS_OF.get(record_format, _TEXT_KEYS)
    callers = (*_CALLERS, *([columns["function_tag"]] if "function_tag" in columns else []))
    columns_of_format = ColumnMap(
        messages=columns.get("messages", "conversations" if chat else "messages"),
        role=columns.get("role_tag", "from" if chat else "role"),
        content=columns.get("content_tag", "value" if chat else "content"),
        media={kind: _media_keys(record_format, kind, columns) for kind in MEDIA},
        speakers=speakers,
        callers=callers,
        text=(columns["text"],) if "text" in columns else texts,
        label=(columns["label"],) if "label" in columns else ColumnMap.label,
    )
    return replace(columns_of_format, **renamed)


def _media_keys(record_format: RecordFormat, kind: PartKind, columns: Mapping[str, str]) -> tuple[str, ...]:
    if f"{kind}s" in columns:
        return (columns[f"{kind}s"],)
    named = ("audio_filepath",) if record_format == "transcript" and kind == "audio" else ()
    return (kind,) if record_format == "llava" else (*named, f"{kind}s", kind)


def check_columns(columns: Mapping[str, str], where: str) -> None:
    """Raise if `columns` of a recipe renames a field that no record format has, or to an empty name."""
    for name, key in columns.items():
        if name not in COLUMNS:
            raise TesseraError(
                f"unknown name in `columns`: {name!r}",
                where=where,
                allowed=COLUMNS,
                nearest=nearest(name, COLUMNS),
                fix="write {Tessera's name: name in your records}, such as columns: {messages: dialogue}",
                code="data.unknown-column",
            )
        if not key:
            raise TesseraError(
                f"the name of {name!r} in `columns` is empty", where=where, code="data.empty-column-name"
            )


class RecordSchema:
    """Detect the format of records by their keys, which `columns` may rename.

    `answered`: whether a record needs an answer.
    """

    def __init__(self, columns: Mapping[str, str], answered: bool = True) -> None:
        self.columns = dict(columns)
        self.names = {name: replace(column_map(name, columns), answered=answered) for name in FORMATS}
        self._media_named = any(f"{kind}s" in columns for kind in MEDIA)

    def decide(self, record: Mapping[str, Any]) -> RecordFormat | None:
        """Return the format of a record; None if its keys fit none, or several: LLaVA and ShareGPT without media."""
        key = self.names["messages"].messages
        # `columns` may name one key for both `messages` and `conversations`: then the key of the speaker decides.
        if has(record, key) and ("messages" not in self.columns or not self._speaks(record[key])):
            return "messages"
        if self.is_conversation(record):
            for record_format in ("llava", "sharegpt"):
                if any(has(record, key) for keys in self.names[record_format].media.values() for key in keys):
                    return "sharegpt" if self._media_named else record_format
            return None
        if self.fits(record, "speech"):
            return "speech"
        if not self._is_illustrated(record) and self.fits(record, "transcript"):
            return "transcript"
        formats: tuple[RecordFormat, ...] = (*QUESTION_FORMATS, "text")
        return next((fitting for fitting in formats if self.fits(record, fitting)), None)

    def is_conversation(self, record: Mapping[str, Any]) -> bool:
        return has(record, self.names["sharegpt"].messages)

    def fits(self, record: Mapping[str, Any], record_format: RecordFormat) -> bool:
        """Return whether a record has the keys of a format. Other keys do not matter."""
        names = self.names[record_format]
        if record_format == "preference":
            pair = has(record, names.chosen) and has(record, names.rejected)
            return pair or has_worse_answer(record)
        if record_format == "unpaired_preference":
            return any(has(record, key) for key in names.label)
        if record_format == "generation":  # keys are not checked: a record without them is a bad record of this format
            return True
        if record_format == "transcript":
            heard = any(has(record, key) for key in names.media["audio"])
            return heard and any(has(record, key) for key in names.text)
        if record_format == "speech":
            # Null is a bad value of these columns, unless the row has its recording instead.
            coded = has(record, names.codes) or (names.codes in record and not self.fits(record, "transcript"))
            return coded and any(key in record for key in names.text)
        if record_format == "text":
            return any(has(record, key) for key in names.text)
        if record_format in QUESTION_FORMATS:
            return has(record, names.prompt) and (has(record, names.response) or not names.answered)
        return "messages" in self.columns and has(record, names.messages)

    def _is_illustrated(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record cannot be a transcript: it has images, videos, placeholders, or a question."""
        names = self.names["text"]
        others = any(has(record, key) for kind in ("image", "video") for key in names.media[kind])
        placed = any("<audio>" in text for key in names.text if isinstance(text := record.get(key), str))
        return others or placed or any(self.fits(record, form) for form in QUESTION_FORMATS)

    def _speaks(self, turns: Any) -> bool:
        first = turns[0] if isinstance(turns, list) and turns else None
        return isinstance(first, dict) and self.names["sharegpt"].role in first


def has_worse_answer(record: Mapping[str, Any]) -> bool:
    """Return whether a record has `rejected_response` or `rejected_messages` beside a full conversation."""
    return any(has(record, key) for key in WORSE_ANSWERS)


# ---------------------------------------------------------------------------------------------- media of a record


# A path between tags, <img>a.jpg</img>; or a placeholder for the next file of a list.
_MARKS = re.compile(r"<(img|image|video|audio)>([^<>\r\n]+)</\1>|<(image|video|audio)>")
_MEDIA_TAGS: Mapping[str, PartKind] = {"img": "image", **{kind: kind for kind in MEDIA}}


class RecordMedia:
    """Assign the media that a record lists to the placeholders in its text, in order.

    Without a list of images, "<image>" is plain text; the same holds for videos and audio. A path between tags needs no
    list.
    """

    def __init__(self, record: Mapping[str, Any], names: ColumnMap, always: tuple[PartKind, ...] = ()) -> None:
        self.listed: dict[PartKind, list[Any]] = {}
        self.alone: set[PartKind] = set()  # kinds of media for which the record has a singular key, such as "image"
        self._record = record
        for kind in MEDIA:
            key = next((key for key in names.media[kind] if has(record, key)), None)
            if key is not None or kind in always:
                self.listed[kind] = [] if key is None else values_of(record[key], key)
            if key == kind:
                self.alone.add(kind)
        self.used: dict[PartKind, int] = dict.fromkeys(self.listed, 0)

    def fill(self, text: str) -> list[Part]:
        """Split a text into parts: texts, and the media of its placeholders and tags."""
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
        """Return the media between a pair of tags; None if the content is not a path of this kind of media."""
        kind = _MEDIA_TAGS[tag]
        part = media_part(kind, value)
        name = part.value.value if isinstance(part.value, AudioClip) else value
        fitting = ("audio", "video") if kind == "audio" else (kind,)  # audio: also the sound track of a video
        names_media = is_url(name) or is_data_url(name) or media_kind(name) in fitting
        return media_part(kind, value_of(value, tag)) if names_media else None

    def _placed(self, name: str) -> Part | None:
        kind = next((kind for kind in self.listed if kind == name), None)
        if kind is not None:
            return self.next(kind)
        for key, value in self._record.items():  # another key of the record may contain the media
            if name in key.lower() and isinstance(value, (str, bytes, list, dict)) and value:
                fail("data.media-column-unknown", f"{key!r} may contain <{name}>: set columns: {{{name}s: {key}}}")
        return None

    def next(self, kind: PartKind) -> Part:
        listed, at = self.listed.get(kind, []), self.used.get(kind, 0)
        self.used[kind] = at + 1
        # `used` also counts placeholders beyond the listed files: `check_used` compares it with the number of files.
        return media_part(kind, listed[at] if at < len(listed) else None)

    def rest_if_none_used(self) -> list[Part]:
        """Return all listed media, to be put before the text, if no placeholder was used; otherwise an empty list."""
        if any(self.used.values()):
            return []
        return [self.next(kind) for kind, listed in self.listed.items() for _ in listed]

    def check_used(self, messages: Iterable[Message] = ()) -> None:
        """Raise if the text has more or fewer placeholders than the record lists files.

        A file under a singular key such as "image" needs no placeholder if a part of `messages` stands for it: a part
        of the same kind.
        """
        named = {part.kind for message in messages for part in message.parts}
        for kind, used in self.used.items():
            count = len(self.listed.get(kind, []))
            if used != count and not (used == 0 and kind in self.alone & named):
                fail("data.placeholder-count", f"the text has {used} <{kind}> placeholders, the row {count} {kind}s")


def media_part(kind: PartKind, value: Any, span: tuple[float, float] | None = None) -> Part:
    """Return a media part. `value`: as `value_of` returns it; a path to audio may name a part of the recording.

    `span`: start and end in seconds of the part of a recording that is meant.
    """
    try:
        return Part(kind, AudioClip(value, *span) if span else clip_of(value) if kind == "audio" else value)
    except TesseraError as error:
        fail(str(error.code), error.what)


def values_of(value: Any, key: str) -> list[Any]:
    listed = value if isinstance(value, list) else [] if isinstance(value, str) and not value else [value]
    return [value_of(item, key) for item in listed]


def value_of(value: Any, key: str) -> Any:
    """Return a path, a URL or the media itself.

    {"bytes", "path"} and {"array", "sampling_rate"} are forms of Hugging Face data sets.
    """
    if isinstance(value, dict) and value.get("array") is not None and "sampling_rate" in value:
        # The array is used even if `value` also has a path.
        return AudioSamples(value["array"], value["sampling_rate"])
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, ArchiveMember, Image.Image)) or hasattr(value, "__array__"):
        return value
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str) or not value:
        fail("data.bad-media-value", f"{key}: must be a path, got {value!r:.80}")
    if is_data_url(value):
        try:
            return decode_data_url(value)
        except TesseraError as error:
            fail(str(error.code), f"{key}: {error.what}")
    return value


def text_of(value: Any) -> str:
    if not isinstance(value, str):
        fail("data.not-a-text", f"a text is a {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            fail("data.invalid-unicode", "a text is not valid Unicode (half of a surrogate pair)")
    return value


def has(record: Mapping[str, Any], key: str) -> bool:
    return record.get(key) is not None


# ---------------------------------------------------------------------------------------------- names of files


_SUFFIXES: dict[str, PartKind] = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(VIDEOS, "video"),
    **dict.fromkeys(AUDIOS, "audio"),
}


def stem_of(name: str) -> str:
    """Return the path up to the first dot of the file name. All files of one sample have the same stem."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def media_kind(name: str) -> PartKind | None:
    """Return the kind of media of a file by its suffix; None for other files."""
    return _SUFFIXES.get(suffix_of(name))
