"""Functions that a model may call, as rows list them and calls of them, in the words of chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tessera.data.tool_words import call_of, listing_of, with_listing


def with_tools(system: str, tools: Any) -> str:
    """A system message that also lists tools: a JSON list, or the text of one. `ValueError` says what is wrong."""
    listed = _listed(tools)
    return with_listing(system, listing_of(listed)) if listed else system


def _listed(tools: Any) -> Sequence[Any]:
    if isinstance(tools, str):
        if not tools.strip():
            return []
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools are not readable as JSON: {error}") from None
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, (dict, str)) for tool in tools):
        raise ValueError("tools are a JSON list of objects")
    return tools


def spoken_calls(value: str) -> str:
    """What a `function_call` turn says, in tags. Text that is no call in JSON (another manner of calling) stays."""
    try:
        said = json.loads(value)
        calls = said if isinstance(said, list) else [said]
        return listed_calls(calls) if calls else value
    except (ValueError, RecursionError):
        return value


def listed_calls(calls: Any) -> str:
    """The `tool_calls` of an assistant's message, in tags. `ValueError` says what is wrong."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is a {type(calls).__name__}, not a list")
    texts = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call in tool_calls names no function")
        texts.append(call_of(function["name"], _arguments(function.get("arguments", {}))))
    return "\n".join(texts)


def _arguments(given: Any) -> str:
    """As JSON. They often come as the text of an object, which stays as it is written."""
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    try:
        json.loads(given)
    except (ValueError, RecursionError):
        raise ValueError(f"arguments of a call are not readable as JSON: {given!r:.40}") from None
    return given
