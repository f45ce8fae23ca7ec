"""Packing and order: pure, complete, and the same forever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data import order as order_module
from tessera.data.order import Order, make_packs, mix, permutation

PERMUTATION = [1, 2, 6, 3, 7, 4, 0, 5]
MIXED = [7960286522194355700, 9550467469912592448, 13029008266876403067]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=80),
    seed=st.integers(-(2**40), 2**70),
    pack=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_sample_is_in_one_row_that_fits(lengths: list[int], seed: int, pack: bool, shuffle: bool) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    packs = make_packs(sizes, 50, seed, pack=pack, shuffle=shuffle)
    members = [i for row in range(len(packs)) for i in packs[row].tolist()]
    assert sorted(members) == list(range(len(lengths)))
    assert all(0 < sizes[packs[row]].sum() <= 50 for row in range(len(packs)))
    if not pack:
        assert len(packs) == len(lengths)
    if not shuffle:
        assert members == list(range(len(lengths)))
    again = make_packs(sizes, 50, seed, pack=pack, shuffle=shuffle)
    assert np.array_equal(again.members, packs.members)
    assert np.array_equal(again.bounds, packs.bounds)


def test_rows_are_well_filled() -> None:
    lengths = (permutation(20_000, 3) % 900 + 20).astype(np.int64)
    packs = make_packs(lengths, 2048, 0)
    assert lengths.sum() / (len(packs) * 2048) > 0.99


def test_windows_mix_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "WINDOW", 16)
    packs = make_packs(np.full(100, 10), 40, 1)
    assert sorted(packs.members.tolist()) == list(range(100))
    assert any(np.ptp(packs[row]) > 16 for row in range(len(packs)))  # rows are not made of neighbours in the file


def test_epochs_are_permutations_that_differ() -> None:
    order = Order(make_packs(np.full(30, 10), 20, 5), seed=5)
    first, second = order.epoch(0), order.epoch(1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(15))
    assert first.tolist() != second.tolist()
    assert order.epoch(1).tolist() == second.tolist()
    other = Order(order.packs, seed=6)
    assert other.epoch(0).tolist() != first.tolist()
    straight = Order(order.packs, seed=5, shuffle=False)
    assert straight.epoch(3).tolist() == list(range(15))


def test_the_order_never_changes() -> None:
    """Runs that were saved depend on these numbers."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    assert [mix(0), mix(1, 2), mix(-1)] == MIXED


def test_row_seeds_differ_and_fit() -> None:
    order = Order(make_packs(np.full(3, 10), 20, 0), seed=0)
    seeds = [order.row_seed(row) for row in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert Order(order.packs, seed=1).row_seed(0) != seeds[0]
