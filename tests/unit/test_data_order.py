"""Packing and order: pure, complete, and the same forever."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.order import order as table_module
from tessera.data.order.mixture import Mixture, Shuffle, draws_per_set, mix, permutation
from tessera.data.order.order import Order, PackingConfig, RowTable, Samples, row_table

PERMUTATION = [3, 1, 7, 0, 4, 5, 6, 2]
FAR = 240916125368
MIXED = [7960286522194355700, 9550467469912592448, 13029008266876403067]


def of(
    lengths: list[int] | np.ndarray, weights: tuple[float, ...] | None = None, cuts: tuple[int, ...] = ()
) -> Samples:
    """Samples of so many tokens; `cuts`: where further sets begin."""
    tokens = np.array(lengths, dtype=np.int64)
    return Samples(tokens, np.array([0, *cuts, len(tokens)]), weights)


def rows_of(table: RowTable) -> list[list[int]]:
    return [table[row].tolist() for row in range(len(table))]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 300), key=st.lists(st.integers(-(2**40), 2**70), min_size=1, max_size=3))
def test_a_shuffle_is_a_bijection_known_point_by_point(count: int, key: list[int]) -> None:
    shuffle = Shuffle.of(count, *key)
    whole = shuffle.all().tolist()
    assert sorted(whole) == list(range(count))
    assert [shuffle(place) for place in range(count)] == whole == permutation(count, *key).tolist()


def test_shuffles_look_random() -> None:
    """Where a place goes is spread evenly, and neighbours do not stay neighbours."""
    count = 1000
    heads = np.array([Shuffle.of(count, key)(0) for key in range(4000)])
    assert np.bincount(heads // 100, minlength=10).min() > 320
    steps = np.diff(permutation(100_000, 7))
    assert (np.abs(steps) < 100).mean() < 0.01
    assert len({tuple(permutation(3, key).tolist()) for key in range(200)}) == 6


def test_the_order_never_changes() -> None:
    """Runs that were saved depend on these numbers."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    assert Shuffle.of(10**12, 5)(123_456_789) == FAR
    assert [mix(0), mix(1, 2), mix(-1)] == MIXED


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=80),
    seed=st.integers(-(2**40), 2**70),
    pack=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_sample_is_in_one_row_that_fits(lengths: list[int], seed: int, pack: bool, shuffle: bool) -> None:
    rules = PackingConfig(50, seed, pack=pack, shuffle=shuffle)
    table = row_table(of(lengths), rules)
    members = [sample for row in rows_of(table) for sample in row]
    assert sorted(members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[sample] for sample in row) <= 50 for row in rows_of(table))
    if not pack:
        assert len(table) == len(lengths)
    if not shuffle:
        assert members == list(range(len(lengths)))
    assert rows_of(row_table(of(lengths), rules)) == rows_of(table)
    if lengths:
        assert table.stats.padding == pytest.approx(1 - sum(lengths) / (len(table) * 50))


def test_rows_are_well_filled() -> None:
    lengths = permutation(20_000, 3) % 900 + 20
    assert row_table(of(lengths), PackingConfig(2048)).stats.padding < 0.01


def test_windows_mix_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "WINDOW", 16)
    rows = rows_of(row_table(of([10] * 100), PackingConfig(40, 1)))
    assert sorted(sample for row in rows for sample in row) == list(range(100))
    assert any(max(row) - min(row) > 16 for row in rows)  # rows are not made of neighbours in the file


