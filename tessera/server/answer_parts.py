"""Split the text of an answer into the fields of a message: reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

from tessera.server.reasoning import ReasoningSplitter
from tessera.server.tools import ToolParser, ToolPiece


class AnswerParts:
    """Split the text of a message into deltas, in the form of OpenAI's chunks. A splitter that is None is not used.

    `one_call`: leave out all tool calls but the first.
    """

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, *, one_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call

    def add(self, text: str) -> list[dict[str, Any]]:
        """Add text to the message. Return the deltas that later text cannot change."""
        return self._fields(self._reasoning.add(text) if self._reasoning else [("content", text)])

    def close(self) -> list[dict[str, Any]]:
        """End the message. Return the deltas that were held back until more text arrives."""
        fields = self._fields(self._reasoning.close() if self._reasoning else [])
        return fields + self._pieces(self._tools.close() if self._tools else [])

    def _fields(self, parts: list[tuple[Any, str]]) -> list[dict[str, Any]]:
        fields: list[dict[str, Any]] = []
        for kind, text in parts:
            if kind == "content" and self._tools is not None:
                fields += self._pieces(self._tools.add(text))
            elif text:
                fields.append({kind: text})
        return fields

    def _pieces(self, pieces: list[str | ToolPiece]) -> list[dict[str, Any]]:
        return [_field(piece) for piece in pieces if isinstance(piece, str) or not (self._one_call and piece.index)]


def _field(piece: str | ToolPiece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
    return {"tool_calls": [call]}
