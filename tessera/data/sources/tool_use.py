"""Functions that a model may call, as text: the tags of the Qwen and Hermes templates, in JSON.

system      ... <tools> one JSON object a line </tools> ...
assistant   <tool_call> {"name": ..., "arguments": {...}} </tool_call>
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

_INTRODUCTION = "# Tools\n\nThese functions can be called to answer the user. Their signatures are listed as JSON:"
_MANNER = (
    "To call a function, write its name and its arguments as one JSON object between these tags, "
    "once for each call:\n<tool_call>\n"
    '{"name": <name of the function>, "arguments": <object of arguments>}\n</tool_call>'
)


def with_tools(system: str, tools: Any) -> str:
    """A system message that also lists tools: a JSON list, or the text of one. `ValueError` says what is wrong."""
    listed = _listed(tools)
    if not listed:
        return system
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in listed)
    block = f"{_INTRODUCTION}\n<tools>\n{lines}\n</tools>\n\n{_MANNER}"
    return f"{system}\n\n{block}" if system else block


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
    except (ValueError, RecursionError):
        return value
    calls = said if isinstance(said, list) else [said]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return value
    return "\n".join(_call(call["name"], call.get("arguments", {})) for call in calls)


def listed_calls(calls: Any) -> str:
    """The `tool_calls` of an assistant's message, in tags. `ValueError` says what is wrong."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is a {type(calls).__name__}, not a list")
    texts = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call in tool_calls names no function")
        texts.append(_call(function["name"], function.get("arguments", {})))
    return "\n".join(texts)


def _call(name: Any, arguments: Any) -> str:
    if isinstance(arguments, str):  # arguments often come as the text of an object
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"
