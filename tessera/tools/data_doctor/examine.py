"""The examination itself: every row once through worker processes, then what shows only over the whole."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.run_config import SourceSection
from tessera.core.types import Processor
from tessera.data.kinds import Work
from tessera.data.media.images import Limits
from tessera.data.order.table import Promise, Rules, Samples, row_table
from tessera.data.pool import Lost, Pool
from tessera.data.processor import ChatProcessor
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.data.sources.open import open_source
from tessera.tools.data_doctor.collect import Collection
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.forecast import Rung, forecast
from tessera.tools.data_doctor.histogram import Histogram, histogram
from tessera.tools.data_doctor.look import LOST, TOO_LONG, USABLE, Chunk, Examiner, Seen, ToShow
from tessera.tools.data_doctor.show import Shown

CHUNK = 256  # rows a worker looks at in one go
_EVERY_S = 10.0
log = logging.getLogger("tessera")


def examine(
    sections: Sequence[SourceSection],
    processor: Processor | None = None,
    *,
    length: int = 2048,
    limits: Limits | None = None,
    work: Work | None = None,
    workers: int | Literal["auto"] = "auto",
    samples: int = 20,
    decode: bool = False,
    timeout_s: float = 60.0,
    seed: int = 0,
) -> Diagnosis:
    """Looks at every row of `sections`. With a processor also at tokens: what is trained on, what `length` drops.

    `work`: FLOPs of samples in each tower, from their measures. `samples`: so many are shown from the beginning of the
    sets, and half as many drawn by chance. `decode`: read every picture and clip, and not only its header.
    """
    began = time.perf_counter()
    if not sections:
        raise TesseraError("no data sets are given", where="tessera data doctor", fix="name one or more files")
    if processor is not None and not isinstance(processor, ChatProcessor):
        raise TesseraError(
            f"{type(processor).__name__} cannot serve conversations",
            where="tessera data doctor",
            fix="leave out --recipe and --model: the data is then examined without tokens",
        )
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="tessera-doctor-") as scratch:
        sources = [open_source(section, Path(scratch)) for section in sections]
        examiner = Examiner(
            sources,
            processor,
            limits,
            length=length,
            decode_all=decode,
            timeout_s=timeout_s,
        )
        with Pool(examiner, _workers(workers), timeout_s=timeout_s) as pool:
            collected = _look_at_all(pool, sources)
            shown = _show(pool, _chosen(sources, samples, seed))
        collected.find_repeats()
        rungs = [] if processor is None else _forecast(collected, examiner, length, work, seed)
        return Diagnosis(
            tuple(collected.sets()),
            tuple(collected.tally.sorted()),
            tuple(_histograms(collected, processor is not None, length, work)),
            tuple(rungs),
            tuple(shown),
            None if processor is None else length,
            decode,
            time.perf_counter() - began,
        )


def _workers(asked: int | Literal["auto"]) -> int:
    """At least one process of its own: a file that crashes its reader must not end the examination."""
    return min(16, max(1, len(os.sched_getaffinity(0)))) if asked == "auto" else asked


# ---------------------------------------------------------------------------------------------- rows


def _look_at_all(pool: Pool, sources: Sequence[Source]) -> Collection:
    collected = Collection(sources)
    total, done, began = len(collected.state), 0, time.perf_counter()
    told = began
    for seen in _seen(pool, sources):
        collected.add(seen)
        done += len(seen.state)
        now = time.perf_counter()
        if now - told > _EVERY_S:
            told = now
            speed = done / (now - began)
            log.info("doctor: %s of %s rows, %.0f rows/s, %.0f s left", done, total, speed, (total - done) / speed)
    return collected


def _seen(pool: Pool, sources: Sequence[Source]) -> Iterator[Seen]:
    chunks = (
        Chunk(number, range(start, min(start + CHUNK, len(source))))
        for number, source in enumerate(sources)
        for start in range(0, len(source), CHUNK)
    )
    for _, seen in pool.map(chunks, again=_without):
        yield seen


def _without(chunk: Chunk, lost: Lost) -> Chunk:
    """A chunk whose reader was lost is looked at again without the row that was at fault, or, should nobody know which
    it was, without any."""
    known = {row for row, _ in chunk.lost}
    left = [row for row in chunk.rows if row not in known]
    at_fault = [row for row in left if row == lost.at] or left
    return replace(chunk, lost=(*chunk.lost, *((row, lost.reason) for row in at_fault)))


def _chosen(sources: Sequence[Source], samples: int, seed: int) -> list[ToShow]:
    """The first of each set, then some by chance."""
    if samples < 1:
        return []
    each = max(1, samples // len(sources))
    first = [ToShow(number, row) for number, source in enumerate(sources) for row in range(min(each, len(source)))]
    chance = np.random.default_rng(seed)
    sizes = np.array([len(source) for source in sources], dtype=np.float64)
    drawn = []
    for _ in range(-(-samples // 2)):
        number = int(chance.choice(len(sources), p=sizes / sizes.sum()))
        drawn.append(ToShow(number, int(chance.integers(len(sources[number])))))
    return list(dict.fromkeys([*first[:samples], *drawn]))


def _show(pool: Pool, chosen: Sequence[ToShow]) -> list[Shown]:
    return [
        Shown(f"row {item.row + 1}", "", problem=result.reason) if isinstance(result, Lost) else result
        for item, result in pool.map(chosen)
    ]


# ---------------------------------------------------------------------------------------------- figures


def _histograms(collected: Collection, tokens: bool, length: int, work: Work | None) -> list[Histogram]:
    measured = np.flatnonzero(collected.state != LOST)

    def of(title: str, unit: str, name: str, mark: float | None = None) -> Histogram | None:
        values = collected.column(name, measured)
        return histogram(title, unit, values, mark) if len(values) and values.any() else None

    found: list[Histogram | None]
    if tokens:
        found = [
            of("Length of a sample", "tokens", "tokens", length),
            of("Trained on in a sample", "tokens", "trained"),
            of("Media tokens of a sample", "tokens", "media_tokens"),
            of("Patches of a sample", "patches", "patches"),
        ]
    else:
        found = [of("Length of a sample", "characters", "characters"), of("Answers of a sample", "characters", "said")]
    found += [of("Media of a sample", "pictures and clips", "media"), of("Frames of clips", "frames", "frames")]
    pixels = collected.media("pixels")
    found.append(
        histogram("Size of pictures", "pixels", pixels[pixels > 0], adds_up=False) if (pixels > 0).any() else None
    )
    if tokens and (collected.media("ratio") != 1).any():
        found.append(histogram("Pixels seen of each pixel", "times", collected.media("ratio"), adds_up=False))
    if tokens and work is not None and len(measured):
        measures = {name: values[measured] for name, values in collected.columns.items()}
        for tower, flops in work(measures).items():
            if flops.any():
                found.append(histogram(f"Work in {tower}", "FLOPs", flops))
    return [one for one in found if one is not None]


def _forecast(collected: Collection, examiner: Examiner, length: int, work: Work | None, seed: int) -> list[Rung]:
    trainable = np.flatnonzero((collected.state == USABLE) | (collected.state == TOO_LONG))
    measures = {name: values[trainable] for name, values in collected.columns.items()}
    tokens = collected.column("tokens", trainable)
    flops: dict[str, np.ndarray] = {}
    token_work: dict[str, float] = {}
    if work is not None and len(trainable):
        flops = work(measures)
        one = {name: np.array([int(name == "tokens")]) for name in measures}
        token_work = {tower: float(values[0]) for tower, values in work(one).items()}

    def kept(number: int, rung: int) -> int | None:
        source, row = collected.locate(number)
        try:
            return examiner.kept_tokens(source, row, rung)
        except (RowError, TesseraError, OSError):
            return None

    def pack(chosen: np.ndarray, rung: int) -> Promise:
        weighed = {tower: values[chosen] for tower, values in flops.items()}
        samples = Samples(tokens[chosen], np.array([0, len(chosen)]), None, weighed, token_work)
        return row_table(samples, Rules(rung, seed)).promise

    return forecast(tokens, trainable, length, kept, pack, seed)
