"""Samples that are longer than a row: left out and named, or cut after the last turn that fits.

A cut keeps whole turns from the beginning of a conversation, with their media, and ends with one that is trained on.
Plain text has no turns; it is cut between two words. What was kept is not copied: a cut is two numbers, applied when a
sample is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import PLAIN, MediaSize, Message, Part, Sample
from tessera.data.index.measure import MAX_BAD, BadRow, Measured
from tessera.data.processor import ChatProcessor
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.tables import AnyTables, MemoryTables, narrow

log = logging.getLogger("tessera")

TooLong = Literal["drop", "turns"]
_CUT = ("column.cut_messages", "column.cut_characters")


def too_long(tables: AnyTables, length: int) -> np.ndarray:
    """Positions of the samples that do not fit into a row."""
    tokens = tables.get("column.tokens")
    return np.empty(0, np.int64) if tokens is None else np.flatnonzero(tokens > length)


def fit_key(tables: AnyTables, length: int, policy: TooLong) -> str:
    of = [tables.about["key"], tables.about["digest"]]
    return hashlib.sha256(f"{of} fit to {length} by {policy}".encode()).hexdigest()


def dropped(measured: Measured, source: Source, long: np.ndarray, length: int) -> MemoryTables:
    """The samples that fit."""
    tokens, rows = measured.arrays["column.tokens"], measured.arrays["row"]
    bad = [
        BadRow(int(rows[at]), _id(source, int(rows[at])), f"{tokens[at]} tokens do not fit into data.length {length}")
        for at in long[:MAX_BAD].tolist()
    ]
    keep = np.ones(len(rows), dtype=bool)
    keep[long] = False
    arrays = {name: array[keep] for name, array in measured.arrays.items()}
    left = replace(measured, arrays=arrays, bad=_merged(measured.bad, bad), bad_count=measured.bad_count + len(long))
    return left.tables(cut="0", dropped=str(len(long)))


def with_cuts(measured: Measured, cut: Measured, long: np.ndarray) -> MemoryTables:
    """The samples that fit, and those of the long ones that could be cut."""
    keep = np.ones(len(measured.arrays["row"]), dtype=bool)
    keep[long] = False
    arrays = {name: array[keep] for name, array in measured.arrays.items()}
    if len(cut.arrays["row"]) == 0:
        both = {**arrays, **dict.fromkeys(("cut.at", "cut.messages", "cut.characters"), np.empty(0, np.int32))}
    else:
        joined = {name: np.concatenate([array, cut.arrays[name]]) for name, array in arrays.items()}
        order = np.argsort(joined["row"], kind="stable")
        both = {name: array[order] for name, array in joined.items()}
        both["cut.at"] = narrow(np.searchsorted(both["row"], cut.arrays["row"]))
        both |= {f"cut.{name.rpartition('_')[2]}": cut.arrays[name] for name in _CUT}
    left = replace(
        measured,
        arrays=both,
        bad=_merged(measured.bad, cut.bad),
        bad_count=measured.bad_count + cut.bad_count,
        slow_at=min((at for at in (measured.slow_at, cut.slow_at) if at), default=0.0),
        crashed=measured.crashed + cut.crashed,
    )
    return left.tables(cut=str(len(cut.arrays["row"])), dropped=str(cut.bad_count))


def tell(tables: AnyTables, name: str, length: int) -> None:
    """What became of the long samples, in one line."""
    cut, left_out = int(tables.about["cut"]), int(tables.about["dropped"])
    log.info("%s: longer than data.length %d: %d samples cut by turns, %d dropped", name, length, cut, left_out)


def _merged(one: Sequence[BadRow], other: Sequence[BadRow]) -> tuple[BadRow, ...]:
    return tuple(sorted([*one, *other])[:MAX_BAD])


def _id(source: Source, row: int) -> str:
    try:
        return source.read(row).id
    except RowError as error:
        return error.id


# ---------------------------------------------------------------------------------------------- one sample


@dataclass(frozen=True)
class Cut:
    messages: int
    characters: int = 0  # of the last of them; 0: whole

    def __call__(self, sample: Sample) -> Sample:
        messages = sample.messages[: self.messages]
        if self.characters:
            text = _text(messages[-1])[: self.characters]
            messages = (*messages[:-1], replace(messages[-1], parts=(Part("text", text),)))
        return Sample(sample.id, messages)


@dataclass(frozen=True)
class CutToLength:
    """Measures a sample after a cut that makes it fit; the cut itself is two measures more."""

    processor: ChatProcessor
    length: int

    def __call__(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        cut, measures = self._cut_text(sample) if _is_plain(sample) else self._cut_turns(sample, sizes)
        return {**measures, "cut_messages": cut.messages, "cut_characters": cut.characters}

    def _cut_turns(self, sample: Sample, sizes: Sequence[MediaSize]) -> tuple[Cut, dict[str, int]]:
        media = np.cumsum([0, *(sum(part.kind != "text" for part in m.parts) for m in sample.messages)])

        def measured(first: int, last: int) -> dict[str, int]:
            said = Sample(sample.id, sample.messages[first:last])
            return self.processor.measure(said, sizes[media[first] : media[last]])

        count = len(sample.messages)
        kept = _largest(0, count, lambda turns: turns == 0 or measured(0, turns)["tokens"] <= self.length)
        while kept and not measured(kept - 1, kept).get("trained", 1):
            kept -= 1
        if kept == 0:
            tokens = self.processor.measure(sample, sizes)["tokens"]
            raise TesseraError(f"{tokens} tokens, and not even the first exchange fits into data.length {self.length}")
        return Cut(kept), measured(0, kept)

    def _cut_text(self, sample: Sample) -> tuple[Cut, dict[str, int]]:
        text = _text(sample.messages[0])

        def measured(characters: int) -> dict[str, int]:
            return self.processor.measure(Cut(1, characters)(sample), [])

        def fits(characters: int) -> bool:
            return characters == 0 or measured(characters)["tokens"] <= self.length

        # A long document is not tokenised again and again: what fits is near its share, if its words are alike.
        low, high = 0, len(text)
        guess = max(1, len(text) * self.length // max(1, self.processor.measure(sample, [])["tokens"]))
        for near in (guess * 3 // 4, guess * 3 // 2):
            if low < near < high:
                low, high = (near, high) if fits(near) else (low, near)
        kept = _largest(low, high, fits)
        between = max(text.rfind(" ", 0, kept + 1), text.rfind("\n", 0, kept + 1))
        if between > kept // 2 and fits(between):
            kept = between
        if kept == 0:
            raise TesseraError(f"not even a character fits into data.length {self.length}")
        return Cut(1, kept), measured(kept)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of low..high that fits, when `low` does and all below one that fits do too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _is_plain(sample: Sample) -> bool:
    messages = sample.messages
    return len(messages) == 1 and messages[0].role == PLAIN and all(part.kind == "text" for part in messages[0].parts)


def _text(message: Message) -> str:
    return "".join(str(part.value) for part in message.parts)
