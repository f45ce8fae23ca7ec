"""Steps with a fixed number of samples (`train.samples_per_step`), which are a function of (seed, step).

The draws of an epoch are sorted by length and divided into strata, one stratum per sample of a step. Every step takes
one random draw of each stratum, so all steps have about the same number of tokens. The strata are packed into the rows
of a step once, by the longest sample of each stratum. So the samples of every step fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.data.order.mixture import Mixture, Shuffle, mix, permutation
from tessera.data.order.order import PackingConfig, PackingStats, Samples, mixture_of
from tessera.data.order.packing import even_fit
from tessera.errors import TesseraError

_STRATUM, _TWICE, _ROW, _TIES = 0x53545241, 0x54574943, 0x53524F57, 0x5354494D  # keys of random permutations


@dataclass(frozen=True)
class StepSize:
    """State the number of samples in a step, and limits of its number of rows."""

    samples: int
    least_rows: int = 1
    multiple: int = 1  # the number of rows is a multiple of this: rows of one micro-batch, summed over ranks


@dataclass(frozen=True, eq=False)
class StepOrder:
    """Map row indices, counted over all epochs, to samples, if every step has the same number of samples.

    An epoch has enough steps for all draws. If the draws do not fill the last step, a few occur twice. These differ
    by epoch.
    """

    mixture: Mixture
    by_length: np.ndarray  # indices of all draws of an epoch, shortest sample first
    # [samples of a step]: the draws, sorted by length, are divided into as many strata; each step takes one sample from
    # each stratum, and puts it into this row of the step.
    row_of: np.ndarray
    rows_per_step: int
    seed: int
    stats: PackingStats
    row_work: np.ndarray | None = None  # [rows of a step]: upper bound on the FLOPs of each row

    @property
    def steps(self) -> int:
        """Return the number of steps of an epoch."""
        return -(-len(self.by_length) // len(self.row_of))

    def __len__(self) -> int:
        return self.steps * self.rows_per_step

    @property
    def identity(self) -> str:
        """Return a string that identifies the samples of each step, however they are distributed to rows."""
        draws = hashlib.sha256(np.ascontiguousarray(self.by_length, dtype=np.int64).data)
        draws.update(np.ascontiguousarray(self.mixture.draws, dtype=np.int64).data)
        return f"{draws.hexdigest()[:16]} {len(self.row_of)} samples {self.seed}"

    @cached_property
    def _strata(self) -> list[list[int]]:
        strata: list[list[int]] = [[] for _ in range(self.rows_per_step)]
        for stratum, row in enumerate(self.row_of.tolist()):
            strata[row].append(stratum)
        return strata

    def samples(self, row: int) -> list[int]:
        step, row_in_step = divmod(row, self.rows_per_step)
        epoch, at = divmod(step, self.steps)
        draws, places = len(self.by_length), self.steps * len(self.row_of)
        offset = 0 if draws == places else mix(self.seed, _TWICE, epoch) % draws
        samples = []
        for stratum in self._strata[row_in_step]:
            position = stratum * self.steps + Shuffle.of(self.steps, self.seed, _STRATUM, epoch, stratum)(at)
            draw = int(self.by_length[(position * draws + offset) // places])
            samples.append(self.mixture.sample(draw, epoch))
        return samples

    def work(self, rows: Sequence[int]) -> list[float] | None:
        """Return an upper bound on the FLOPs of each row; None if the FLOPs of samples are unknown."""
        return None if self.row_work is None else [float(self.row_work[row % self.rows_per_step]) for row in rows]

    def row_seed(self, row: int) -> int:
        """Return the random seed of a row. It is the same on every rank, and fits a signed 64-bit integer."""
        return mix(self.seed, _ROW, row) >> 1


def step_order(samples: Samples, config: PackingConfig, size: StepSize) -> StepOrder:
    """Return an order of rows. Every step has the same number of samples, and as few rows as possible."""
    if not config.shuffle:
        raise TesseraError(
            "train.samples_per_step needs data.shuffle, which is off",
            where="train.samples_per_step",
            fix="remove data.shuffle, or set train.global_batch, which counts rows",
            code="data.steps-need-shuffle",
        )
    tokens = np.asarray(samples.tokens, dtype=np.int64)
    mixture = mixture_of(samples, np.zeros_like(tokens), 1)
    longest = mixture.largest(tokens)
    count = len(longest)
    by_length = np.lexsort((permutation(count, config.seed, _TIES), longest))
    bounds = _bounds(count, size.samples)
    most = np.maximum.reduceat(np.append(longest[by_length], 0), bounds.reshape(-1))[::2]
    row_of = _rows(most, config, size)
    rows = int(row_of.max()) + 1  # number of rows in a step, because none is empty
    epoch = -(-count // size.samples) * rows
    padding = 1 - mixture.mean(tokens) / (epoch * config.length)
    stats = PackingStats(epoch, config.length, max(0.0, padding))
    work = None
    if samples.work and config.balance:
        per_token = sum(samples.token_work.values())
        flops = sum(samples.work.values(), start=np.zeros(len(tokens)))
        excess = mixture.largest(np.maximum(flops - per_token * tokens, 0.0))[by_length]
        heaviest = np.maximum.reduceat(np.append(excess, 0.0), bounds.reshape(-1))[::2]
        work = np.bincount(row_of, weights=heaviest, minlength=rows) + per_token * config.length
    return StepOrder(mixture, by_length, row_of, rows, config.seed, stats, work)


def _bounds(draws: int, strata: int) -> np.ndarray:
    """Return [strata, 2]: the range [first, end) of draws from which each stratum takes one draw per step.

    Strata divide the draws, sorted by length, so that every step has a sample of each length.
    """
    steps = -(-draws // strata)
    places = steps * strata
    first = np.arange(strata, dtype=np.int64) * steps * draws // places
    offset = 0 if draws == places else draws - 1
    last = ((np.arange(1, strata + 1, dtype=np.int64) * steps - 1) * draws + offset) // places
    return np.stack([first, last + 1], axis=1)


def _rows(most: np.ndarray, config: PackingConfig, size: StepSize) -> np.ndarray:
    """Return the index of the row, within a step, that gets the sample of each stratum.

    The number of rows is the least possible multiple of `size.multiple`.
    """
    rows = size.samples if not config.pack else max(size.least_rows, -(-int(most.sum()) // config.length))
    rows = _up(rows, size.multiple)
    while rows <= size.samples:
        row_of = np.arange(size.samples) if rows == size.samples else even_fit(most, config.length, rows)
        if int(row_of.max()) < rows:
            return row_of
        rows += size.multiple
    raise TesseraError(
        f"{size.samples} samples per step are too few: each of the {rows} rows of a step needs a sample "
        f"(numbers of rows are multiples of {size.multiple})",
        where="train.samples_per_step",
        fix=f"set train.samples_per_step={_up(max(rows, size.samples), size.multiple)}, or lower train.micro_batch or "
        "train.global_batch",
        code="run.too-few-samples-per-step",
    )


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
