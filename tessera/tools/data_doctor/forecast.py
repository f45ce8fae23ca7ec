"""What a row length would do to a data set: what is dropped, what cutting by turns would save, what padding is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.data.order.table import Promise

SAMPLED = 64  # too long samples of each length that are really cut, to know what cutting would save
PACKED = 200_000  # samples that are really packed, to know the padding


@dataclass(frozen=True)
class Rung:
    """Shares are of the samples that can be used at all, and of their tokens."""

    length: int
    dropped: int  # samples longer than a row
    dropped_share: float
    tokens_lost: float  # share of tokens in them
    cut_share: float  # with data.too_long=turns: samples that lose their last turns
    cut_dropped_share: float  # and those whose first exchange does not fit
    cut_tokens_lost: float
    padding: float  # share of packed rows that is filling
    rows: int
    work: float | None  # of the heaviest row, over the mean; None: unknown
    estimated: bool  # cutting was tried on some of the samples, or packing
    chosen: bool


# How many tokens of a sample are left when it is cut by turns to a length; 0: nothing fits. None: it cannot be read.
KeptTokens = Callable[[int, int], int | None]
Pack = Callable[[np.ndarray, int], Promise]  # places of samples, length of a row -> what may be promised of the rows


def ladder(length: int, longest: int) -> list[int]:
    """Half and double lengths around the one asked for, up to the first that holds every sample."""
    rungs = [length // 4, length // 2, length]
    while rungs[-1] < longest and len(rungs) < 8:
        rungs.append(rungs[-1] * 2)
    return sorted({rung for rung in rungs if rung > 0})


def forecast(
    tokens: np.ndarray, samples: np.ndarray, length: int, kept_tokens: KeptTokens, pack: Pack, seed: int
) -> list[Rung]:
    """`tokens` of all samples that can be used, `samples` their numbers, which `kept_tokens` is asked with."""
    if not len(tokens):
        return []
    total = int(tokens.sum())
    rungs = []
    for rung in ladder(length, int(tokens.max())):
        long = np.flatnonzero(tokens > rung)
        chance = np.random.default_rng(seed)
        tried = long if len(long) <= SAMPLED else np.sort(chance.choice(long, SAMPLED, replace=False))
        saved, cut, asked = _cut(tokens[tried], samples[tried], rung, kept_tokens)
        fits = np.flatnonzero(tokens <= rung)
        packed = fits if len(fits) <= PACKED else np.sort(chance.choice(fits, PACKED, replace=False))
        promise = pack(packed, rung) if len(packed) else Promise(0, rung, 0.0)
        lost = int(tokens[long].sum())
        rungs.append(
            Rung(
                rung,
                len(long),
                len(long) / len(tokens),
                lost / total,
                cut * len(long) / len(tokens),
                (1 - cut) * len(long) / len(tokens),
                lost * (1 - saved) / total,
                promise.padding,
                round(promise.rows * len(fits) / max(1, len(packed))),
                promise.work,
                asked < len(long) or len(packed) < len(fits),
                rung == length,
            )
        )
    return rungs


def _cut(
    tokens: np.ndarray, samples: Sequence[int] | np.ndarray, rung: int, kept: KeptTokens
) -> tuple[float, float, int]:
    """Share of the tokens that cutting keeps, share of the samples it keeps something of, and how many were asked."""
    saved = whole = some = asked = 0
    for count, sample in zip(tokens.tolist(), np.asarray(samples).tolist(), strict=True):
        left = kept(sample, rung)
        if left is None:
            continue
        asked += 1
        whole += count
        saved += left
        some += left > 0
    return (saved / whole if whole else 0.0), (some / asked if asked else 0.0), asked
