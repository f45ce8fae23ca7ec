"""Write tools and tool calls into a conversation, as the templates of Qwen2.5 and Qwen3 do.

All families use this text, for training and in exported chat templates.

system      system prompt, a blank line, `# Tools` and one JSON object per line between <tools> tags
assistant   answer, then each call: <tool_call> {"name": ..., "arguments": {...}} </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
BLANK = "\n\n"  # text between a system prompt and the list of tools


def with_listing(system: str, listing: str) -> str:
    return f"{system}{BLANK}{listing}" if system else listing


def lists_only_tools(system: str) -> bool:
    """Return whether a system message is only the list of tools. Then the family's default prompt comes first."""
    return system.startswith(BEFORE_TOOLS)


# ---------------------------------------------------------------------------------------------- from records


def with_tools(system: str, tools: Any) -> str:
    """Append the list of tools to a system message. `tools`: a list, or its JSON text; others raise `ValueError`."""
    listed = _listed(tools)
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in listed)
    return with_listing(system, BEFORE_TOOLS + lines + AFTER_TOOLS) if listed else system


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
        raise ValueError("tools must be a JSON list of objects")
    return tools


def format_spoken_calls(value: str) -> str:
    """Convert the text of a `function_call` turn to tool-call tags. Text that is not a call in JSON stays unchanged."""
    try:
        parsed = json.loads(value)
        calls = parsed if isinstance(parsed, list) else [parsed]
        return format_calls(calls) if calls else value
    except (ValueError, RecursionError):
        return value


def format_calls(calls: Any) -> str:
    """Convert the `tool_calls` of an assistant message to tool-call tags. Raise `ValueError` for an invalid call."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is a {type(calls).__name__}, not a list")
    texts = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call in tool_calls has no function name")
        name, arguments = json.dumps(function["name"], ensure_ascii=False), _arguments(function.get("arguments", {}))
        texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(texts)


def _arguments(arguments: Any) -> str:
    """Return the arguments of a call as JSON text. Arguments that are JSON text already stay unchanged."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        raise ValueError(f"arguments of a call are not readable as JSON: {arguments!r:.40}") from None
    return arguments
