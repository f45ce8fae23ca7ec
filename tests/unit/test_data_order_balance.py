"""Rows of equal work, and ranks with equal work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.data_balance import compare
from tessera.data.order.mixture import permutation
from tessera.data.order.order import Order, PackingConfig, RowTable, Samples, row_table
from tessera.data.order.packing import split_rows
from tessera.training.metrics import balance_of

# A model in which a token costs 10 and attends to its sample, and an encoder whose patches cost 12 each.
TOKEN, PAIR, PATCH = 10.0, 0.002, 12.0


def weighed(tokens: np.ndarray, patches: np.ndarray, weights: tuple[float, ...] | None = None) -> Samples:
    work = {
        "text": TOKEN * tokens + PAIR * tokens.astype(np.float64) ** 2,
        "vision": PATCH * patches.astype(np.float64),
    }
    starts = np.array([0, len(tokens)] if weights is None else [0, len(tokens) // 3, len(tokens)])
    return Samples(tokens, starts, weights, work, {"text": TOKEN, "vision": 0.0})


def mixed(count: int, seed: int = 0, weights: tuple[float, ...] | None = None) -> Samples:
    """Text alone, and pictures of many sizes with some words."""
    chance = permutation(count, seed, 1)
    words = 20 + permutation(count, seed, 2) % 700
    patches = np.where(chance % 3 == 0, 0, 100 + permutation(count, seed, 3) % 4000)
    return weighed(words + patches // 4, patches, weights)


def work_of_rows(table: RowTable, samples: Samples, length: int) -> np.ndarray:
    """Counted again, sample by sample, padding included."""
    total = sum(samples.work.values())
    order = Order(table, 0, shuffle=False)
    results = []
    for row in range(2 * len(table)):
        held = order.samples(row)
        results.append(total[held].sum() + TOKEN * (length - samples.tokens[held].sum()))
    return np.array(results)


@pytest.mark.parametrize(
    "weights", [None, *(pytest.param(weights, marks=pytest.mark.slow) for weights in ((1.0, 1.0), (9.0, 1.0)))]
)
def test_rows_have_equal_work_and_little_padding(weights: tuple[float, ...] | None) -> None:
    samples = mixed(30_000, weights=weights)
    plain = row_table(samples, PackingConfig(8192, balance=False))
    table = row_table(samples, PackingConfig(8192))
    assert plain.stats.work is not None
    assert table.stats.work is not None
    assert plain.stats.work > 1.3
    assert table.stats.work < 1.03
    assert table.stats.padding < 0.02
    rows = work_of_rows(table, samples, 8192)
    assert rows.max() / rows.mean() <= table.stats.work * (1 + 1e-6)  # the bound holds in every pass
    told = np.array(Order(table, 0, shuffle=False).work(range(2 * len(table))))
    assert (rows <= told * (1 + 1e-6)).all()
    if weights is None:
        assert table.stats.work == pytest.approx(rows.max() / rows.mean(), rel=1e-6)
        assert told == pytest.approx(rows, rel=1e-6)
    assert Order(plain, 0).work([0, 1]) is None


def test_sixty_four_ranks_have_equal_work() -> None:
    """From text alone to twenty pictures and clips, with the work of Qwen2-VL 2b: as the bench measures it."""
    lines = [line for line in compare("2b", 16384, 40_000) if line["micro_batches"] == 1]
    plain, balanced = (next(line for line in lines if line["case"] == case) for case in ("plain", "balanced"))
    assert plain["max_over_mean"] >= 1.3
    assert balanced["worst_step"] <= 1.05
    assert balanced["padding"] < 0.02


def test_the_promise_is_one_line() -> None:
    samples = mixed(3000)
    line = row_table(samples, PackingConfig(8192)).stats.summary()
    assert line.startswith("2")
    assert "of 8,192 tokens, padding 0." in line
    assert ", work at most 1.0" in line
    assert "x mean (text 1." in line
    assert "work" not in row_table(Samples(samples.tokens, samples.starts), PackingConfig(8192)).stats.summary()


@settings(max_examples=60, deadline=None)
@given(data=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 400)), max_size=90), seed=st.integers(0, 2**64))
def test_balanced_rows_hold_every_sample_once_and_fit(data: list[tuple[int, int]], seed: int) -> None:
    tokens, patches = (np.array([pair[i] for pair in data], dtype=np.int64) for i in (0, 1))
    samples = weighed(tokens, patches)
    table = row_table(samples, PackingConfig(64, seed))
    rows = [table[row].tolist() for row in range(len(table))]
    assert sorted(sample for row in rows for sample in row) == list(range(len(data)))
    assert all(0 < tokens[row].sum() <= 64 for row in rows)
    again = row_table(samples, PackingConfig(64, seed))
    assert np.array_equal(again.arrays["members"], table.arrays["members"])


def test_what_cannot_be_halved_is_told() -> None:
    """One sample that weighs more than a row: nothing else is heavy in its row, and the bound says so."""
    samples = mixed(5000)
    samples.work["vision"][7] = 5 * TOKEN * 8192
    table = row_table(samples, PackingConfig(8192))
    assert table.stats.work is not None
    assert table.stats.work > 2
    rows = work_of_rows(table, samples, 8192)
    assert np.sort(rows)[-3] / rows.mean() < 1.03  # its row, in two passes, stands alone


def test_work_is_part_of_what_a_table_is_kept_under(tmp_path: Path) -> None:
    row_table(mixed(100), PackingConfig(8192), tmp_path)
    row_table(mixed(100, 1), PackingConfig(8192), tmp_path)
    row_table(mixed(100), PackingConfig(8192, balance=False), tmp_path)
    stored = row_table(mixed(100), PackingConfig(8192), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert stored.stats == row_table(mixed(100), PackingConfig(8192)).stats
    assert Order(stored, 0).work(range(30)) == Order(row_table(mixed(100), PackingConfig(8192)), 0).work(range(30))


# ---------------------------------------------------------------------------------------------- ranks


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(1, 9),
    batches=st.integers(1, 5),
    micro=st.integers(1, 4),
    data=st.data(),
)
def test_a_deal_gives_every_row_to_one_rank(ranks: int, batches: int, micro: int, data: st.DataObject) -> None:
    rows = ranks * batches * micro
    work = data.draw(st.none() | st.lists(st.floats(0, 1e18), min_size=rows, max_size=rows))
    dealt = split_rows(work, rows, ranks, micro)
    assert dealt.shape == (ranks, batches, micro)
    assert sorted(dealt.flatten().tolist()) == list(range(rows))
    assert np.array_equal(split_rows(work, rows, ranks, micro), dealt)
    plain = np.arange(rows).reshape(batches, ranks, micro).transpose(1, 0, 2)
    if work is None or ranks == 1 or len(set(work)) == 1:
        assert np.array_equal(dealt, plain)
    if work is not None:
        weights = np.array(work)
        assert slowest(weights[dealt]) <= slowest(weights[plain]) * (1 + 1e-9)


def slowest(weights: np.ndarray) -> float:
    by_batch = weights.sum(axis=2)
    return float(by_batch.max(axis=0).sum() + by_batch.sum(axis=1).max())


def test_a_deal_evens_out_what_rows_left_uneven() -> None:
    work = 1 + (permutation(64 * 8, 5) % 100) / 100
    plain, dealt = (
        work[places].sum(axis=2) for places in (split_rows(None, 512, 64, 1), split_rows(work.tolist(), 512, 64, 1))
    )
    totals = dealt.sum(axis=1)
    assert plain.sum(axis=1).max() / totals.mean() > 1.15
    assert totals.max() / totals.mean() < 1.005
    together = dealt.max(axis=0) / dealt.mean(axis=0)  # micro-batches that run at the same time
    assert together.max() < 1.1 < (plain.max(axis=0) / plain.mean(axis=0)).min()


def test_the_live_figure() -> None:
    assert balance_of(torch.tensor([[3.0, 1.0]])) is None
    assert balance_of(torch.tensor([[3.0, 1.0], [0.0, 0.0]])) is None  # a rank that reports nothing has no rows
    assert balance_of(torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.0, 0.0]])) == pytest.approx((1.5 + 1.0) / 2)
