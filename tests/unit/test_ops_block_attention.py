"""Blocks of attention, joined, are the attention over all keys; and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.attention import _packed_eager, attend_explicitly, packed_attention
from tessera.ops.block_attention import block_attention, block_attention_backward, join
from tests.close import distance, rounding
from tests.errors import raises

LENGTHS = ([18], [7, 5, 0, 6], [1, 1, 16])


def inputs(tokens: int, kv_heads: int, dtype: torch.dtype = torch.float64, dim: int = 8) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(tokens + kv_heads)
    counts = (4, kv_heads, kv_heads, 4)
    return [torch.randn(tokens, n, dim, generator=generator, dtype=torch.float64).to(dtype) for n in counts]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, segments: Segments, causal: bool) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = packed_attention(q, k, v, segments, causal=causal, scale=0.3, implementation="sdpa")
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_pieces_equal_packed_attention(lengths: list[int], causal: bool, kv_heads: int) -> None:
    segments = Segments.of(lengths)
    q, k, v, grad = inputs(sum(lengths), kv_heads)
    out, lse = block_attention(q, k, v, segments=segments, causal=causal, scale=0.3)
    back = block_attention_backward(grad, q, k, v, out, lse, segments=segments, causal=causal, scale=0.3)
    close([out, *back], whole(q, k, v, grad, segments, causal))


def test_lengths_may_be_known_on_the_device_alone() -> None:
    q, k, v, _ = inputs(18, 2)
    segments = Segments.of([7, 5, 6])
    unknown = Segments(segments.bounds, segments.longest)
    for ours, theirs in zip(
        block_attention(q, k, v, segments=unknown, causal=True, scale=0.3),
        block_attention(q, k, v, segments=segments, causal=True, scale=0.3),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_rectangles_join_to_the_whole(kv_heads: int) -> None:
    """Keys in three parts of which the last is seen by some queries only, as where a segment ends."""
    q, k, v, grad = inputs(18, kv_heads)
    parts = ((slice(0, 18), slice(0, 5)), (slice(0, 18), slice(5, 12)), (slice(4, 9), slice(12, 18)))
    rows, keys = parts[0]
    out, lse = block_attention(q[rows], k[keys], v[keys], segments=None, causal=False, scale=0.3)
    for rows, keys in parts[1:]:
        join(out, lse, rows, *block_attention(q[rows], k[keys], v[keys], segments=None, causal=False, scale=0.3))
    sums = [out, *(torch.zeros_like(x) for x in (q, k, v))]
    for rows, keys in parts:
        arguments = (grad[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows])
        dq, dk, dv = block_attention_backward(*arguments, segments=None, causal=False, scale=0.3)
        sums[1][rows] += dq
        sums[2][keys] += dk
        sums[3][keys] += dv
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = torch.ones(18, 18, dtype=torch.bool)
    seen[:, 12:] = False
    seen[4:9, 12:] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    close(sums, [expected.detach(), *torch.autograd.grad(expected, (q, k, v), grad)])


def test_half_precision_adds_up_in_full() -> None:
    q, k, v, grad = inputs(18, 2, torch.bfloat16)
    segments = Segments.of([18])
    out, lse = block_attention(q, k, v, segments=segments, causal=True, scale=0.3)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    back = block_attention_backward(grad, q, k, v, out, lse, segments=segments, causal=True, scale=0.3)
    expected = whole(*(x.double() for x in (q, k, v, grad)), segments, True)
    for ours, theirs in zip([out, *back], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


def test_what_cannot_serve_is_refused() -> None:
    q, k, v, _ = inputs(4, 4)
    with raises("device.implementation-unusable", "flash", "allowed: auto, eager"):
        block_attention(q, k, v, segments=None, causal=False, scale=1.0, implementation="flash")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kind", ["causal", "full", "rectangle"])
def test_flash_equals_eager(kind: str, dim: int) -> None:
    """Backward is given the result over more keys than the block has, as in a ring."""
    device = torch.accelerator.current_accelerator()
    q, k, v, grad = (x.to(device) for x in inputs(300, 2, torch.bfloat16, dim))
    segments = Segments.of([100, 0, 137, 63]).to(device) if kind != "rectangle" else None
    keys = slice(0, 300) if segments is not None else slice(0, 171)
    how = {"segments": segments, "causal": kind == "causal", "scale": dim**-0.5}
    block = (q, k[keys], v[keys])

    def plain(dtype: torch.dtype) -> list[Tensor]:
        """Products and a softmax in `dtype`, whose rounding is that of kernels of this type."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in block]
        if segments is None:
            out = attend_explicitly(*leaves, None, how["scale"])
        else:
            out = _packed_eager(*leaves, segments, kind == "causal", how["scale"])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    limits = [3 * distance(*pair) for pair in zip(plain(torch.bfloat16), plain(torch.float64), strict=True)]
    out, lse = block_attention(*block, **how, implementation="flash")
    wide_out, wide_lse = block_attention(*(x.double() for x in block), **how, implementation="eager")
    assert distance(out, wide_out) <= limits[0]
    assert distance(lse, wide_lse) <= rounding(300) * float(wide_lse.abs().max())
    # Joined with more keys in float64, which changes nobody's rounding.
    more = block_attention(*(x.double() for x in (q[50:200], k, v)), segments=None, causal=False, scale=0.1)
    join(wide_out, wide_lse, slice(50, 200), *more)
    arguments = (grad, *block, wide_out.to(q.dtype), wide_lse.float())
    ours = block_attention_backward(*arguments, **how, implementation="flash")
    exact = block_attention_backward(*(x.double() for x in arguments), **how, implementation="eager")
    for what, actual, right, limit in zip("qkv", ours, exact, limits[1:], strict=True):
        assert distance(actual, right) <= limit, what
