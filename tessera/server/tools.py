"""Parse tool calls in the text of an answer while it streams, and force answers to be tool calls.

The prompts of all families ask for `<tool_call>` tags with {"name": ..., "arguments": {...}}, which
`tessera.data.tool_calls` writes. Published weights of some families also call in the form of their own training:

llama       {"name": ..., "parameters": {...}} at the beginning of the answer, also after <|python_tag|>
glm4v       the name on a line, and the arguments as a JSON object on the next, at the beginning of the answer

These forms have no tags of their own, so only the names of offered tools count as calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tessera.engine.request import Constraint
from tessera.errors import TesseraError, nearest

_SPACE, _NAME, _TOOL = "space", "name", "tool"  # atoms: whitespace, any function name, the name of an offered tool
_Atoms: TypeAlias = tuple[str | tuple[str, ...], ...]  # a tuple atom lists alternative literals

_OPEN, _CLOSE, _LINE = "<tool_call>", "</tool_call>", "\n"
_NAME_RUN = re.compile(r'[^"\\\x00-\x1f]{0,256}')
_SPACE_RUN = re.compile(r"\s*")
_STRUCTURE = re.compile(r'[{}"]')
_STRING_END = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True)
class ToolPiece:
    """Hold a part of a tool call. The first piece has the name, the others only text of the arguments."""

    index: int  # index of the call in the answer
    id: str
    name: str | None
    arguments: str = ""


@dataclass(frozen=True)
class _Form:
    """Describe the text that a model writes around the arguments of a call."""

    head: _Atoms
    tail: _Atoms
    anywhere: bool = False  # whether plain text may come before a call


_TAGGED = _Form(
    head=(
        *(_SPACE, (_OPEN,), _SPACE, ("{",), _SPACE, ('"name"',), _SPACE, (":",), _SPACE, ('"',), _NAME, ('"',)),
        *(_SPACE, (",",), _SPACE, ('"arguments"', '"parameters"'), _SPACE, (":",), _SPACE),
    ),
    tail=(_SPACE, ("}",), _SPACE, (_CLOSE,)),
    anywhere=True,
)
_LLAMA_NAME: _Atoms = (
    *(('"name"',), _SPACE, (":",), _SPACE, ('"',), _TOOL, ('"',), _SPACE, (",",), _SPACE),
    *(('"parameters"', '"arguments"'), _SPACE, (":",), _SPACE),
)
_LLAMA_OPEN: _Atoms = (_SPACE, ("<|python_tag|>", ";", ""), _SPACE, ("{",), _SPACE)
_LLAMA_TYPE: _Atoms = (('"type"',), _SPACE, (":",), _SPACE, ('"function"',), _SPACE, (",",), _SPACE)
_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "llama": (
        _Form((*_LLAMA_OPEN, *_LLAMA_NAME), (_SPACE, ("}",))),
        _Form((*_LLAMA_OPEN, *_LLAMA_TYPE, *_LLAMA_NAME), (_SPACE, ("}",))),
    ),
    "glm4v": (_Form((_SPACE, _TOOL, ("\n",), _SPACE), ()),),
}


def parser_for(family: str, names: Collection[str] = ()) -> ToolParser:
    """Return a parser for the answer of a model. `names`: names of the tools that the request offers."""
    return ToolParser((_TAGGED, *_FORMS.get(family, ())), frozenset(names))


class ToolParser:
    """Split the text of an answer into plain text and tool calls, however the text is divided on arrival.

    The name of a call is returned as soon as its arguments begin, and the arguments as they arrive. Text that begins
    like a call but does not reach its arguments is plain text. Whitespace around calls is left out.
    """

    def __init__(self, forms: Sequence[_Form], names: frozenset[str]) -> None:
        self._forms = forms
        self._names = names
        self._text = ""  # text that is not yet returned
        self._at_start = True  # whether all text so far is whitespace or tool calls
        self._after_call = False  # whether the text since the last tool call is only whitespace
        self._call: _Call | None = None
        self._count = 0

    def add(self, text: str) -> list[str | ToolPiece]:
        """Add text. Return the pieces that later text cannot change."""
        self._text += text
        pieces: list[str | ToolPiece] = []
        while self._text:
            before = len(self._text)
            if self._call is None:
                self._read_text(pieces)
            else:
                self._read_call(self._call, pieces)
            if len(self._text) == before:
                break
        return pieces

    def close(self) -> list[str | ToolPiece]:
        """End the text.

        Return the pieces that were held back. An incomplete closing tag is removed: its call is complete.
        """
        text, self._text = self._text, ""
        if not text or (self._after_call and not text.strip()):
            return []
        if self._call is None:
            return [text]
        return [] if self._call.complete else [ToolPiece(self._call.index, self._call.id, None, text)]

    # -------------------------------------------------------------------------------------- plain text

    def _read_text(self, pieces: list[str | ToolPiece]) -> None:
        start = 0
        while True:
            for form in self._forms:
                if not (form.anywhere or self._at_start):
                    continue
                head = _match(form.head, self._text, start, self._names)
                if head.end is not None and not self._text.startswith("{", head.end):
                    head = _Match(waits=head.end == len(self._text))
                if head.end is None and not head.waits:
                    continue
                self._write(self._text[:start], pieces)
                self._text = self._text[start:] if head.end is None else self._text[head.end :]
                if head.end is not None:
                    self._call = _Call(form, self._count, f"call_{secrets.token_hex(12)}")
                    pieces.append(ToolPiece(self._count, self._call.id, head.name))
                    self._count += 1
                return
            start = _next_candidate(self._text, start)
            if self._text[:start].strip():
                self._at_start = False
            if start == len(self._text):
                self._write(self._text, pieces)
                self._text = ""
                return

    def _write(self, text: str, pieces: list[str | ToolPiece]) -> None:
        if text:
            pieces.append(text)
            self._after_call = False

    # -------------------------------------------------------------------------------------- calls

    def _read_call(self, call: _Call, pieces: list[str | ToolPiece]) -> None:
        if not call.complete:
            end = call.scan(self._text)
            if end:
                pieces.append(ToolPiece(call.index, call.id, None, self._text[:end]))
                self._text = self._text[end:]
        if call.complete:
            tail = _match(call.form.tail, self._text, 0, self._names)
            if tail.waits:
                return
            self._text = self._text[tail.end or 0 :]
            self._call, self._after_call = None, True


class _Call:
    """Find the end of a tool call's JSON arguments in text that arrives piece by piece."""

    def __init__(self, form: _Form, index: int, id: str) -> None:
        self.form = form
        self.index = index
        self.id = id
        self.complete = False
        self._depth = 0
        self._in_string = False

    def scan(self, text: str) -> int:
        """Return how much of the text belongs to the arguments. An incomplete escape sequence is held back."""
        position = 0
        while position < len(text):
            if self._in_string:
                end = _STRING_END.match(text, position)
                if end is None:
                    backslashes = len(text) - len(text.rstrip("\\"))
                    return max(position, len(text) - backslashes % 2)
                position, self._in_string = end.end(), False
                continue
            mark = _STRUCTURE.search(text, position)
            if mark is None:
                return len(text)
            position = mark.end()
            self._in_string = mark[0] == '"'
            self._depth += {"{": 1, "}": -1}.get(mark[0], 0)
            if self._depth == 0:
                self.complete = True
                return position
        return position


