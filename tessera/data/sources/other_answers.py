"""Preference records of ms-swift: a conversation that ends with the better answer, and the worse one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.data.sources.columns import ColumnMap, column_map
from tessera.data.sources.record_media import fail, has

_WORSE = ("rejected_response", "rejected_messages")


def has_other_answer(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a worse answer beside a whole conversation."""
    return any(has(record, key) for key in _WORSE)


def check_one_worse_answer(record: Mapping[str, Any], names: ColumnMap) -> None:
    """Raise for a record that gives its worse answer under several keys: nobody knows which of them is meant."""
    found = [key for key in dict.fromkeys((names.rejected, *_WORSE)) if has(record, key)]
    if len(found) > 1:
        fail(f"a pair has one worse answer, and this record has {' and '.join(found)}: keep one of them")


def with_both_answers(record: Mapping[str, Any], names: ColumnMap) -> dict[str, Any]:
    """Return the record as one with a question and two answers.

    What comes before the last turn of the assistant is the question. The worse answer is a text or a turn, or it is a
    conversation: as a whole, or from the turn on that differs.
    """
    key = next(key for key in _WORSE if has(record, key))
    worse = record[key]
    if isinstance(worse, list) and len(worse) == 1 and isinstance(worse[0], str):
        worse = worse[0]  # a list of worse answers, of which there is one
    if isinstance(worse, list) and any(isinstance(one, str) for one in worse):
        fail(f"{key} has {len(worse)} answers, and a pair has one: write a record for each of them")
    if has(record, "rejected_images"):
        fail("rejected_images: both answers of a pair are about the same images, those under 'images'")
    rest = {one: value for one, value in record.items() if one not in _WORSE}
    if has(record, names.messages):
        turns = record[names.messages]
        last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
        if not isinstance(last, dict) or names.speakers.get(str(last.get(names.role))) != "assistant":
            fail(f"{names.messages} has to end with the better answer, a turn of the assistant, beside {key}")
        return {**rest, names.messages: turns[:-1], names.chosen: [last], names.rejected: worse}
    for one in ("alpaca", "query_response", "question_answer"):
        columns = column_map(one, {})
        if has(record, columns.prompt) and has(record, columns.response):
            better, asked = rest.pop(columns.response), rest.pop(columns.prompt)
            return {**rest, names.prompt: asked, names.chosen: better, names.rejected: worse}
    fail(f"no better answer: give {names.messages!r} that ends with it, or 'query' and 'response', beside {key}")
