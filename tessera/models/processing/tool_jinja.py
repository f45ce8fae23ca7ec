"""The text of tools and tool calls as Jinja, for exported chat templates. `tessera.data.tool_calls` writes the same."""

from __future__ import annotations

from tessera.data.tool_calls import AFTER_TOOLS, BEFORE_TOOLS, BLANK


def _string(text: str) -> str:
    """Return text as a Jinja string expression: a plain line end after a Jinja tag would be dropped."""
    return "{{ '" + text.replace("\n", "\\n") + "' }}"


JINJA_BLANK = _string(BLANK)
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
# Jinja code that writes each entry of `tool_calls` as <tool_call>, JSON and </tool_call>, on three lines.
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
