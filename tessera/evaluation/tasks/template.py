"""Fill the templates of a task file: `{column}`, or `{column:filter|filter}`. No attribute or index is read."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.data.sources.container import RecordError
from tessera.errors import TesseraError, nearest
from tessera.evaluation.metrics.texts import checked_pattern

_MAX_LITERAL = 1 << 20
FILTERS = ("strip", "lower", "capitalize", "lines", "joined", "quoted", "get KEY", "without TEXT", "match REGEX")


def check_template(template: str, where: str) -> None:
    """Raise if a template is invalid."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TesseraError(
            f"not a template: {template!r:.200} ({error})",
            where=where,
            fix="write columns as {name}, and braces as {{ and }}",
            code="evaluation.bad-template",
        ) from None
    for _, name, filters, conversion in pieces:
        if name is None:
            continue
        if conversion or not name or re.search(r"[.\[\]{}]", name):
            raise TesseraError(
                f"not a field of a template: {{{name}}}",
                where=where,
                fix="write the name of a column and, after a colon, filters",
                code="evaluation.bad-template",
            )
        for each in filters.split("|") if filters else ():
            word, _, argument = each.partition(" ")
            words = {usage.partition(" ")[0] for usage in FILTERS}
            if word not in words:
                near = nearest(word, words)
                raise TesseraError(
                    f"templates of evaluation tasks have no filter {each!r:.100}",
                    where=where,
                    allowed=FILTERS,
                    nearest=near,
                    code="evaluation.bad-template",
                )
            if word == "match":
                checked_pattern(argument, where)


def fill(template: str, row: Mapping[str, Any], *, empty: bool = False) -> str:
    """Return the text of a template for a row. `empty`: a missing column is an empty text, and not an error."""
    out = []
    for text, name, filters, _ in string.Formatter().parse(template):
        out.append(text)
        if name is None:
            continue
        if row.get(name) is None and not empty:
            raise RecordError(f"the row has no column {name!r:.80}, or it is empty", code="evaluation.unknown-columns")
        value = row.get(name, "")
        for each in filters.split("|") if filters else ():
            value = _filtered(value, each)
        out.append(plain(value))
    return "".join(out)


def _filtered(value: Any, written: str) -> Any:
    word, _, argument = written.partition(" ")
    if word == "joined":
        return ", ".join(map(plain, as_list(value)))
    if word == "lines":
        return "\n".join(map(plain, as_list(value)))
    if word == "quoted":
        return ", ".join(f'"{plain(each).strip()}"' for each in as_list(value) if plain(each).strip())
    if word == "get":
        return value.get(argument) if isinstance(value, Mapping) else ""
    text = plain(value)
    if word == "match":
        match = re.search(argument, text)
        return "" if match is None else match[1] if match.re.groups else match[0]
    if word == "without":
        return text.replace(argument, "")
    return text.strip() if word == "strip" else text.lower() if word == "lower" else text.capitalize()


def plain(value: Any) -> str:
    """Return a value of a row as text. Whole numbers have no decimal point: some files store them as floats."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def as_list(value: Any) -> Sequence[Any]:
    """Return a list, which some files write as the text of a Python list. Any other value is a list of one."""
    if isinstance(value, str) and value[:1] in "[(" and value.strip()[-1:] in ("]", ")") and len(value) <= _MAX_LITERAL:
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return [value]
    return list(value) if isinstance(value, (list, tuple)) else [value]
