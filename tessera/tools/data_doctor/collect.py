"""Collect the measurements of all data sets: derive findings, sums and histograms, and predict how samples fill rows.

Only numbers are kept of each sample. The few samples that a finding names are read again for their texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.core.sample import MediaSize, Sample
from tessera.data.index.measure import BadRow, Measured, bad_rows
from tessera.data.index.split import SourceIndex, Truncate
from tessera.data.kinds import Work
from tessera.data.order.order import PackingConfig, PackingStats, Samples, row_table
from tessera.data.sources.source import Source
from tessera.errors import TesseraError
from tessera.tools.data_doctor.findings import (
    DETAIL,
    KIND_OF_CODE,
    MOST_LOCATIONS,
    SAMPLE_KINDS,
    Finding,
    SampleLocation,
    check_texts,
    worst_first,
)
from tessera.tools.data_doctor.histogram import Histogram, histogram
from tessera.tools.data_doctor.look import Look
from tessera.tools.data_doctor.sound import odd_lengths

ONE_ANSWER = 0.3  # a finding is reported if a larger share of samples has the same answer
_WITH_TEXTS = ("transcript", "speech")  # formats whose texts are compared with the lengths of their recordings
_ODD_TRANSCRIPTS = ("long-transcript", "short-transcript")
FEW = 20  # shares such as ONE_ANSWER are not reported for fewer samples than this
PACKED = 200_000  # maximum number of samples that a forecast packs, before it extrapolates to all
# Histograms of the report: (title, unit of the values, name of the measured column).
_WITH_TOKENS = (
    ("Length of a sample", "tokens", "tokens"),
    ("Trained on in a sample", "tokens", "trained"),
    ("Patches of a sample", "patches", "patches"),
    ("Sound of a sample", "frames of the audio encoder", "audio_frames"),
    ("Text of a sample", "embeddings", "text"),
    ("Length of videos", "seconds", "seconds"),
)
_WITHOUT_TOKENS = (
    ("Length of a sample", "characters", "characters"),
    ("Answers of a sample", "characters", "answer_characters"),
)
_ALWAYS = (
    ("Media of a sample", "images, videos, recordings", "media"),
    ("Frames of videos", "frames", "frames"),
    ("Largest image of a sample", "pixels", "pixels"),
)


@dataclass(frozen=True)
class SetFacts:
    """Hold counts and sums of one data set. Sums are over usable samples."""

    path: str
    rows: int
    usable: int
    too_long: int
    characters: int
    tokens: int
    trained: int
    images: int
    videos: int
    audios: int

    @property
    def media(self) -> int:
        return self.images + self.videos + self.audios


@dataclass
class ExaminedSet:
    """Hold the measurements of a data set's usable samples, and the reasons why other records cannot be used."""

    source: Source
    look: Look
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    bad: list[BadRow] = field(default_factory=list)
    bad_count: int = 0
    refused: TesseraError | None = None

    def add_index(self, index: SourceIndex) -> None:
        """Add the measurements and the bad records of a data set's index."""
        self.rows, self.columns = np.asarray(index.rows), index.columns
        self.bad, self.bad_count = list(bad_rows(index.tables)), index.bad_count

    def add_look(self, looked: Measured) -> None:
        """Add the measurements of `Look`. Records that `Look` could not measure become bad records."""
        arrays = looked.arrays
        at = np.searchsorted(self.rows, arrays["row"])
        self.columns = {name: values[at] for name, values in self.columns.items()}
        self.columns |= {n.removeprefix("column."): v for n, v in arrays.items() if n.startswith("column.")}
        self.rows = np.asarray(arrays["row"])
        self.bad, self.bad_count = sorted([*self.bad, *looked.bad]), self.bad_count + looked.bad_count

    def refuse(self, error: TesseraError) -> None:
        """Mark the data set as refused: a run would end with this error, and no sample is usable."""
        self.refused, self.rows, self.columns = error, np.empty(0, np.int64), {}
        self.bad, self.bad_count = [], 0

    def read(self, row: int) -> Sample | None:
        try:
            return self.source.read(row)
        except TesseraError:
            return None

    def kind_of_bad(self, bad: BadRow) -> str:
        """Return the kind of finding for a bad record, from its error code, or by reading the record again."""
        if bad.code in KIND_OF_CODE:
            return KIND_OF_CODE[bad.code]
        sample = self.read(bad.row)
        if sample is None:
            return "bad-row"
        return "unreadable-media" if self.look.sizes(sample) is None else "unfit"


