"""Which rank computes which of a step's rows, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORTH = 0.005  # a deal that saves less than this share of a step's time is not made


def deal(work: Sequence[float] | None, rows: int, ranks: int, micro_batch: int) -> np.ndarray:
    """[ranks, micro-batches, micro_batch]: places among the step's rows. A pure function, alike on every rank.

    Micro-batches that run at the same time are made of rows that weigh about the same, and ranks get the same in all.
    Where rows weigh alike, or each rank has one, rows go round in their order.
    """
    plain = np.arange(rows).reshape(-1, ranks, micro_batch).transpose(1, 0, 2)
    if work is None or ranks == 1 or rows == ranks:
        return plain
    weights = np.asarray(work, dtype=np.float64)
    dealt = _dealt(weights, ranks, micro_batch)
    return dealt if _time(weights[dealt]) < (1 - WORTH) * _time(weights[plain]) else plain


def _dealt(weights: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    heaviest_first = np.argsort(-weights, kind="stable").reshape(-1, ranks * micro_batch)
    held = np.zeros(ranks)
    dealt = np.empty((ranks, len(heaviest_first), micro_batch), dtype=np.int64)
    for turn, together in enumerate(heaviest_first):
        batches = _micro_batches(together, weights, ranks, micro_batch)
        heavy = np.argsort(-weights[batches].sum(axis=1), kind="stable")
        light = np.argsort(held, kind="stable")
        dealt[light, turn] = np.sort(batches[heavy], axis=1)
        held[light] += weights[batches[heavy]].sum(axis=1)
    return dealt


def _micro_batches(together: np.ndarray, weights: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    """[ranks, micro_batch] of equal weight: to and fro over the rows, heaviest first."""
    laps = together.reshape(micro_batch, ranks)
    batches, held = np.empty((ranks, micro_batch), dtype=np.int64), np.zeros(ranks)
    for lap, row in enumerate(laps):
        light = np.argsort(held, kind="stable")
        batches[light, lap] = row
        held[light] += weights[row]
    return batches


def _time(weights: np.ndarray) -> float:
    """Of a step: ranks wait for each other somewhere between after every micro-batch and once at its end."""
    by_batch = weights.sum(axis=2)  # [ranks, micro-batches]
    return float(by_batch.max(axis=0).sum() + by_batch.sum(axis=1).max())
