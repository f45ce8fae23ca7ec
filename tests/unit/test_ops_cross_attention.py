"""Every implementation of attention between two packed sequences equals the eager one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops import cross_attention, first_segment, packed_sdpa
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


def results(
    run: Callable[..., Tensor], lengths: tuple[list[int], list[int]], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths[0]))
    counts = (sum(lengths[0]), sum(lengths[1]), sum(lengths[1]))
    drawn = [torch.randn(n, 2, 8, generator=generator) for n in counts]
    if device != "cpu":  # what every type sees is the same
        drawn = [x.bfloat16() for x in drawn]
    qkv = [x.to(device, dtype).requires_grad_() for x in drawn]
    out = run(*qkv, *(Segments.of(part).to(device) for part in lengths))
    weights = torch.linspace(-1, 1, out.numel()).bfloat16().to(device, dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("path", ["sdpa", "padded", "masked"])
def test_sdpa_equals_eager(path: str, lengths: tuple[list[int], list[int]]) -> None:
    """Which path runs depends on lengths and device; all of them must be right for all lengths."""

    def eager(*args: Tensor) -> Tensor:
        return packed_cross_attention(*args, scale=0.3, implementation="eager")

    def ours(*args: Tensor) -> Tensor:
        if path == "sdpa":
            return packed_cross_attention(*args, scale=0.3, implementation="sdpa")
        return getattr(packed_sdpa, path)(*args, 0.3)

    results_of = (results(ours, lengths, torch.float32), results(eager, lengths, torch.float32))
    for actual, peer, exact in zip(*results_of, results(eager, lengths, torch.float64), strict=True):
        assert_as_close(actual, peer, exact, roundings=4.0)


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


@pytest.mark.parametrize("lengths", [([3, 4], [5, 0]), ([0, 7], [5, 0]), ([7], [0])], ids=str)
def test_keys_that_nobody_attends_to_have_a_gradient_of_zeros(lengths: tuple[list[int], list[int]]) -> None:
    """Ranks wait for each other's gradients: one that has padding alone must not leave any out."""
    out, *grads = results(packed_cross_attention, lengths, torch.float32)
    assert not out[-4:].any()
    assert all(grad is not None for grad in grads)
    if not lengths[0][0]:
        assert not any(grad.any() for grad in grads)


def test_the_fused_operator_describes_its_results_to_the_compiler() -> None:
    q, k = torch.randn(6, 2, 8, device="meta"), torch.randn(4, 2, 8, device="meta")
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    extent = torch.zeros(3, dtype=torch.int64, device="meta")
    out, sums = cross_attention._forward(q, k, k, bounds, bounds, extent, extent, 0.3)
    assert out.shape == q.shape
    assert sums.shape == (2, 6)


# ---------------------------------------------------------------------------------------------- a long first segment

FIRST = (([4096], [7]), ([4100, 12], [7, 3]), ([4100, 12], [7, 0]), ([4100, 0], [7, 3]))


class PlainCudnn:
    """cuDNN's two calls in plain products, for machines without it: what is checked is what goes in and comes out."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert not causal
        scores = q @ k.transpose(2, 3) * scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)

    @staticmethod
    def backward(tensors: list[Tensor], lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
        grad, q, k, v, out = tensors
        weights = (q @ k.transpose(2, 3) * scale - lse).exp()
        inner = weights * (grad @ v.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
        return [inner @ k, inner.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad]


@pytest.mark.parametrize("lengths", FIRST, ids=str)
def test_a_long_first_segment_and_the_rest_equal_eager(
    lengths: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_segment, "supports_here", lambda device, what: what == "cudnn_attention")
    monkeypatch.setattr(first_segment, "cudnn_attention_forward", PlainCudnn.forward)
    monkeypatch.setattr(first_segment, "cudnn_attention_backward", PlainCudnn.backward)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        return results(lambda *args: function(*args, 0.3), lengths, torch.float64)

    for actual, expected in zip(run(cross_attention._fused), run(cross_attention._eager), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("lengths", [*LENGTHS, *FIRST], ids=str)
def test_fused_equals_eager_on_the_device(lengths: tuple[list[int], list[int]]) -> None:
    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        return results(lambda *args: packed_cross_attention(*args, implementation=name), lengths, dtype, "cuda")

    results = (run("fused", torch.bfloat16), run("eager", torch.bfloat16), run("eager", torch.float64))
    for actual, peer, exact in zip(*results, strict=True):
        assert_as_close(actual, peer, exact, roundings=4.0)
