"""Every implementation of attention between two packed sequences equals the eager one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tessera.core.types import Segments
from tessera.ops import cross_attention
from tessera.ops.cross_attention import packed_cross_attention
from tests.close import assert_as_close

# Queries and keys of each sample: one sample; equal ones; others; samples without keys, without queries, padding.
LENGTHS = (
    ([6], [4]),
    ([6, 6], [4, 4]),
    ([7, 5, 1], [2, 6, 3]),
    ([5, 0, 4, 3], [2, 3, 0, 4]),
    ([9, 1, 1, 3], [5, 1, 1, 0]),
)


def results(run: Callable[..., Tensor], lengths: tuple[list[int], list[int]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths[0]))
    counts = (sum(lengths[0]), sum(lengths[1]), sum(lengths[1]))
    qkv = [torch.randn(n, 2, 8, generator=generator).to(dtype).requires_grad_() for n in counts]
    out = run(*qkv, *(Segments.of(part) for part in lengths))
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("path", ["sdpa", "_padded", "_masked"])
def test_sdpa_equals_eager(path: str, lengths: tuple[list[int], list[int]]) -> None:
    """Which path runs depends on lengths and device; all of them must be right for all lengths."""

    def eager(*args: Tensor) -> Tensor:
        return packed_cross_attention(*args, scale=0.3, implementation="eager")

    def ours(*args: Tensor) -> Tensor:
        if path == "sdpa":
            return packed_cross_attention(*args, scale=0.3, implementation="sdpa")
        return getattr(cross_attention, path)(*args, 0.3)

    found = (results(ours, lengths, torch.float32), results(eager, lengths, torch.float32))
    for one, peer, exact in zip(*found, results(eager, lengths, torch.float64), strict=True):
        assert_as_close(one, peer, exact, roundings=4.0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_samples_attend_to_their_own_keys_and_to_nothing_without_keys(implementation: str) -> None:
    def run(*args: Tensor) -> Tensor:
        return packed_cross_attention(*args, implementation=implementation)

    out, dq, _, _ = results(run, ([3, 2, 2], [4, 0, 5]), torch.float64)
    assert not out[3:5].any()
    assert not dq[3:5].any()
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(n, 2, 8, generator=generator).double() for n in (7, 9, 9))
    alone = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q[5:], k[4:], v[4:]))
    ).transpose(0, 1)
    assert torch.allclose(out[5:], alone, atol=1e-12)
    nothing = packed_cross_attention(q, k[:0], v[:0], Segments.of([7]), Segments.of([0]), implementation=implementation)
    assert nothing.shape == q.shape
    assert not nothing.any()


def test_the_fused_operator_describes_its_results_to_the_compiler() -> None:
    q, k = torch.randn(6, 2, 8, device="meta"), torch.randn(4, 2, 8, device="meta")
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    extent = torch.zeros(2, dtype=torch.int64, device="meta")
    out, sums = cross_attention._forward(q, k, k, bounds, bounds, extent, extent, 0.3)
    assert out.shape == q.shape
    assert sums.shape == (2, 6)