def test_passes_hold_the_same_rows_in_another_order() -> None:
    order = Order(row_table(of([10] * 30), PackingConfig(20, 5)), seed=5)
    first, second = ([tuple(order.samples(row)) for row in range(p * 15, p * 15 + 15)] for p in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert [tuple(order.samples(row)) for row in range(15)] == first
    assert [tuple(Order(order.table, seed=6).samples(row)) for row in range(15)] != first
    straight = Order(order.table, seed=5, shuffle=False)
    assert [straight.index(row) for row in (0, 14, 15, 47)] == [(0, 0), (0, 14), (1, 0), (3, 2)]


def test_row_seeds_differ_and_fit() -> None:
    order = Order(row_table(of([10] * 3), PackingConfig(20)), seed=0)
    seeds = [order.row_seed(row) for row in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert Order(order.table, seed=1).row_seed(0) != seeds[0]


# ---------------------------------------------------------------------------------------------- weights


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 60), slots=st.integers(1, 150), passes=st.integers(1, 40))
def test_samples_of_a_set_are_drawn_equally_often(size: int, slots: int, passes: int) -> None:
    """Whatever their number and that of the slots: more, fewer, without a common divisor."""
    mixture = Mixture(np.array([0, size]), np.array([0, slots]), None)
    drawn = Counter(mixture.sample(slot, turn) for turn in range(passes) for slot in range(slots))
    assert set(drawn) <= set(range(size))
    low = passes * slots // size
    assert {drawn[sample] for sample in range(size)} <= {low, low + (passes * slots % size > 0)}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 50), min_size=4, max_size=60),
    weights=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 100)),
    shuffle=st.booleans(),
)
def test_no_pass_of_a_mixture_overflows_a_row(tokens: list[int], weights: tuple[float, ...], shuffle: bool) -> None:
    cuts = (len(tokens) // 4, len(tokens) // 2)
    table = row_table(of(tokens, weights, cuts), PackingConfig(50, 1, shuffle=shuffle))
    slots = np.diff(table.mixture.draws).tolist()
    assert slots == draws_per_set(np.diff([0, *cuts, len(tokens)]).tolist(), weights)
    order = Order(table, 1, shuffle)
    for turn in range(5):
        samples = [order.samples(row) for row in range(turn * len(table), (turn + 1) * len(table))]
        assert all(sum(tokens[sample] for sample in row) <= 50 for row in samples)
        sets = Counter(int(np.searchsorted(cuts, sample, side="right")) for row in samples for sample in row)
        assert [sets[which] for which in range(3)] == slots


def test_weights_are_shares_of_what_is_drawn() -> None:
    assert draws_per_set([100, 300], None) == [100, 300]
    assert draws_per_set([100, 300], (1.0, 1.0)) == [200, 200]
    assert draws_per_set([100, 300, 0], (3.0, 1.0, 5.0)) == [300, 100, 0]  # nothing is drawn from an empty set
    assert draws_per_set([10, 10_000], (1e-9, 1.0)) == [1, 10010]


def test_slots_hold_samples_that_are_alike() -> None:
    """So that the length kept free for the longest of them is no waste."""
    tokens = permutation(40_000, 1) % 1900 + 20
    samples = of(tokens, (1.0, 1.0), (30_000,))
    assert row_table(samples, PackingConfig(2048)).stats.padding < 0.02


# ---------------------------------------------------------------------------------------------- kept tables


def test_a_table_is_kept_shared_and_made_again_when_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = permutation(3000, 3) % 900 + 20
    samples = of(lengths, (1.0, 2.0), (1000,))
    fresh = row_table(samples, PackingConfig(2048))
    table = row_table(samples, PackingConfig(2048), tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(table_module, "_make", None)  # must not be needed
        stored_table = row_table(samples, PackingConfig(2048), tmp_path)
    assert rows_of(stored_table) == rows_of(table) == rows_of(fresh)
    assert stored_table.stats == table.stats == fresh.stats
    first, other = Order(stored_table, 1), Order(fresh, 1)
    assert [first.samples(row) for row in range(500)] == [other.samples(row) for row in range(500)]
    travelled = pickle.dumps(first)
    assert len(travelled) < 2000
    assert [pickle.loads(travelled).samples(row) for row in range(50)] == [other.samples(row) for row in range(50)]  # noqa: S301
    for rules in (
        PackingConfig(1024),
        PackingConfig(2048, 1),
        PackingConfig(2048, pack=False),
        PackingConfig(2048, shuffle=False),
    ):
        row_table(samples, rules, tmp_path)
    row_table(of(lengths, (1.0, 3.0), (1000,)), PackingConfig(2048), tmp_path)
    row_table(of(lengths[::-1], (1.0, 2.0), (1000,)), PackingConfig(2048), tmp_path)
    assert len(list(tmp_path.iterdir())) == 7
    whole = file.read_bytes()
    for damage in (b"", b"garbage", whole[:-40], whole.replace(b"members", b"membres")):
        file.write_bytes(damage)
        assert rows_of(row_table(samples, PackingConfig(2048), tmp_path)) == rows_of(fresh)


def test_any_step_is_found_at_once(tmp_path: Path) -> None:
    lengths = permutation(200_000, 3) % 900 + 20
    order = Order(row_table(of(lengths, (1.0, 2.0), (50_000,)), PackingConfig(2048), tmp_path), 0)
    order.samples(0)
    began = time.process_time()
    rows = [order.samples(10**9 * 512 + at) for at in range(10)]
    assert time.process_time() - began < 5  # going through what comes before would take days
    assert all(0 < sum(lengths[sample] for sample in row) <= 2048 for row in rows)
