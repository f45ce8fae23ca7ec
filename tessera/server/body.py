"""Read the JSON of a body. The number of its values is checked before they are parsed.

A body of some megabytes can hold millions of tiny values, such as `[{},{},...]`. A value costs a hundred times as much
as a character, and each wrong value gets an error message. All clients would wait meanwhile.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from tessera.server.errors import ApiError

# limit of texts, keys, lists and objects, which take about half a second to parse in the event loop
_MOST_VALUES = 200_000
_MOST_ITEMS = 4_000_000  # limit of all entries, numbers included: a prompt may be a list of tokens
# Matches a string (maybe unterminated), the opening bracket of a list or an object, or characters between these.
_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[{]|[^"\[{]++', re.DOTALL)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raise if the body is not a JSON object, or has too many values."""
    _check_values(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _check_values(body: bytes) -> None:
    marks = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    # `marks` also counts brackets and quotes inside of strings, so it is at least the number of texts, lists and
    # objects. If it is within the limit, they need not be counted exactly.
    if marks <= _MOST_VALUES and body.count(b",") <= _MOST_VALUES:
        return
    values = items = 0
    for piece in _PIECE.finditer(body):
        if body[piece.start()] in b'"[{':
            values += 1
        else:
            items += body.count(b",", piece.start(), piece.end())
        if values > _MOST_VALUES or items > _MOST_ITEMS:
            limit = f"{_MOST_VALUES} texts, keys, lists and objects, and {_MOST_ITEMS} entries"
            raise ApiError(400, f"the body has too many values; the limit is {limit}", code="too_many_values")
