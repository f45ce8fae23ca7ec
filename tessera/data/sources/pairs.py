"""Rows with a better and a worse answer, in the spellings in use: each becomes two rows of a form that is known.

{"prompt": "ask", "chosen": "better", "rejected": "worse"}
{"prompt": [messages], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
{"chosen": [the whole conversation], "rejected": [another end of it]}
{"messages": [messages], "chosen": {"role": "assistant", ...} or "better", "rejected": ...}
{"conversations": [turns], "chosen": {"from": "gpt", "value": "better"}, "rejected": ...}, with images or image
{"instruction": "ask", "input": "about", "chosen": "better", "rejected": "worse"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tessera.core.run_config import RowForm
from tessera.data.sources.names import Names, names_of

CHOSEN, REJECTED = "chosen", "rejected"  # roles of the two last turns of such a sample
_PROMPT = "prompt"
_Row = tuple[dict[str, Any], RowForm, Names]


def two_rows(row: Mapping[str, Any], names: Names) -> list[_Row]:
    """The row as it would be with the better answer alone, and with the worse one alone. ValueError: it cannot be."""
    answers = [row.get(names.chosen), row.get(names.rejected)]
    for key, answer in zip((names.chosen, names.rejected), answers, strict=True):
        if not isinstance(answer, (str, Mapping, list)) or not answer:
            raise ValueError(f"{key} is no answer: a text, a turn or a list of turns is expected")
    rest = {key: value for key, value in row.items() if key not in (names.chosen, names.rejected, _PROMPT)}
    return [_with_answer(row, rest, answer, names) for answer in answers]


def _with_answer(row: Mapping[str, Any], rest: dict[str, Any], answer: Any, names: Names) -> _Row:
    if isinstance(answer, list) and _begins(answer, names):  # all of the conversation: what was asked is in it
        return {**rest, names.messages: answer}, "messages", replace(names)
    talk = names_of("sharegpt", {})
    if row.get(names.messages) is not None:
        asked = _turns(row[names.messages], names.messages)
        return {**rest, names.messages: [*asked, *_as_turns(answer, names, "assistant")]}, "messages", names
    if row.get(talk.messages) is not None:
        form: RowForm = "llava" if row.get("image") is not None else "sharegpt"
        asked = _turns(row[talk.messages], talk.messages)
        spoken = _as_turns(answer, talk, "gpt")
        return {**rest, talk.messages: [*asked, *spoken]}, form, names_of(form, {})
    prompt = row.get(_PROMPT)
    if isinstance(prompt, (str, list)) and prompt:
        asked = _as_turns(prompt, names, "user")
        return {**rest, names.messages: [*asked, *_as_turns(answer, names, "assistant")]}, "messages", names
    if row.get(names.prompt) is not None:
        if not isinstance(answer, str):
            raise ValueError(f"beside {names.prompt!r} an answer is a text")
        return {**rest, names.response: answer}, "alpaca", names_of("alpaca", {})
    raise ValueError(f"nothing is asked: give {_PROMPT!r}, {names.messages!r} or {talk.messages!r} beside the answers")


def _begins(turns: list[Any], names: Names) -> bool:
    first = turns[0]
    said = first.get(names.role) if isinstance(first, Mapping) else None
    return names.speakers.get(str(said)) in ("system", "user")


def _turns(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is not a list of turns")
    return value


def _as_turns(value: Any, names: Names, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{names.role: role, names.content: value}]
    return [dict(value)] if isinstance(value, Mapping) else list(value)
