"""All usable samples of a split. Samples longer than a row are dropped or truncated.

A truncated conversation keeps its first complete turns, with their media, and ends with a trained turn. Plain text is
cut between two words, unless that would leave out half of it. The index stores how many messages, and how many
characters of the last one, are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tessera.core.sample import PLAIN, BadSample, MediaSize, Message, Part, Sample
from tessera.data.index.measure import MAX_BAD, BadRow, Measured, bad_rows, content_hash, id_hash
from tessera.data.media.read import MediaProcessor
from tessera.data.sources.container import RecordError, fail
from tessera.data.sources.regions import without_regions
from tessera.data.sources.source import Source
from tessera.data.tables import AnyTables, MemoryTables, narrow
from tessera.errors import TesseraError

Truncate = Literal["never", "turns"]
_CUT = ("column.cut_messages", "column.cut_characters")


def too_long(tables: AnyTables, length: int) -> np.ndarray:
    """Return the positions of the samples that do not fit into a row."""
    tokens = tables.get("column.tokens")
    return np.empty(0, np.int64) if tokens is None else np.flatnonzero(tokens > length)


def drop_long(tables: AnyTables, source: Source, long: np.ndarray, length: int) -> Measured:
    """Return a `Measured` without usable rows, which lists the samples at the positions `long` as bad."""
    tokens, rows = tables["column.tokens"], tables["row"]
    bad = [
        BadRow(row, _id(source, row), f"{count} tokens do not fit into data.length {length}", "data.sample-too-long")
        for row, count in zip(rows[long[:MAX_BAD]].tolist(), tokens[long[:MAX_BAD]].tolist(), strict=True)
    ]
    return Measured({"row": np.empty(0, np.int32)}, tuple(bad), len(long))


def with_cuts(measured: Measured, cut: Measured, long: np.ndarray) -> MemoryTables:
    """Merge the arrays of the samples that fit with those of truncated long samples."""
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
    fitted = replace(
        measured,
        arrays=both,
        bad=tuple(sorted([*measured.bad, *cut.bad])[:MAX_BAD]),
        bad_count=measured.bad_count + cut.bad_count,
        slow_at=min((at for at in (measured.slow_at, cut.slow_at) if at), default=0.0),
        crashed=measured.crashed + cut.crashed,
    )
    return fitted.tables(cut=str(len(cut.arrays["row"])), dropped=str(cut.bad_count))


def _id(source: Source, row: int) -> str:
    try:
        return source.read(row).id
    except RecordError as error:
        return str(error.where)


# ---------------------------------------------------------------------------------------------- one sample


@dataclass(frozen=True)
class Truncation:
    messages: int  # number of messages that are kept
    characters: int = 0  # number of characters of the last message that are kept; 0: all

    def __call__(self, sample: Sample) -> Sample:
        messages = sample.messages[: self.messages]
        if self.characters:
            text = _text(messages[-1])[: self.characters]
            messages = (*messages[:-1], replace(messages[-1], parts=(Part("text", text),)))
        return Sample(sample.id, messages)


@dataclass(frozen=True)
class TruncateToLength:
    """Truncate a sample to the row length. Return its costs, and how many messages and characters are kept.

    The keys of these two numbers are cut_messages and cut_characters (0: all characters of the last message).
    """

    processor: MediaProcessor
    length: int

    def __call__(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        cut, measures = self._cut_text(sample) if _is_plain(sample) else self._cut_turns(sample, sizes)
        return {**measures, "cut_messages": cut.messages, "cut_characters": cut.characters}

    def _cut_turns(self, sample: Sample, sizes: Sequence[MediaSize]) -> tuple[Truncation, dict[str, int]]:
        media = np.cumsum([0, *(sum(part.kind != "text" for part in m.parts) for m in sample.messages)])

        def measured(first: int, last: int) -> dict[str, int]:
            messages = sample.messages[first:last]
            if first:  # boxes may refer to images of turns that are cut off
                messages = tuple(without_regions(message) for message in messages)
            return self.processor.measure(Sample(sample.id, messages), sizes[media[first] : media[last]])

        count = len(sample.messages)
        turns_fit = _largest(0, count, lambda turns: turns == 0 or measured(0, turns)["tokens"] <= self.length)
        while turns_fit and not measured(turns_fit - 1, turns_fit).get("trained", 1):
            turns_fit -= 1
        if turns_fit == 0:
            tokens = self.processor.measure(sample, sizes)["tokens"]
            raise TesseraError(
                f"a sample of {tokens} tokens, whose first exchange alone is longer than data.length {self.length}",
                fix="raise data.length, or shorten the sample",
                code="data.sample-too-long",
            )
        return Truncation(turns_fit), measured(0, turns_fit)

    def _cut_text(self, sample: Sample) -> tuple[Truncation, dict[str, int]]:
        text = _text(sample.messages[0])

        def measured(characters: int) -> dict[str, int]:
            return self.processor.measure(Truncation(1, characters)(sample), [])

        def fits(characters: int) -> bool:
            return characters == 0 or measured(characters)["tokens"] <= self.length

        # Each trial tokenizes text, so begin the search near the expected number of characters: the share of the text
        # that fits should be about length / tokens.
        low, high = 0, len(text)
        guess = max(1, len(text) * self.length // max(1, self.processor.measure(sample, [])["tokens"]))
        for near in (guess * 3 // 4, guess * 3 // 2):
            if low < near < high:
                low, high = (near, high) if fits(near) else (low, near)
        fitting = _largest(low, high, fits)
        between = max(text.rfind(" ", 0, fitting + 1), text.rfind("\n", 0, fitting + 1))
        if between > fitting // 2 and fits(between):
            fitting = between
        if fitting == 0:
            raise TesseraError(
                f"not even one character of a text fits into data.length {self.length}",
                fix="raise data.length, or shorten the sample",
                code="data.sample-too-long",
            )
        return Truncation(1, fitting), measured(fitting)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest integer in low..high for which `fits` is true, by bisection. `fits(low)` must be true."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _is_plain(sample: Sample) -> bool:
    messages = sample.messages
    if len(messages) != 1 or messages[0].role != PLAIN:
        return False
    return all(part.kind == "text" and not part.regions for part in messages[0].parts)


def _text(message: Message) -> str:
    return "".join(str(part.value) for part in message.parts)


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Hold the usable rows of one data set with their costs, and the unusable rows with the reasons."""

    source: Source
    tables: AnyTables

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> np.ndarray:
        """Return the indices of the usable records in `source`, ascending."""
        return self.tables["row"]

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Return the costs of the usable rows by name, such as "tokens"."""
        return {name.removeprefix("column."): t for name, t in self.tables.items() if name.startswith("column.")}

    @property
    def bad(self) -> tuple[BadSample, ...]:
        """Return at most 10 000 unusable samples, in the order of rows. `bad_count` is the number of all of them."""
        return tuple(bad.sample for bad in bad_rows(self.tables))

    @property
    def bad_count(self) -> int:
        return int(self.tables.about["bad_count"])

    @property
    def unusable_count(self) -> int:
        """Return the number of unusable samples without those that are only too long for a row."""
        return self.bad_count - int(self.tables.about.get("dropped", 0))

    def read(self, at: int) -> Sample:
        """Return the sample at a position of `rows`, truncated as in the index. Raise `RecordError` if it changed."""
        row = int(self.rows[at])
        sample = self.source.read(row)
        if id_hash(sample.id) != self.tables["id_hash"][at] or content_hash(sample) != self.tables["content"][at]:
            fail("data.sample-changed", "this row changed since it was indexed", where=self.source.location(row))
        cuts = self.tables.get("cut.at")
        if cuts is None or len(cuts) == 0:
            return sample
        nth = int(np.searchsorted(cuts, at))
        if nth == len(cuts) or cuts[nth] != at:
            return sample
        return Truncation(int(self.tables["cut.messages"][nth]), int(self.tables["cut.characters"][nth]))(sample)


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """Read the usable samples of a split by index. The indices of each data set follow those of the one before it."""

    parts: tuple[SourceIndex, ...]
    starts: np.ndarray  # [data sets + 1]: index of the first sample of each data set
    repeats: AnyTables  # samples with a repeated id: "sample" (index), "times" (how often the id occurred before)
    identity: str  # hash that changes with the samples, their costs, or the paths of their files
    content: str  # hash that changes with the samples or their lengths, but not with the paths of their files

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def bad(self) -> tuple[BadSample, ...]:
        return tuple(bad for part in self.parts for bad in part.bad)[:MAX_BAD]

    @property
    def bad_count(self) -> int:
        return sum(part.bad_count for part in self.parts)

    def column(self, name: str) -> np.ndarray:
        """Return the cost `name`, such as "tokens", of all samples as int64."""
        columns = [part.tables[f"column.{name}"] for part in self.parts if len(part)]
        return np.concatenate(columns, dtype=np.int64)

    def measure(self, name: str, sample: int) -> int:
        """Return the cost `name` of one sample, from the mapped file; `column` would load all samples into memory."""
        part, at = self._at(sample)
        return int(part.tables[f"column.{name}"][at])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(next(part for part in self.parts if len(part)).columns))

    def locate(self, sample: int) -> tuple[Source, int]:
        """Return the data set of a sample, and the index of its record there."""
        part, at = self._at(sample)
        return part.source, int(part.rows[at])

    def read(self, sample: int) -> tuple[Sample, Path]:
        """Return a sample with a unique id, and the root folder of its media."""
        part, at = self._at(sample)
        sample_read = part.read(at)
        return Sample(self.unique_id(sample, sample_read.id), sample_read.messages), part.source.root

    def unique_id(self, sample: int, id: str) -> str:
        """Return the id of a sample; a repeated id gets a suffix, such as ~2.

        Repeated ids are not an error: some data sets have several conversations about one image under one id.
        """
        samples = self.repeats["sample"]
        nth = int(np.searchsorted(samples, sample))
        if nth == len(samples) or samples[nth] != sample:
            return id
        return f"{id}~{int(self.repeats['times'][nth]) + 1}"

    def _at(self, sample: int) -> tuple[SourceIndex, int]:
        part = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self.parts[part], sample - int(self.starts[part])


def find_repeats(hashes: np.ndarray, **about: str) -> MemoryTables:
    """Return the indices of samples whose id an earlier sample has, and the number of such earlier samples."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    ranks = np.arange(len(order))
    times = ranks - np.maximum.accumulate(np.where(begins, ranks, 0))
    again = np.flatnonzero(times)
    again = again[np.argsort(order[again])]
    return MemoryTables({"sample": narrow(order[again]), "times": narrow(times[again])}, about)
