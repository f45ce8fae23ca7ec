"""Estimate how far a score of a benchmark can be from the score on all questions of its kind, and compare scores.

Questions are resampled (bootstrap), and groups of questions are one unit. The width of an interval follows from the
standard deviation of resampled scores. A score from 0 to 1 gets the interval of Wilson for as many questions with 0/1
marks as give this standard deviation: near 0 and 1, where resampled scores are skewed and a few questions never fail,
quantiles of resampled scores cover the truth too rarely. For 0/1 marks this is the interval of Wilson itself. Other
scores get quantiles, widened for few questions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Summary = Callable[[Mapping[str, float]], Mapping[str, float]]

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 20_260_101
_NORMAL = NormalDist()
_CHUNK = 1 << 22  # limit of random numbers drawn at once
_MOST_KEPT = 1000  # up to this number of units, the weights of resamples are kept in memory: 16 MB


@dataclass(frozen=True)
class Estimate:
    """Hold a figure of a benchmark with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class PairedTest:
    """Hold the difference of two scores on the same questions, second minus first."""

    value: float
    low: float
    high: float
    p: float  # probability of a difference at least this large if both models were equally good
    test: str
    units: int
    better: int  # units on which the second model has a larger score
    worse: int


def value_table(marks: Sequence[Mapping[str, float]]) -> tuple[list[str], np.ndarray]:
    """Return the names of all values, and an array [questions, names] of them. Values that a mark lacks are 0."""
    names = list(dict.fromkeys(name for mark in marks for name in mark))
    rows = [[mark.get(name, 0.0) for name in names] for mark in marks]
    return names, np.array(rows, dtype=np.float64).reshape(len(marks), len(names))


def figures_of(names: Sequence[str], means: np.ndarray, summary: Summary) -> dict[str, float]:
    """Return the scores that a benchmark reports, from the means of its values over the questions."""
    return {name: float(value) for name, value in summary(dict(zip(names, means.tolist(), strict=True))).items()}


def estimates(marks: Sequence[Mapping[str, float]], summary: Summary) -> dict[str, Estimate]:
    """Return the figures of a benchmark with their intervals. `marks`: the values of each question or group."""
    names, values = value_table(marks)
    figures, units = figures_of(names, values.mean(axis=0), summary), len(marks)
    if units < 2:
        return {name: _without_spread(figure, units) for name, figure in figures.items()}
    shares = [name for name, column in zip(names, values.T, strict=True) if np.isin(column, (0.0, 1.0)).all()]
    if summary is dict and len(shares) == len(names):
        return {name: Estimate(figure, *_wilson(figure, units, _z())) for name, figure in figures.items()}
    resampled = _resampled_figures(names, values, summary)
    return {
        name: Estimate(figure, *_wilson(figure, units, _z()))
        if name in shares and _is_mean(names, names.index(name), summary, name, values)
        else _estimate(figure, resampled.get(name, np.zeros(RESAMPLES)), units)
        for name, figure in figures.items()
    }


