"""Weight files broken on purpose: each is read as the library it comes from reads it, or refused. Nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.toys.broken_weights import KINDS
from tests.toys.fuzz import each_outcome

READ, MIB = 40, 32  # of a file of up to 15 kB with seven archives: times its bytes, and more memory than at first
GRACE = 120.0  # for a machine with much else to do; a file that computes for ever is ended by the limit of its process


def check(seed: int, count: int, batch: int) -> None:
    seen = []
    for start in range(0, count, batch):
        rows = list(each_outcome("tests.toys.fuzz_weights", start, min(count, start + batch), GRACE, (seed,)))
        assert max(row["peak_mib"] for row in rows) - rows[0]["peak_mib"] < MIB
        seen += rows
    kinds = Counter(row["outcome"].split(":")[0] for row in seen)
    bad = [row for row in seen if row["outcome"].split(":")[0] not in ("read", "refused", "read, stock refuses")]
    assert not bad, f"{kinds}; the first: {bad[:5]}"
    assert [row["number"] for row in seen] == list(range(count))
    assert not [row for row in seen if row["canary"]]
    assert not [row for row in seen if row["read"] > READ * row["size"] + (1 << 16)]
    for kind in KINDS:  # what is broken a little can be read, and not everything is
        outcomes = Counter(row["outcome"].split(":")[0] for row in seen if row["kind"] == kind)
        assert outcomes["refused"] > outcomes.total() / 5, (kind, outcomes)
        assert outcomes["read"] > outcomes.total() / 50, (kind, outcomes)


def test_broken_weights_are_read_or_refused() -> None:
    check(seed=1, count=150, batch=150)


@pytest.mark.slow
def test_ten_thousand_broken_weights() -> None:
    check(seed=2, count=10_000, batch=2500)
