"""The spellings of a sample: one parser each, from a JSON object to messages. Rows come from strangers.

messages   {"messages": [{"role": "user", "content": "text" or [{"type": "image", "image": "a.jpg"}, ...]}, ...]}
sharegpt   {"conversations": [{"from": "human", "value": "<image> text"}, ...], "images": ["a.jpg"]}
llava      {"conversations": [{"from": "human", "value": "<image>\\n text"}, ...], "image": "a.jpg"}
alpaca     {"instruction": "ask", "input": "about", "output": "answer", "history": [["ask", "answer"], ...]}
text       {"text": "words that nobody says", "images": ["a.jpg"]}
preference {"prompt": "ask" or messages, "chosen": "better answer", "rejected": "worse answer"}; see `pairs`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NoReturn

from PIL import Image

from tessera.core.run_config import RowForm
from tessera.core.types import PLAIN, Message, Part, PartKind
from tessera.data.sources.names import FORMS, MEDIA, ROLES, Names, names_of
from tessera.data.sources.pairs import CHOSEN, REJECTED, two_rows
from tessera.data.sources.tool_use import listed_calls, spoken_calls, with_tools
from tessera.data.sources.within import Within

__all__ = ["ROLES", "Forms", "RowError", "parse"]

_PLACEHOLDER = re.compile(r"<(image|video|audio)>")


class RowError(Exception):
    """One row cannot be used. Whether that is a counted skip or the end of the run is the policy's to say."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (RowError, (self.id, self.reason))


