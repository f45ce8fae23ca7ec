"""The spellings of a conversation: one parser each, from a JSON object to messages. Rows come from strangers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn

from tessera.core.types import Message, Part

ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}
_PLACEHOLDER = re.compile(r"<(image|video)>")


class RowError(Exception):
    """One row cannot be used. Whether that is a counted skip or the end of the run is the policy's to say."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (RowError, (self.id, self.reason))


def decide(row: dict[str, Any]) -> Literal["messages", "sharegpt", "llava"] | None:
    """The form this row must have, or None when its keys fit several (a conversation without media) or none."""
    if "messages" in row:
        return "messages"
    if "conversations" not in row:
        return None
    if "image" in row or "video" in row:
        return "llava"
    return "sharegpt" if "images" in row or "videos" in row else None


def parse_messages(row: dict[str, Any]) -> tuple[Message, ...]:
    listed = "images" in row or "videos" in row
    media = _Media(_paths(row.get("images"), "images"), _paths(row.get("videos"), "videos"))
    messages = []
    for turn in _turns(row, "messages"):
        role = turn.get("role")
        if role not in ROLES:
            _fail(f"unknown role {role!r} (known: {', '.join(ROLES)})")
        content = turn.get("content")
        if isinstance(content, str):
            # Without lists of media beside the messages, "<image>" in a text is only a word.
            parts = media.fill(content) if listed else [Part("text", _text(content))]
        elif isinstance(content, list):
            parts = [_part(item) for item in content]
        else:
            _fail(f"content is a {type(content).__name__}, not a text or a list of parts")
        messages.append(Message(str(role), tuple(parts)))
    media.check_used()
    return tuple(messages)


def parse_sharegpt(row: dict[str, Any]) -> tuple[Message, ...]:
    return _conversations(row, _Media(_paths(row.get("images"), "images"), _paths(row.get("videos"), "videos")))


def parse_llava(row: dict[str, Any]) -> tuple[Message, ...]:
    return _conversations(row, _Media(_paths(row.get("image"), "image"), _paths(row.get("video"), "video")))


PARSERS: dict[str, Callable[[dict[str, Any]], tuple[Message, ...]]] = {
    "messages": parse_messages,
    "sharegpt": parse_sharegpt,
    "llava": parse_llava,
}


class _Media:
    """Media listed beside a conversation, dealt out to its placeholders in order."""

    def __init__(self, images: list[str], videos: list[str]) -> None:
        self.listed = {"image": images, "video": videos}
        self.used = {"image": 0, "video": 0}

    def fill(self, text: str) -> list[Part]:
        parts: list[Part] = []
        # With one group in the pattern, every second piece of the split is the kind of a placeholder.
        for number, piece in enumerate(_PLACEHOLDER.split(_text(text))):
            if number % 2:
                parts.append(self._next(piece))
            elif piece:
                parts.append(Part("text", piece))
        return parts

    def _next(self, kind: str) -> Part:
        listed, at = self.listed[kind], self.used[kind]
        self.used[kind] += 1
        # Placeholders beyond the list are counted too, so that `check_used` can name both numbers.
        return Part("image" if kind == "image" else "video", listed[at] if at < len(listed) else None)

    def check_used(self) -> None:
        for kind, used in self.used.items():
            given = len(self.listed[kind])
            if used != given:
                _fail(f"{kind} token count that cannot match: {used} <{kind}> placeholders, {given} {kind}s")


def _conversations(row: dict[str, Any], media: _Media) -> tuple[Message, ...]:
    messages = []
    system = row.get("system")
    if isinstance(system, str) and system:
        messages.append(Message("system", (Part("text", _text(system)),)))
    for turn in _turns(row, "conversations"):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            _fail(f"unknown speaker {speaker!r} (known: {', '.join(_SPEAKERS)})")
        if not isinstance(value, str):
            _fail(f"value is a {type(value).__name__}, not a text")
        messages.append(Message(_SPEAKERS[speaker], tuple(media.fill(value))))
    media.check_used()
    return tuple(messages)


def _turns(row: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    turns = row.get(key)
    if not isinstance(turns, list) or not turns:
        _fail(f"{key} is not a list of turns" if turns != [] else f"{key} is empty")
    for turn in turns:
        if not isinstance(turn, dict):
            _fail(f"a turn in {key} is a {type(turn).__name__}, not an object")
        yield turn


def _part(item: Any) -> Part:
    if not isinstance(item, dict):
        _fail(f"a part of a message is a {type(item).__name__}, not an object")
    kind = item.get("type")
    if kind == "text":
        return Part("text", _text(item.get("text")))
    if kind in ("image", "image_url"):
        return Part("image", _path(_first(item, ("image", "path", "url", "image_url")), "image"))
    if kind in ("video", "video_url"):
        return Part("video", _path(_first(item, ("video", "path", "url", "video_url")), "video"))
    _fail(f"unknown type of part {kind!r} (known: text, image, video)")


def _first(item: dict[str, Any], keys: Iterable[str]) -> Any:
    value = next((item[key] for key in keys if key in item), None)
    return value.get("url") if isinstance(value, dict) else value


def _paths(value: Any, key: str) -> list[str]:
    if value is None:
        return []
    return [_path(item, key) for item in (value if isinstance(value, list) else [value])]


def _path(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        _fail(f"{key}: a path is expected, got {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _fail(f"text is a {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            _fail("text is not valid Unicode (half of a surrogate pair)")
    return value


def _fail(reason: str) -> NoReturn:
    raise RowError("", reason)