def paired_test(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]], summary: Summary, figure: str
) -> PairedTest:
    """Compare two models by their marks of the same questions.

    The test is McNemar's exact test for 0/1 marks, else a permutation test. The interval of the difference is that
    of Bonett and Price for 0/1 marks, else a bootstrap interval.
    """
    names, both = value_table([*first, *second])
    units = len(first)
    before, after = both[:units], both[units:]
    scores = [figures_of(names, means, summary)[figure] for means in (before.mean(axis=0), after.mean(axis=0))]
    value = scores[1] - scores[0]
    column = names.index(figure) if figure in names else None
    plain = column is not None and _is_mean(names, column, summary, figure, both)
    better, worse = _changed(before, after, column, names, summary, figure)
    if plain and column is not None and set(np.unique(both[:, column])) <= {0.0, 1.0}:
        low, high = _paired_interval(better, worse, units)
        return PairedTest(value, low, high, mcnemar(better, worse), "McNemar, exact", units, better, worse)
    pairs = np.concatenate([before, after], axis=1)
    width = before.shape[1]

    def apart(means: np.ndarray) -> float:
        scores = [figures_of(names, each, summary)[figure] for each in (means[:width], means[width:])]
        return scores[1] - scores[0]

    low, high = _quantiles(np.array([apart(means) for means in _resampled(pairs)]), units)
    at_least = abs(value) * (1 - 1e-9)  # the same sum in another order differs by rounding
    beyond = sum(abs(apart(means)) >= at_least for means in _exchanged(before, after))
    p = (beyond + 1) / (RESAMPLES + 1)
    return PairedTest(value, low, high, p, "paired permutation", units, better, worse)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for the numbers of questions that changed."""
    total = better + worse
    term = tail = 1  # binomial coefficients as exact integers
    for count in range(min(better, worse)):
        term = term * (total - count) // (count + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << total))


def _without_spread(value: float, units: int) -> Estimate:
    """Return the estimate for one question, or for several with the same mark, from which no variance can be computed.

    The interval of a value from 0 to 1 is Wilson's; that of any other value is the value itself.
    """
    return Estimate(value, *_wilson(value, units, _z())) if 0 <= value <= 1 else Estimate(value, value, value)


def _estimate(value: float, resampled: np.ndarray, units: int) -> Estimate:
    if resampled.min() < 0 or resampled.max() > 1 or not 0 <= value <= 1:
        return Estimate(value, *_quantiles(resampled, units))
    error = float(resampled.std()) * math.sqrt(units / (units - 1))
    if 0 < value < 1 and error > 0:
        return Estimate(value, *_wilson(value, value * (1 - value) / error**2, _t(units - 1)))
    return _without_spread(value, units)


def _wilson(share: float, count: float, z: float) -> tuple[float, float]:
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _quantiles(resampled: np.ndarray, units: int) -> tuple[float, float]:
    """Return the bounds of the 95 % interval: quantiles of resampled scores.

    For few questions the quantiles are farther out, as a t-interval is wider than a normal one.
    """
    if units < 2:
        return float(resampled.min()), float(resampled.max())
    share = _NORMAL.cdf(-_t(units - 1) * math.sqrt(units / (units - 1)))
    low, high = np.quantile(resampled, [share, 1 - share])
    return float(low), float(high)


def _paired_interval(better: int, worse: int, units: int) -> tuple[float, float]:
    """Return the interval of Bonett and Price for a difference of paired proportions, which adds 1 to both counts."""
    up, down = (better + 1) / (units + 2), (worse + 1) / (units + 2)
    half = _z() * math.sqrt(max(0.0, up + down - (up - down) ** 2) / (units + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def _is_mean(names: Sequence[str], column: int, summary: Summary, figure: str, values: np.ndarray) -> bool:
    """Return whether a figure is the mean of the value with its name."""
    means = values.mean(axis=0)
    return figures_of(names, means, summary)[figure] == float(means[column])


def _changed(
    before: np.ndarray, after: np.ndarray, column: int | None, names: Sequence[str], summary: Summary, figure: str
) -> tuple[int, int]:
    """Return the number of units whose score is larger for the second model, and the number whose score is smaller."""
    if column is not None:
        delta = after[:, column] - before[:, column]
    else:
        scores = [[figures_of(names, row, summary).get(figure, 0.0) for row in table] for table in (before, after)]
        delta = np.array(scores[1]) - np.array(scores[0])
    return int((delta > 0).sum()), int((delta < 0).sum())


def _resampled_figures(names: Sequence[str], values: np.ndarray, summary: Summary) -> dict[str, np.ndarray]:
    """Return {figure: its value in each of `RESAMPLES` resamples of the questions}."""
    means = _resampled(values)
    if summary is dict:  # `dict` returns the means unchanged: they are the figures
        return dict(zip(names, means.T, strict=True))
    figures = [figures_of(names, each, summary) for each in means]
    return {name: np.array([each.get(name, 0.0) for each in figures]) for name in figures[0]}


def _resampled(values: np.ndarray) -> np.ndarray:
    """Return the means of values over questions that are drawn with replacement, `RESAMPLES` times."""
    units = len(values)
    if units <= _MOST_KEPT:
        drawn: np.ndarray = _all_weights(units) @ values
        return drawn
    generator, at_once = np.random.default_rng(_SEED), max(1, _CHUNK // units)
    means = np.empty((RESAMPLES, values.shape[1]))
    for first in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - first)
        means[first : first + count] = _weights(generator, units, count) @ values
    return means


def _exchanged(before: np.ndarray, after: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the means of both models `RESAMPLES` times; each time, about half of the questions exchange their marks.

    If both models are equally good, exchanged means are as likely as the original ones, for any number of questions.
    """
    generator, units = np.random.default_rng(_SEED), len(before)
    delta, means = after - before, np.concatenate([before.mean(axis=0), after.mean(axis=0)])
    for first in range(0, RESAMPLES, at_once := max(1, _CHUNK // units)):
        count = min(at_once, RESAMPLES - first)
        moved = generator.integers(0, 2, size=(count, units), dtype=np.int8) @ delta / units
        yield from means + np.concatenate([moved, -moved], axis=1)


@functools.lru_cache(maxsize=4)
def _all_weights(units: int) -> np.ndarray:
    """Return the weights of all resamples.

    They are cached: categories and tests often have the same number of units.
    """
    return _weights(np.random.default_rng(_SEED), units, RESAMPLES)


def _weights(generator: np.random.Generator, units: int, count: int) -> np.ndarray:
    """Return [count, units]: the share of each unit in a resample."""
    shares: np.ndarray = generator.multinomial(units, np.full(units, 1 / units), size=count) / units
    return shares


def _z() -> float:
    return _NORMAL.inv_cdf((1 + LEVEL) / 2)


def _t(degrees: int) -> float:
    """Convert a normal quantile to that of Student's t distribution, by the expansion for many degrees of freedom."""
    z = _z()
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / float(degrees) ** power for power, term in enumerate(terms)))
