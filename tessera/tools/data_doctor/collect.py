"""Collect the results of all chunks: a few numbers for each row and each media part, never their text.

A row takes about a hundred bytes. Repeated ids, conversations, answers and images are detected by hashes. Rows that a
finding names are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tessera.core.sample import Sample
from tessera.data.kinds import Work
from tessera.data.order.order import PackingConfig, PackingStats, Samples, row_table
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source
from tessera.errors import TesseraError
from tessera.tools.data_doctor.findings import (
    MOST_LOCATIONS,
    SampleLocation,
    Tally,
    check_texts,
    media_hash,
    media_name,
)
from tessera.tools.data_doctor.look import LOST, MEDIA_KINDS, TOO_LONG, USABLE, Examiner, Seen

ONE_ANSWER = 0.3  # largest share of rows with the same answer
SHARED = 0.01  # largest share of samples with the same file
FEW = 20  # rows: below, shares are not judged


@dataclass(frozen=True)
class SetFacts:
    """Hold the figures of one data set. Tokens are those of its usable samples."""

    path: str
    rows: int
    usable: int
    lost: int
    too_long: int
    characters: int
    tokens: int
    trained: int
    media_tokens: int
    images: int
    videos: int
    audios: int

    @property
    def media(self) -> int:
        return self.images + self.videos + self.audios


class Collection:
    """Collect the results of all chunks. Rows are numbered over all sets."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.starts = np.cumsum([0, *(len(source) for source in sources)])
        self.total = int(self.starts[-1])
        self.columns: dict[str, np.ndarray] = {}
        self.tally = Tally()
        self._media: dict[str, list[np.ndarray]] = {}

    def add(self, seen: Seen) -> None:
        """Add the results for a chunk."""
        first = int(self.starts[seen.chunk.set])
        for name, values in seen.columns.items():
            column = self.columns.setdefault(name, np.zeros(self.total, dtype=values.dtype))
            column[first + seen.chunk.rows.start : first + seen.chunk.rows.stop] = values
        for name, values in seen.media.items():
            self._media.setdefault(name, []).append(values + first if name == "row" else values)
        self.tally.merge(seen.findings)

    def media(self, name: str) -> np.ndarray:
        """Return one array over all media parts."""
        parts = self._media.get(name, [])
        return np.concatenate(parts) if parts else np.empty(0)

    def column(self, name: str, keep: np.ndarray | None = None) -> np.ndarray:
        """Return one array over all rows, or over some."""
        values = self.columns.get(name, np.zeros(self.total, dtype=np.int64))
        return values if keep is None else values[keep]

    def locate(self, row: int) -> tuple[Source, int]:
        """Return the data set of a row, and its number there."""
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.sources[part], row - int(self.starts[part])

    def sets(self) -> list[SetFacts]:
        """Return the facts of each data set."""
        rows_of_media, kinds = self.media("row"), self.media("kind")
        facts = []
        for source, first, last in zip(self.sources, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            state = self.column("state")[first:last]
            usable = first + np.flatnonzero(state == USABLE)
            mine = kinds[(rows_of_media >= first) & (rows_of_media < last)]
            lost, too_long = int((state == LOST).sum()), int((state == TOO_LONG).sum())
            summed = ("characters", "tokens", "trained", "media_tokens")
            sums = {name: int(self.column(name, usable).sum()) for name in summed}
            sums |= {f"{kind}s": int((mine == at).sum()) for at, kind in enumerate(MEDIA_KINDS)}
            facts.append(SetFacts(str(source.path), last - first, len(usable), lost, too_long, **sums))
        return facts

    # ------------------------------------------------------------------------------------------ all rows

    def find_repeats(self) -> None:
        """Add the findings that only show over all rows."""
        for name, kind in (("id", "repeated-id"), ("content", "repeated-content")):
            count, groups = _repeated(self.column(f"hash.{name}"))
            locations = [
                self._location(again, f"also {self._where(first)}; {times} times") for first, again, times in groups
            ]
            self.tally.count(kind, count, locations)
        self._find_one_answer()
        self._find_shared_media()

    def _find_one_answer(self) -> None:
        values, firsts, counts = np.unique(self.column("hash.answer"), return_index=True, return_counts=True)
        counts[values == 0] = 0
        answered = int(counts.sum())
        if answered < FEW:
            return
        most = int(counts.argmax())
        if counts[most] > ONE_ANSWER * answered:
            row = int(firsts[most])
            sample = self._sample(row)
            text = "" if sample is None else (check_texts(sample).answer or "")[:80]
            share = f"{counts[most] / answered:.0%} of the last answers are {text!r}"
            self.tally.count("one-answer", int(counts[most]), [self._location(row, share)])

    def _find_shared_media(self) -> None:
        hashes, rows = self.media("hash"), self.media("row")
        if not len(hashes):
            return
        values, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
        shared = np.flatnonzero(counts > max(FEW, SHARED * self.total))
        shared = shared[np.argsort(-counts[shared], kind="stable")]
        locations = []
        for at in shared[:MOST_LOCATIONS].tolist():
            row = int(rows[firsts[at]])
            name = self._media_name(row, int(values[at]))
            locations.append(self._location(row, f"{name}: used {counts[at]:,} times"))
        self.tally.count("shared-media", len(shared), locations)

    # ------------------------------------------------------------------------------------------ rows by number

    def _where(self, row: int) -> str:
        source, number = self.locate(row)
        return source.location(number)

    def _location(self, row: int, detail: str) -> SampleLocation:
        sample = self._sample(row)
        return SampleLocation(self._where(row), "" if sample is None else sample.id, detail)

    def _sample(self, row: int) -> Sample | None:
        source, number = self.locate(row)
        try:
            return source.read(number)
        except (RecordError, TesseraError):
            return None

    def _media_name(self, row: int, mark: int) -> str:
        sample, (source, _) = self._sample(row), self.locate(row)
        parts = [] if sample is None else sample.media()
        return next((media_name(part) for part in parts if media_hash(part, source.root) == mark), "a file")


def _repeated(hashes: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how many rows repeat an earlier one, and (first row, next one, how often) of the first few."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]])) if len(ranked) else np.empty(0, int)
    counts = np.diff(np.append(starts, len(ranked)))
    again = (counts > 1) & (ranked[starts] != 0)
    starts, counts = starts[again], counts[again]
    seconds = order[starts + 1]
    first_few = np.argsort(seconds, kind="stable")[:MOST_LOCATIONS]
    groups = [(int(order[starts[at]]), int(seconds[at]), int(counts[at])) for at in first_few]
    return int((counts - 1).sum()), groups


SAMPLED = 64  # too long samples that are cut, for each length; the rest is estimated
PACKED = 200_000  # samples that are packed; the rest is estimated


@dataclass(frozen=True)
class Rung:
    """Hold what a run with rows of `length` tokens loses. Shares are those of all usable samples or their tokens."""

    length: int
    dropped: int  # samples longer than a row
    dropped_share: float
    tokens_lost: float  # share of tokens in them
    cut_share: float  # with data.truncate=turns: samples that lose their last turns
    cut_dropped_share: float  # and those whose first exchange does not fit
    cut_tokens_lost: float
    padding: float  # share of packed rows that is filling
    rows: int
    work: float | None  # of the heaviest row, over the mean; None: unknown
    estimated: bool  # cutting was tried on some of the samples, or packing
    chosen: bool


def ladder(length: int, longest: int) -> list[int]:
    """Return half and double lengths around the one asked for, up to the first that holds every sample."""
    rungs = [length // 4, length // 2, length]
    while rungs[-1] < longest and len(rungs) < 8:
        rungs.append(rungs[-1] * 2)
    return sorted({rung for rung in rungs if rung > 0})


def forecast(collected: Collection, examiner: Examiner, length: int, work: Work | None, seed: int) -> list[Rung]:
    """Return what row lengths around `length` do to the samples. Of very many, only some are really cut and packed."""
    trainable = np.flatnonzero(np.isin(collected.column("state"), (USABLE, TOO_LONG)))
    if not len(trainable):
        return []
    tokens = collected.column("tokens", trainable)
    total, count = int(tokens.sum()), len(tokens)
    flops: dict[str, np.ndarray] = {}
    token_work: dict[str, float] = {}
    if work is not None:
        flops = work({name: values[trainable] for name, values in collected.columns.items()})
        one_token = {name: np.array([int(name == "tokens")]) for name in collected.columns}
        token_work = {stream: float(values[0]) for stream, values in work(one_token).items()}
    rungs = []
    for rung in ladder(length, int(tokens.max())):
        long, fits, chance = np.flatnonzero(tokens > rung), np.flatnonzero(tokens <= rung), np.random.default_rng(seed)
        cut, tried = _kept_by_cutting(collected, examiner, tokens, trainable, _some(long, SAMPLED, chance), rung)
        packed, stats = _some(fits, PACKED, chance), PackingStats(0, rung, 0.0)
        if len(packed):
            weighed = {stream: values[packed] for stream, values in flops.items()}
            samples = Samples(tokens[packed], np.array([0, len(packed)]), None, weighed, token_work)
            stats = row_table(samples, PackingConfig(rung, seed)).stats
        lost = int(tokens[long].sum())
        rungs.append(
            Rung(
                length=rung,
                dropped=len(long),
                dropped_share=len(long) / count,
                tokens_lost=lost / total,
                cut_share=cut.samples * len(long) / count,
                cut_dropped_share=(1 - cut.samples) * len(long) / count,
                cut_tokens_lost=lost * (1 - cut.tokens) / total,
                padding=stats.padding,
                rows=round(stats.rows * len(fits) / max(1, len(packed))),
                work=stats.work,
                estimated=tried < len(long) or len(packed) < len(fits),
                chosen=rung == length,
            )
        )
    return rungs


def _some(numbers: np.ndarray, most: int, chance: np.random.Generator) -> np.ndarray:
    return numbers if len(numbers) <= most else np.sort(chance.choice(numbers, most, replace=False))


class _Kept(NamedTuple):
    """Hold the shares of long samples and of their tokens that remain after truncation by turns."""

    tokens: float
    samples: float


def _kept_by_cutting(
    collected: Collection, examiner: Examiner, tokens: np.ndarray, rows: np.ndarray, tried: np.ndarray, length: int
) -> tuple[_Kept, int]:
    """Cut samples to a length. Return the shares that remain, and how many samples could be read."""
    whole, cut = [], []
    for at in tried.tolist():
        try:
            cut.append(examiner.kept_tokens(*collected.locate(int(rows[at])), length))
        except (RecordError, TesseraError, OSError):
            continue
        whole.append(int(tokens[at]))
    if not whole:
        return _Kept(0.0, 0.0), 0
    return _Kept(sum(cut) / sum(whole), sum(count > 0 for count in cut) / len(cut)), len(cut)