class Collection:
    """Hold the measurements of all usable samples, by data set. `length`: tokens per row; None: without a model."""

    def __init__(self, sets: Sequence[ExaminedSet], length: int | None, truncate: Truncate) -> None:
        self.sets, self.length, self.truncate = sets, length, truncate
        self.starts = np.cumsum([0, *(len(examined.rows) for examined in sets)])
        names = sorted({name for examined in sets for name in examined.columns})
        self.columns = {
            name: np.concatenate(
                [examined.columns.get(name, np.zeros(len(examined.rows), np.int64)) for examined in sets],
                dtype=np.int64,
            )
            for name in names
        }
        tokens = self.column("tokens")
        self.long = np.zeros(len(tokens), bool) if length is None else tokens > length

    def column(self, name: str) -> np.ndarray:
        """Return one column of measurements, for all samples; zeros if the data sets do not have it."""
        return self.columns.get(name, np.zeros(int(self.starts[-1]), np.int64))

    @property
    def seconds(self) -> np.ndarray:
        """Return the total length of the recordings of each sample, in seconds."""
        return self.column("sound_ms") / 1000

    def locate(self, at: int) -> tuple[ExaminedSet, int]:
        """Return the data set of a sample, and the index of its record in the data set."""
        number = int(np.searchsorted(self.starts, at, side="right")) - 1
        return self.sets[number], int(self.sets[number].rows[at - int(self.starts[number])])

    def facts(self) -> list[SetFacts]:
        """Return counts and sums of each data set."""
        facts = []
        for number, examined in enumerate(self.sets):
            mine = np.arange(self.starts[number], self.starts[number + 1])
            fits = mine if self.truncate == "turns" else mine[~self.long[mine]]
            names = ("characters", "tokens", "trained", "images", "videos", "audios")
            sums = {name: int(self.column(name)[fits].sum()) for name in names}
            counts = len(examined.source), len(fits), len(mine) - len(fits)
            facts.append(SetFacts(str(examined.source.path), *counts, **sums))
        return facts

    # ------------------------------------------------------------------------------------------ findings

    def findings(self) -> dict[str, Finding]:
        """Return all findings, worst first."""
        findings = self._bad_records()
        problems = self.column("problems")
        for bit, kind in enumerate(SAMPLE_KINDS):
            self._add(findings, kind, np.flatnonzero(problems >> bit & 1))
        self._add(findings, "long-caption", np.flatnonzero(self.column("cut_captions")))
        self._add(findings, "cut" if self.truncate == "turns" else "too-long", np.flatnonzero(self.long))
        count, groups = _repeated(self.column("hash_content"))
        _set(findings, "repeated-content", count, [self._again(*group) for group in groups])
        self._find_one_answer(findings)
        self._find_odd_transcripts(findings)
        codebooks = self.column("codebooks")
        usual = np.bincount(codebooks[codebooks > 0], minlength=1).argmax()
        self._add(findings, "other-codebooks", np.flatnonzero((codebooks > 0) & (codebooks != usual)))
        return worst_first(findings)

    def _bad_records(self) -> dict[str, Finding]:
        locations: dict[str, list[SampleLocation]] = {}
        findings: dict[str, Finding] = {}
        for examined in self.sets:
            for bad in examined.bad:
                where = examined.source.location(bad.row)
                locations.setdefault(examined.kind_of_bad(bad), []).append(SampleLocation(where, *bad.sample))
            if (refused := examined.refused) is not None:
                location = SampleLocation(
                    refused.where or str(examined.source.path), "", refused.what, refused.code or ""
                )
                locations.setdefault("set-refused", []).append(location)
        for kind, places in locations.items():
            _set(findings, kind, len(places), places)
        _set(findings, "unlisted", sum(examined.bad_count - len(examined.bad) for examined in self.sets), [])
        return findings

    def _add(self, findings: dict[str, Finding], kind: str, samples: np.ndarray) -> None:
        """Add a finding of this kind. `samples`: indices of all affected samples."""
        _set(findings, kind, len(samples), [self._location(at, kind) for at in samples[:MOST_LOCATIONS].tolist()])

    def _location(self, at: int, kind: str) -> SampleLocation:
        examined, row = self.locate(at)
        sample, tokens = examined.read(row), int(self.column("tokens")[at])
        if kind in ("too-long", "cut"):
            detail = f"{tokens:,} tokens, a row has {self.length:,}"
        elif kind == "long-caption":
            detail = f"{int(self.column('text')[at]):,} embeddings are read of it"
        elif kind == "other-codebooks":
            detail = f"{int(self.column('codebooks')[at])} codebooks"
        elif kind in _ODD_TRANSCRIPTS:
            characters, seconds = int(self.column("answer_characters")[at]), self.seconds[at]
            detail = f"{characters:,} characters in {seconds:.2f} s: {characters / seconds:.1f} per second"
        else:
            sizes = None if sample is None else examined.look.sizes(sample)
            detail = "" if sample is None or sizes is None else self._problems(examined, sample, sizes).get(kind, "")
        return SampleLocation(examined.source.location(row), "" if sample is None else sample.id, detail)

    @staticmethod
    def _problems(examined: ExaminedSet, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, str]:
        """Return the problems of a sample with their details, which are not stored."""
        look = examined.look
        return look.problems(sample, sizes, look.sounds(sample, sizes) if look.decode else ())

    def _find_odd_transcripts(self, findings: dict[str, Finding]) -> None:
        """Add findings about texts that are much too long or too short for their recordings."""
        is_odd = {kind: np.zeros(len(self.seconds), bool) for kind in _ODD_TRANSCRIPTS}
        for number, examined in enumerate(self.sets):
            samples = np.arange(self.starts[number], self.starts[number + 1])
            samples = samples[self.seconds[samples] > 0]
            if examined.source.record_format in _WITH_TEXTS and len(samples) >= FEW:
                odd = odd_lengths(self.column("answer_characters")[samples], self.seconds[samples])
                for kind, of_set in zip(_ODD_TRANSCRIPTS, odd, strict=True):
                    is_odd[kind][samples] = of_set
        for kind in _ODD_TRANSCRIPTS:
            self._add(findings, kind, np.flatnonzero(is_odd[kind]))

    def _again(self, first: int, again: int, times: int) -> SampleLocation:
        (before, row), (examined, number) = self.locate(first), self.locate(again)
        sample = examined.read(number)
        detail = f"also {before.source.location(row)}; {times} times"
        return SampleLocation(examined.source.location(number), "" if sample is None else sample.id, detail)

    def _find_one_answer(self, findings: dict[str, Finding]) -> None:
        values, firsts, counts = np.unique(self.column("hash_answer"), return_index=True, return_counts=True)
        counts[values == 0] = 0
        answered = int(counts.sum())
        if answered < FEW or counts.max() <= ONE_ANSWER * answered:
            return
        most = int(counts.argmax())
        examined, row = self.locate(int(firsts[most]))
        sample = examined.read(row)
        text = "" if sample is None else (check_texts(sample).answer or "")[:80]
        detail = f"{counts[most] / answered:.0%} of the last answers are {text!r}"
        location = SampleLocation(examined.source.location(row), "" if sample is None else sample.id, detail)
        _set(findings, "one-answer", int(counts[most]), [location])


