"""What keys and speakers are called in the rows of a data set: the habit of each form, and what `columns` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera.core.errors import TesseraError, nearest
from tessera.core.run_config import RowForm
from tessera.core.types import PartKind

ROLES = ("system", "user", "assistant", "tool")
MEDIA: tuple[PartKind, ...] = ("image", "video", "audio")
FORMS: tuple[RowForm, ...] = ("messages", "sharegpt", "llava", "alpaca", "text", "preference")

# Who says it -> its role. Calls of functions are the assistant's words, their answers are the tool's.
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
# Names in `columns` that are not the name of a key: how a speaker is called.
_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}
_KEYS = ("id", "messages", "role_tag", "content_tag", "system", "tools", "images", "videos", "audios")
_ALPACA_KEYS = ("prompt", "query", "response", "history")
_PAIR_KEYS = ("chosen", "rejected")
COLUMNS = (*_KEYS, *_TAGS, *_ALPACA_KEYS, *_PAIR_KEYS, "text")


@dataclass(frozen=True)
class Names:
    """Keys in which a parser looks. Several names for one thing are tried in order."""

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
    text: tuple[str, ...] = ("text", "content")
    chosen: str = "chosen"
    rejected: str = "rejected"


def names_of(form: RowForm, columns: Mapping[str, str]) -> Names:
    """`columns` must have been checked."""
    said = {key: columns[key] for key in ("id", "system", "tools", *_ALPACA_KEYS, *_PAIR_KEYS) if key in columns}
    chat = form in ("sharegpt", "llava")
    speakers = {**_SPEAKERS, **{columns[tag]: role for tag, role in _TAGS.items() if tag in columns}}
    callers = (*_CALLERS, *([columns["function_tag"]] if "function_tag" in columns else []))
    return Names(
        messages=columns.get("messages", "conversations" if chat else "messages"),
        role=columns.get("role_tag", "from" if chat else "role"),
        content=columns.get("content_tag", "value" if chat else "content"),
        media={kind: _media_keys(form, kind, columns) for kind in MEDIA},
        speakers=speakers,
        callers=callers,
        text=(columns["text"],) if "text" in columns else ("text", "content"),
        **said,
    )


def _media_keys(form: RowForm, kind: PartKind, columns: Mapping[str, str]) -> tuple[str, ...]:
    if f"{kind}s" in columns:
        return (columns[f"{kind}s"],)
    if form == "llava":
        return (kind,)
    return (f"{kind}s", kind) if form in ("alpaca", "text") else (f"{kind}s",)


def check_columns(columns: Mapping[str, str], where: str) -> None:
    for name, theirs in columns.items():
        if name not in COLUMNS:
            raise TesseraError(
                f"unknown name in `columns`: {name!r}",
                where=where,
                allowed=COLUMNS,
                nearest=nearest(name, COLUMNS),
                fix="write our name first, then the one in your rows: columns: {messages: dialogue}",
            )
        if not theirs:
            raise TesseraError(f"`columns` gives {name!r} an empty name", where=where)
