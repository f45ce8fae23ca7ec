"""The names of keys and speakers in records: the habit of each format, and what `columns` of a recipe says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from tessera.config.run_config import RecordFormat
from tessera.core.sample import PartKind
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
# Name in `columns` -> keys that rows have in its place, as people call them.
_OFTEN = {
    "text": ("caption", "captions", "cap", "description", "sentence"),
    "messages": ("dialogue", "dialog", "turns", "chat", "conversation"),
    "images": ("picture", "pictures", "img", "photo", "image_path", "image_file", "file_name", "filename", "file"),
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
# Keys of the formats that are like alpaca, where these differ: what is asked, and what is answered.
_ASKED_BY: Mapping[RecordFormat, Mapping[str, str]] = {
    "query_response": {"prompt": "query", "query": "", "response": "response"},
    "question_answer": {"prompt": "question", "query": "", "response": "answer"},
}
_PAIR_KEYS = ("chosen", "rejected", "completion")
_TEXT_KEYS = ("text", "content")
_CAPTION_KEYS = ("cap", "caption", "text", "prompt", "content")
COLUMNS = (*_KEYS, *_TAGS, *_ALPACA_KEYS, *_PAIR_KEYS, "label", "text", "path", "references")


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
            )
        if not key:
            raise TesseraError(f"`columns` gives {name!r} an empty name", where=where)


def likely_columns(keys: Iterable[str]) -> str:
    """Return what `columns` of a recipe may have to say of rows with these keys; without a clue, an example."""
    found = {ours: key for ours, theirs in _OFTEN.items() for key in sorted(keys) if key.lower() in theirs}
    if not set(found) - {"images"}:
        found = {"messages": "dialogue", "role_tag": "speaker"}
    return "{" + ", ".join(f"{ours}: {key}" for ours, key in found.items()) + "}"