def _set(findings: dict[str, Finding], kind: str, count: int, places: Iterable[SampleLocation]) -> None:
    if count:
        first = list(places)[:MOST_LOCATIONS]
        short = tuple(replace(location, id=location.id[:DETAIL], detail=location.detail[:DETAIL]) for location in first)
        findings[kind] = Finding(count, short)


def _repeated(hashes: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how many samples repeat an earlier one, and the first few groups of equal samples.

    A group is (index of the first sample, index of the second, number of samples).
    """
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]])) if len(ranked) else np.empty(0, int)
    counts = np.diff(np.append(starts, len(ranked)))
    again = counts > 1
    starts, counts = starts[again], counts[again]
    seconds = order[starts + 1] if len(starts) else starts
    first_few = np.argsort(seconds, kind="stable")[:MOST_LOCATIONS]
    groups = [(int(order[starts[at]]), int(seconds[at]), int(counts[at])) for at in first_few]
    return int((counts - 1).sum()), groups


# ---------------------------------------------------------------------------------------------- figures


def histograms(collected: Collection, work: Work | None) -> list[Histogram]:
    """Return histograms of the columns that are not all zero."""
    tokens = collected.length is not None
    drawn = [
        histogram(title, unit, values, collected.length if name == "tokens" else None, adds_up=name not in ("pixels",))
        for title, unit, name in (*(_WITH_TOKENS if tokens else _WITHOUT_TOKENS), *_ALWAYS)
        if (values := collected.column(name)).any()
    ]
    heard = collected.seconds > 0
    if heard.any():
        seconds = collected.seconds[heard]
        drawn.append(histogram("Recordings of a sample", "seconds", seconds))
        if any(examined.source.record_format in _WITH_TEXTS for examined in collected.sets):
            speed = collected.column("answer_characters")[heard] / seconds
            drawn.append(histogram("Text of a second of sound", "characters", speed, adds_up=False))
    if tokens and work is not None and len(collected.long):
        drawn += [
            histogram(f"Work in {stream}", "FLOPs", values)
            for stream, values in work(collected.columns).items()
            if values.any()
        ]
    return [figure for figure in drawn if figure is not None]


@dataclass(frozen=True)
class Rung:
    """Hold the forecast for one row length: which samples are dropped, and how well the others fill rows."""

    length: int
    dropped: int  # samples longer than a row
    dropped_share: float  # fraction of the usable samples that are dropped
    tokens_lost: float  # share of all tokens in dropped samples
    padding: float  # share of padding tokens in packed rows
    rows: int
    work: float | None  # FLOPs of the row with most FLOPs, divided by the mean of all rows; None: FLOPs are unknown
    chosen: bool


def ladder(length: int, longest: int) -> list[int]:
    """Return the row lengths to compare: a quarter and half of `length`, and doublings until every sample fits.

    Doublings end at eight lengths.
    """
    rungs = [length // 4, length // 2, length]
    while rungs[-1] < longest and len(rungs) < 8:
        rungs.append(rungs[-1] * 2)
    return sorted({rung for rung in rungs if rung > 0})


def forecast(collected: Collection, length: int, work: Work | None, seed: int) -> list[Rung]:
    """Return a forecast for row lengths around `length`: samples that are dropped, and packing of the others."""
    tokens = collected.column("tokens")
    if not len(tokens):
        return []
    flops: dict[str, np.ndarray] = {}
    token_work: dict[str, float] = {}
    if work is not None:
        flops = work(collected.columns)
        one_token = {name: np.array([int(name == "tokens")]) for name in collected.columns}
        token_work = {stream: float(values[0]) for stream, values in work(one_token).items()}
    rungs = []
    for rung in ladder(length, int(tokens.max())):
        fits = np.flatnonzero(tokens <= rung)
        packed, stats = fits, PackingStats(0, rung, 0.0)
        if len(fits) > PACKED:
            packed = np.sort(np.random.default_rng(seed).choice(fits, PACKED, replace=False))
        if len(packed):
            weighed = {stream: values[packed] for stream, values in flops.items()}
            samples = Samples(tokens[packed], np.array([0, len(packed)]), None, weighed, token_work)
            stats = row_table(samples, PackingConfig(rung, seed)).stats
        dropped = len(tokens) - len(fits)
        rungs.append(
            Rung(
                length=rung,
                dropped=dropped,
                dropped_share=dropped / len(tokens),
                tokens_lost=1 - float(tokens[fits].sum() / tokens.sum()),
                padding=stats.padding,
                rows=round(stats.rows * len(fits) / max(1, len(packed))),
                work=stats.work,
                chosen=rung == length,
            )
        )
    return rungs