@dataclass(frozen=True)
class _Match:
    waits: bool  # whether more text may complete the match
    end: int | None = None  # where the text continues after a complete match
    name: str = ""


def _match(atoms: _Atoms, text: str, position: int, names: frozenset[str]) -> _Match:
    """Match the text from a position on against a sequence of atoms: whitespace, names and literals."""
    name = ""
    for atom in atoms:
        if atom == _SPACE:
            position = _end(_SPACE_RUN, text, position)
        elif atom in (_NAME, _TOOL):
            end = _end(_NAME_RUN, text, position)
            name = text[position:end]
            if end == len(text):
                fits = atom == _NAME or any(tool.startswith(name) for tool in names)
                return _Match(waits=fits)
            if not name or (atom == _TOOL and name not in names):
                return _Match(waits=False)
            position = end
        else:
            rest = text[position : position + 16]  # no literal of a tool call format is longer
            literal = next((literal for literal in atom if literal and rest.startswith(literal)), None)
            if literal is None:
                if any(literal.startswith(rest) for literal in atom if literal):
                    return _Match(waits=True)
                if "" not in atom:
                    return _Match(waits=False)
            position += len(literal or "")
    return _Match(waits=False, end=position, name=name)


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    run = pattern.match(text, position)
    assert run is not None  # both patterns also match empty text, so there is always a match
    return run.end()


def _next_candidate(text: str, position: int) -> int:
    """Return the next position where a tag, or whitespace before it, may begin; if there is none, the text's length."""
    tag = text.find("<", _end(_SPACE_RUN, text, position) + 1)
    end = len(text) if tag < 0 else tag
    return max(position + 1, len(text[:end].rstrip()))


# ---------------------------------------------------------------------------------------------- forced calls


def constraint_for(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any] | None, *, parallel: bool = True
) -> Constraint | None:
    """Return the constraint that forces an answer to be calls of tools, or None when the model may choose.

    Tools and `tool_choice` have the form of chat completions. The grammar writes calls in the form of the prompts.
    `parallel`: whether an answer may have several calls; a named tool is called once.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        functions, offered = [f for f in functions if f["name"] == name], functions
        if not functions:
            names = [function["name"] for function in offered]
            raise TesseraError(
                f"tool_choice names the tool {name!r}, which tools does not list",
                where="tool_choice",
                allowed=names,
                nearest=nearest(name, names),
                code="generation.unknown-tool",
            )
    elif not functions:
        raise TesseraError(
            "tool_choice is 'required', but there are no tools",
            where="tool_choice",
            fix="list tools, or leave tool_choice out",
            code="generation.no-tools",
        )
    several = parallel and tool_choice == "required"
    bodies = " | ".join(f"call_{number}" for number in range(len(functions)))
    lines = [
        "start: call" + (f" ({_literal(_LINE)} call)*" if several else ""),
        f"call: {_literal(_OPEN + _LINE)} ({bodies}) {_literal('}' + _LINE + _CLOSE)}",
    ]
    for number, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        lines.append(f"call_{number}: {_literal(head)} %json {_schema(function.get('parameters'))}")
    return Constraint("grammar", "\n".join(lines))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(parameters: Mapping[str, Any] | None) -> str:
    """Return the JSON schema of arguments: always an object, with spaces as `json.dumps` writes them in prompts."""
    blanks = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**(parameters or {}), "type": "object", "x-guidance": blanks})
