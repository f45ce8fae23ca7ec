"""Split the text of an answer into the fields of a message: reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

from tessera.server.reasoning import ReasoningSplitter
from tessera.server.tools import ToolParser, ToolPiece


class AnswerParts:
    """Return the deltas of a message, in the form of OpenAI's chunks. A part that is None does not split."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def add(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas that are certain after more text."""
        return self._fields(self._reasoning.add(text) if self._reasoning else [("content", text)])

    def close(self) -> list[dict[str, Any]]:
        """Return the deltas that waited for more text."""
        fields = self._fields(self._reasoning.close() if self._reasoning else [])
        return fields + [_field(piece) for piece in (self._tools.close() if self._tools else [])]

    def _fields(self, parts: list[tuple[Any, str]]) -> list[dict[str, Any]]:
        fields: list[dict[str, Any]] = []
        for kind, text in parts:
            if kind == "content" and self._tools is not None:
                fields += [_field(piece) for piece in self._tools.add(text)]
            elif text:
                fields.append({kind: text})
        return fields


def _field(piece: str | ToolPiece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
    return {"tool_calls": [call]}
