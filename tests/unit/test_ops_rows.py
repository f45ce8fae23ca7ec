from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.core.batch import IGNORE
from tessera.models.processing.conversation import trained_positions
from tessera.ops.loss import in_chunks
from tessera.ops.rows import take_rows


@given(st.integers(0, 300), st.integers(1, 70))
def test_chunks_are_all_rows_in_as_few_even_parts_as_there_must_be(rows: int, most: int) -> None:
    parts = [list(range(rows))[chunk] for chunk in in_chunks(rows, most)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert len(parts) == -(-rows // most)
    assert all(0 < len(part) <= most for part in parts)
    if parts:
        assert len({len(part) for part in parts[:-1]}) <= 1


def test_rows_and_their_gradients() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    for rows in (torch.tensor([4, 0, 5]), torch.empty(0, dtype=torch.int64)):
        weights = torch.randn(len(rows), 3)
        ours, theirs = take_rows(x, rows), x[rows]
        assert torch.equal(ours, theirs)
        (actual,), (expected,) = (torch.autograd.grad((y * weights).sum(), x) for y in (ours, theirs))
        assert torch.equal(actual, expected)


def test_trained_positions() -> None:
    assert trained_positions(torch.tensor([IGNORE, 3, 0, IGNORE, 7])).tolist() == [1, 2, 4]
    assert trained_positions(torch.full((3,), IGNORE)).tolist() == []
