"""How functions that a model may call are written into a conversation: the words of Qwen2.5's and Qwen3's templates.

The same words are used for every family, in what models are trained on and in the templates that exports carry.

system      its own words, a blank line, `# Tools` and one JSON object a line between <tools> tags
assistant   what it says, then each call: <tool_call> {"name": ..., "arguments": {...}} </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
_BLANK = "\n\n"  # between a system prompt and the tools


def with_listing(system: str, listing: str) -> str:
    return f"{system}{_BLANK}{listing}" if system else listing


def listing_of(tools: Iterable[Any]) -> str:
    return BEFORE_TOOLS + "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools) + AFTER_TOOLS


def lists_only_tools(system: str) -> bool:
    """Whether a system message has no words of its own: a family's usual prompt then stands before them."""
    return system.startswith(BEFORE_TOOLS)


def call_of(name: str, arguments: str) -> str:
    """`arguments`: as JSON."""
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


# ---------------------------------------------------------------------------------------------- the same in Jinja


def _string(text: str) -> str:
    """As a string: readers of templates drop a line end that follows a tag."""
    return "{{ '" + text.replace("\n", "\\n") + "' }}"


JINJA_BLANK = _string(_BLANK)
JINJA_LISTING = "{{ listing() }}"
JINJA_MACRO = (
    "{% macro listing() %}"
    + _string(BEFORE_TOOLS)
    + "{% for tool in tools %}"
    + _string("\n")
    + "{{ tool | tojson }}{% endfor %}"
    + _string(AFTER_TOOLS)
    + "{% endmacro %}"
)
# Of a message with `tool_calls`: each on a line of its own.
JINJA_CALLS = (
    "{% for call in message.tool_calls %}{% set call = call.function or call %}"
    "{% if message.content or not loop.first %}"
    + _string("\n")
    + "{% endif %}"
    + _string('<tool_call>\n{"name": "')
    + "{{ call.name }}"
    + _string('", "arguments": ')
    + "{% if call.arguments is string %}{{ call.arguments }}"
    "{% else %}{{ call.arguments | default({}) | tojson }}{% endif %}" + _string("}\n</tool_call>") + "{% endfor %}"
)
