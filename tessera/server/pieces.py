"""Join streamed parts of a message: content, reasoning, tool calls."""

from __future__ import annotations

from typing import Any

Fields = dict[
    str, Any
]  # a part of a message in OpenAI's form: {"content": ...}, {"reasoning": ...}, {"tool_calls": [...]}


def joined(parts: list[Fields]) -> Fields:
    """Return streamed parts of a message as one message. Parts of a tool call have the same `index`."""
    message: Fields = {}
    calls: dict[int, Fields] = {}
    for part in parts:
        for key, value in part.items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            for call in value:
                whole = calls.setdefault(
                    call["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                whole["id"] = call.get("id") or whole["id"]
                for name, text in call.get("function", {}).items():
                    whole["function"][name] += text or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