class Forms:
    """Tells rows of one form from another, under the names that a data set uses."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = dict(columns)
        self.names = {form: names_of(form, columns) for form in FORMS}
        self._media_named = any(f"{kind}s" in columns for kind in MEDIA)

    def decide(self, row: Mapping[str, Any]) -> RowForm | None:
        """The form this row must have, or None when its keys fit several (a conversation without media) or none."""
        key = self.names["messages"].messages
        # One name may serve both kinds of conversation, when `columns` gives it: who speaks tells them apart.
        if _has(row, key) and ("messages" not in self.columns or not self._speaks(row[key])):
            return "messages"
        if self.is_conversation(row):
            for form in ("llava", "sharegpt"):
                if any(_has(row, key) for keys in self.names[form].media.values() for key in keys):
                    return "sharegpt" if self._media_named else form
            return None
        return next((form for form in ("alpaca", "text") if self.fits(row, form)), None)

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        return _has(row, self.names["sharegpt"].messages)

    def fits(self, row: Mapping[str, Any], form: RowForm) -> bool:
        """Whether a row has what a form needs, whatever else it may be: for a form that the recipe itself names."""
        names = self.names[form]
        if form == "preference":
            return _has(row, names.chosen) and _has(row, names.rejected)
        if form == "text":
            return any(_has(row, key) for key in names.text)
        if form == "alpaca":
            return _has(row, names.prompt) and _has(row, names.response)
        return "messages" in self.columns and _has(row, names.messages)

    def _speaks(self, turns: Any) -> bool:
        first = turns[0] if isinstance(turns, list) and turns else None
        return isinstance(first, dict) and self.names["sharegpt"].role in first


def parse(row: Mapping[str, Any], form: RowForm, names: Names) -> tuple[Message, ...]:
    return _PARSERS[form](row, names)


def _parse_messages(row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    media = _Media(row, names)
    messages = []
    for turn in _turns(row, names.messages):
        role, calls = _role(turn, names), turn.get("tool_calls")
        content = turn.get(names.content)
        if content is None and calls:
            content = ""
        if isinstance(content, str):
            parts = media.fill(spoken_calls(content) if turn.get(names.role) in names.callers else content)
        elif isinstance(content, list):
            parts = [_part(item, media) for item in content]
        else:
            _fail(f"{names.content} is a {type(content).__name__}, not a text or a list of parts")
        if calls:
            parts.append(Part("text", ("\n" if parts else "") + _right(listed_calls, calls)))
        messages.append(Message(role, tuple(parts)))
    media.check_used()
    return _with_system(messages, row, names)


def _parse_conversations(row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    # Without a list beside it, <video> may be a word; <image> in a conversation never is.
    media = _Media(row, names, always=("image",))
    messages = []
    for turn in _turns(row, names.messages):
        role, value = _role(turn, names), turn.get(names.content)
        if not isinstance(value, str):
            _fail(f"{names.content} is a {type(value).__name__}, not a text")
        if turn.get(names.role) in names.callers:
            value = spoken_calls(value)
        messages.append(Message(role, tuple(media.fill(value))))
    media.check_used()
    return _with_system(messages, row, names)


def _parse_alpaca(row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    media = _Media(row, names)
    said: list[tuple[str, str]] = []
    history = row.get(names.history) or []
    if not isinstance(history, list):
        _fail(f"{names.history} is a {type(history).__name__}, not a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            _fail(f"{names.history} is a list of pairs: what was asked, what was answered")
        said += [("user", _text(pair[0])), ("assistant", _text(pair[1]))]
    asked = [_text(row.get(key)) for key in (names.prompt, names.query) if row.get(key) not in (None, "")]
    answer = row.get(names.response)
    if not isinstance(answer, str) or not answer:
        _fail(f"{names.response} is not a text" if answer else f"{names.response} is empty")
    if not asked:
        _fail(f"{names.prompt} is empty")
    said += [("user", "\n".join(asked)), ("assistant", answer)]
    parts = [(role, media.fill(text)) for role, text in said]
    parts[0] = (parts[0][0], [*media.rest_if_none_used(), *parts[0][1]])
    media.check_used()
    return _with_system([Message(role, tuple(filled)) for role, filled in parts], row, names)


def _parse_text(row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    media = _Media(row, names)
    text = next((row[key] for key in names.text if _has(row, key)), None)
    if not isinstance(text, str) or not text.strip():
        _fail(f"no text under {' or '.join(repr(key) for key in names.text)}")
    parts = media.fill(text)
    parts = [*media.rest_if_none_used(), *parts]
    media.check_used()
    return (Message(PLAIN, tuple(parts)),)


def _parse_preference(row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    """What was asked, then the better answer and the worse one, under roles of their own."""
    better, worse = (parse(*spelled) for spelled in _right_pairs(row, names))
    if better[:-1] != worse[:-1]:
        _fail("the two conversations differ before their last turn")
    for answer in (better[-1], worse[-1]):
        if answer.role != "assistant" or any(part.kind != "text" for part in answer.parts):
            _fail("an answer is a text that the assistant says")
    return (*better[:-1], Message(CHOSEN, better[-1].parts), Message(REJECTED, worse[-1].parts))


def _right_pairs(row: Mapping[str, Any], names: Names) -> list[tuple[dict[str, Any], RowForm, Names]]:
    try:
        return two_rows(row, names)
    except ValueError as error:
        _fail(str(error))


_PARSERS: dict[RowForm, Callable[[Mapping[str, Any], Names], tuple[Message, ...]]] = {
    "preference": _parse_preference,
    "messages": _parse_messages,
    "sharegpt": _parse_conversations,
    "llava": _parse_conversations,
    "alpaca": _parse_alpaca,
    "text": _parse_text,
}


class _Media:
    """Media listed beside a sample, dealt out to its placeholders in order. A kind that has no list has no
    placeholders either: "<image>" in a text is then only a word."""

    def __init__(self, row: Mapping[str, Any], names: Names, always: tuple[PartKind, ...] = ()) -> None:
        self.listed: dict[PartKind, list[Any]] = {}
        for kind in MEDIA:
            key = next((key for key in names.media[kind] if _has(row, key)), None)
            if key is not None or kind in always:
                self.listed[kind] = [] if key is None else _values(row[key], key)
        self.used: dict[PartKind, int] = dict.fromkeys(self.listed, 0)

    def fill(self, text: str) -> list[Part]:
        parts: list[Part] = []
        words = ""
        # With one group in the pattern, every second piece of the split is the kind of a placeholder.
        for number, piece in enumerate(_PLACEHOLDER.split(_text(text))):
            kind = next((kind for kind in self.listed if kind == piece), None) if number % 2 else None
            if kind is None:
                words += f"<{piece}>" if number % 2 else piece
                continue
            if words:
                parts.append(Part("text", words))
            words = ""
            parts.append(self.next(kind))
        return [*parts, Part("text", words)] if words else parts

    def next(self, kind: PartKind) -> Part:
        listed, at = self.listed.get(kind, []), self.used.get(kind, 0)
        self.used[kind] = at + 1
        # Placeholders beyond the list are counted too, so that `check_used` can name both numbers.
        return Part(kind, listed[at] if at < len(listed) else None)

    def rest_if_none_used(self) -> list[Part]:
        """A sample that shows media and has no placeholder shows them first."""
        if any(self.used.values()):
            return []
        return [self.next(kind) for kind, listed in self.listed.items() for _ in listed]

    def check_used(self) -> None:
        for kind, used in self.used.items():
            given = len(self.listed.get(kind, []))
            if used != given:
                _fail(f"{kind} token count that cannot match: {used} <{kind}> placeholders, {given} {kind}s")


def _with_system(messages: list[Message], row: Mapping[str, Any], names: Names) -> tuple[Message, ...]:
    system, tools = row.get(names.system), row.get(names.tools)
    if system is not None and not isinstance(system, str):
        _fail(f"{names.system} is a {type(system).__name__}, not a text")
    if not system and not tools:
        return tuple(messages)
    first: tuple[Part, ...] = (Part("text", _text(system)),) if system else ()
    if messages[0].role == "system":
        if system:
            _fail(f"a system prompt is given twice: under {names.system!r} and as the first turn")
        first, messages = messages[0].parts, messages[1:]
    if tools:
        if any(part.kind != "text" for part in first):
            _fail("a system message with media cannot list tools")
        words = _right(lambda given: with_tools("".join(part.value for part in first), given), tools)
        first = (Part("text", _text(words)),) if words else ()
    return (Message("system", first), *messages) if first else tuple(messages)


def _turns(row: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    turns = row.get(key)
    if not isinstance(turns, list) or not turns:
        _fail(f"{key} is not a list of turns" if turns != [] else f"{key} is empty")
    for turn in turns:
        if not isinstance(turn, dict):
            _fail(f"a turn in {key} is a {type(turn).__name__}, not an object")
        yield turn


def _role(turn: dict[str, Any], names: Names) -> str:
    said = turn.get(names.role)
    if said is None:
        _fail(f"a turn has no {names.role!r}, it has {sorted(turn)[:6]}; `columns` can name another key as role_tag")
    if not isinstance(said, str) or said not in names.speakers:
        what = "speaker" if names.role == "from" else "role"
        _fail(f"unknown {what} {said!r:.40} (known: {', '.join(names.speakers)})")
    return names.speakers[said]


def _part(item: Any, media: _Media) -> Part:
    if not isinstance(item, dict):
        _fail(f"a part of a message is a {type(item).__name__}, not an object")
    named = item.get("type")
    if named == "text":
        return Part("text", _text(item.get("text")))
    kind = next((kind for kind in MEDIA if named in (kind, f"{kind}_url")), None)
    if kind is None:
        _fail(f"unknown type of part {named!r} (known: text, {', '.join(MEDIA)})")
    value = _first(item, (kind, "path", "url", f"{kind}_url"))
    if value is None and media.listed.get(kind):
        return media.next(kind)  # the part only says where, the list beside the messages says which
    return Part(kind, _value(value, kind))


def _first(item: dict[str, Any], keys: Iterable[str]) -> Any:
    value = next((item[key] for key in keys if item.get(key) is not None), None)
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _values(value: Any, key: str) -> list[Any]:
    listed = value if isinstance(value, list) else [] if isinstance(value, str) and not value else [value]
    return [_value(item, key) for item in listed]


def _value(value: Any, key: str) -> Any:
    """A path, or where there is one already, the media itself. {"bytes", "path"} is how Hugging Face stores it."""
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (bytes, Within, Image.Image)) or hasattr(value, "__array__"):
        return value
    if isinstance(value, PurePath):
        value = str(value)
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


def _right(work: Callable[[Any], str], value: Any) -> str:
    try:
        return work(value)
    except ValueError as error:
        _fail(str(error))


def _has(row: Mapping[str, Any], key: str) -> bool:
    return row.get(key) is not None


def _fail(reason: str) -> NoReturn:
    raise RowError("", reason)
