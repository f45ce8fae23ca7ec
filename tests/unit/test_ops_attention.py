"""Every implementation of attention equals the eager one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tessera.core.batch import Segments
from tessera.core.cache import CacheRow, CacheStep
from tessera.ops import attention, first_segment, packed_sdpa
from tessera.ops import fused_attention as fused
from tessera.ops.attention import packed_attention
from tessera.ops.cached_attention import cached_attention
from tessera.ops.fused_attention import fused_attention
from tessera.ops.registry import AUTO
from tessera.runtime.device import supports
from tests.close import assert_as_close
from tests.errors import raises

# Equal pieces; similar ones (padded); one long among many short (looped); an empty one at the end and in the middle.
LENGTHS = ([6, 6, 6], [7, 5, 6, 1], [20, 1, 2, 1, 3, 1, 1], [5, 0, 4, 0])


def inputs(tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + kv_heads)
    return tuple(
        torch.randn(tokens, count, dim, generator=generator, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )


def no_further_than_plain_products(
    run: Callable[[Any, torch.dtype], list[Tensor]], way: Any, dtype: torch.dtype, plain: Any = "eager"
) -> None:
    """Every type rounds weights and their slopes, in kernels and in plain products alike: what counts is that a kernel
    is no further from float64 than those are."""
    ours, peers, exact = run(way, dtype), run(plain, dtype), run(plain, torch.float64)
    few = 4.0 if dtype is torch.float32 else 0.5  # several sums in a row; half precision adds in fp32 and rounds once
    for name, actual, peer, right in zip(("out", "q", "k", "v"), ours, peers, exact, strict=True):
        assert_as_close(actual, peer, right, roundings=few, what=name)


def with_gradients(run: Callable[..., Tensor], qkv: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    out = run(*qkv)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), qkv)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_sdpa_equals_eager(lengths: list[int], causal: bool, kv_heads: int) -> None:
    segments = Segments.of(lengths)
    qkv = inputs(sum(lengths), kv_heads=kv_heads)

    def run(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        return with_gradients(
            lambda q, k, v: packed_attention(
                q, k, v, segments, causal=causal, scale=0.3, implementation=implementation
            ),
            tuple(x.detach().to(dtype).requires_grad_() for x in qkv),
        )

    no_further_than_plain_products(run, "sdpa", torch.float32)


@pytest.mark.parametrize("path", ["padded", "looped", "masked"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_path_of_sdpa_equals_eager(path: str, causal: bool) -> None:
    """Which path runs depends on lengths and device; all of them must be right for all lengths."""
    for lengths in LENGTHS:
        segments, qkv = Segments.of(lengths), inputs(sum(lengths))

        def run(
            function: Callable[..., Tensor],
            dtype: torch.dtype,
            segments: Segments = segments,
            qkv: tuple[Tensor, ...] = qkv,
        ) -> list[Tensor]:
            leaves = tuple(x.detach().to(dtype).requires_grad_() for x in qkv)
            return with_gradients(lambda q, k, v: function(q, k, v, segments, causal, 0.3), leaves)

        def ours(q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool, scale: float) -> Tensor:
            out: Tensor = getattr(packed_sdpa, path)(q, k, v, segments, None, scale, causal)
            return out

        no_further_than_plain_products(run, ours, torch.float32, attention._packed_eager)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_fused_equals_eager(lengths: list[int], causal: bool) -> None:
    """Here without its kernels: what surrounds them. Those are held against eager on accelerators, below."""
    segments = Segments.of(lengths)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        qkv = tuple(x.detach().to(dtype).requires_grad_() for x in inputs(sum(lengths)))
        return with_gradients(lambda q, k, v: function(q, k, v, segments, causal, 0.3), qkv)

    no_further_than_plain_products(run, fused_attention, torch.float32, attention._packed_eager)


def test_fused_is_compiled_once_for_batches_of_every_kind() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def around(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return fused_attention(2 * q, k, v, segments, True, 0.3) + 1

    compiled = torch.compile(around, backend=counter, fullgraph=True)
    kinds = (Segments.of([12, 12]), Segments.of([4, 20]), Segments.of([22, 2], rows=1), Segments.of([9, 15], rows=0))
    for segments in kinds:
        ours = with_gradients(lambda q, k, v, segments=segments: compiled(q, k, v, segments), inputs(24))
        reference = with_gradients(lambda q, k, v, segments=segments: around(q, k, v, segments), inputs(24))
        for actual, other in zip(ours, reference, strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)
        assert counter.frame_count == 1
    torch._dynamo.reset()


def test_pieces_do_not_see_each_other() -> None:
    segments = Segments.of([4, 3])
    q, k, v = (x.detach() for x in inputs(7))
    before = packed_attention(q, k, v, segments, causal=False)
    v[4:] += 1
    after = packed_attention(q, k, v, segments, causal=False)
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:], after[4:])


def test_causal_means_no_later_token() -> None:
    segments = Segments.of([6])
    q, k, v = (x.detach() for x in inputs(6))
    before = packed_attention(q, k, v, segments, causal=True)
    v[2] += 1
    changed = (packed_attention(q, k, v, segments, causal=True) - before).abs().amax((1, 2)) > 1e-6
    assert changed.tolist() == [False, False, True, True, True, True]


CACHED = {  # blocks, cached tokens and new tokens of each row
    "decoding": [([2, 0, 5], 9, 1), ([1], 0, 1), ([4, 3], 5, 1)],
    "chunks beside decoding": [([2, 0, 5], 9, 1), ([4, 3], 5, 1), ([1, 7], 3, 5), ([6, 8, 9], 0, 10), ([11], 2, 1)],
    "chunks": [([1, 7], 3, 5), ([2, 0, 5], 0, 12)],
}


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("implementation", ["auto", "eager", "sdpa"])
def test_cached_attention_is_causal_attention_over_the_tokens_of_a_row(implementation: str, case: str) -> None:
    generator = torch.Generator().manual_seed(0)
    step = CacheStep.of([CacheRow(*row) for row in CACHED[case]], 4, "cpu", width=5)
    q = torch.randn(step.slots.shape[0], 4, 8, generator=generator)
    keys, values = (torch.randn(12, 4, 2, 8, generator=generator) for _ in range(2))
    out = cached_attention(q, keys, values, step, implementation=implementation)
    start = 0
    for blocks, cached, new in CACHED[case]:
        k, v = (torch.cat([pool[block] for block in blocks])[: cached + new] for pool in (keys, values))
        for number in range(new):
            seen = cached + number + 1
            alone = attention.attend_explicitly(q[start + number].unsqueeze(0), k[:seen], v[:seen], None, 8**-0.5)
            torch.testing.assert_close(out[start + number].unsqueeze(0), alone, rtol=1e-5, atol=1e-6)
        start += new


def test_cached_attention_asks_the_device_for_nothing() -> None:
    """On the meta device there are no numbers: whoever wanted one would fail."""
    step = CacheStep.of([CacheRow(*row) for row in CACHED["chunks beside decoding"]], 4, "cpu")
    moved = {name: value.to("meta") for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    step = replace(step, segments=step.segments.to("meta"), **moved)
    q, pool = torch.empty(step.slots.shape[0], 4, 8, device="meta"), torch.empty(12, 4, 2, 8, device="meta")
    assert cached_attention(q, pool, pool, step).shape == q.shape


def test_an_implementation_that_cannot_serve_is_an_error_that_names_those_that_can() -> None:
    q, k, v = inputs(4)
    with raises("device.implementation-unusable") as caught:
        packed_attention(q, k, v, Segments.of([4]), causal=True, implementation="fused")
    assert caught.value.allowed == ["auto", "sdpa", "eager"]
    with raises("device.implementation-unusable") as caught:
        packed_attention(q, k, v, Segments.of([4]), causal=True, implementation="sdpaa")
    assert caught.value.nearest == "sdpa"


def test_a_recipe_may_ask_for_every_implementation_and_no_other() -> None:
    names = [implementation.name for implementation in attention.PACKED_ATTENTION.implementations]
    # Devices have fused implementations of their own under the same name.
    assert list(get_args(attention.AttentionBackend)) == [AUTO, *dict.fromkeys(names)]


def test_nothing_in_is_nothing_out() -> None:
    q, k, v = (torch.zeros(0, heads, 8) for heads in (4, 2, 2))
    assert packed_attention(q, k, v, Segments.of([]), causal=True).shape == (0, 4, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["fused", "sdpa"])
def test_accelerated_equals_eager(lengths: list[int], causal: bool, implementation: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    segments = Segments.of(lengths).to(device)
    qkv = tuple(x.detach().to(device, torch.bfloat16).requires_grad_() for x in inputs(sum(lengths), dim=64))

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.to(dtype) for x in (q, k, v))
            return packed_attention(q, k, v, segments, causal=causal, implementation=name).cpu()

        return with_gradients(attend, qkv)

    no_further_than_plain_products(run, implementation, torch.bfloat16)


class Kind(NamedTuple):
    """What a batch may have, and the kernel that is for it where all are there."""

    way: str
    segments: Segments
    causal: bool
    size: int
    kv_heads: int = 4  # of 4: not shared
    padding: slice = slice(0, 0)


KINDS = {
    "rows": Kind("cudnn", Segments.of([500, 12, 512], rows=2), True, 128, 2, slice(500, 512)),
    "pictures": Kind("cudnn", Segments.of([512, 512]), False, 80),
    "windows": Kind("short", Segments.of([64] * 16), False, 80),
    "windows of all sizes": Kind("short", Segments.of([64, 3, 0, 49, 16] * 7 + [64, 36]), False, 80),
    "causal windows": Kind("short", Segments.of([64] * 16), True, 64),
    "short pieces, odd heads": Kind("short", Segments.of([32] * 31 + [30, 2]), True, 36),
    "short segments, shared heads": Kind("short", Segments.of([64] * 16), True, 64, 2),
    "several segments": Kind("flash", Segments.of([300, 200, 1, 523]), True, 128, 2),
    "odd heads": Kind("flash", Segments.of([512, 512]), True, 36, 2),
    "one segment": Kind("flash", Segments.of([1024]), False, 80),
    "one video": Kind("cudnn and flash", Segments.of([4096]), False, 128),
    "one video, padded": Kind("cudnn and flash", Segments.of([4104, 56]), False, 128, 4),
    "a prompt": Kind("flash", Segments.of([4096]), True, 128),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_has_its_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, segments, causal, size, kv_heads, _ = KINDS[kind]
    q, k, _ = inputs(sum(segments.lengths), kv_heads=kv_heads, dim=size)
    for module in (fused, first_segment):
        monkeypatch.setattr(module, "supports_here", lambda device, what: True)
    extent = segments.extent.tolist()
    assert fused._select_kernel(q, k, segments.bounds, *extent, causal)[0] == way
    for module in (fused, first_segment):
        monkeypatch.setattr(module, "supports_here", lambda device, what: False)
    assert fused._select_kernel(q, k, segments.bounds, *extent, causal)[0] == "flash"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_fused_equals_eager(kind: str, compiled: bool) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    if not supports(device, "flash_attention"):
        pytest.skip("has no kernels for it")
    _, segments, causal, size, kv_heads, padding = KINDS[kind]
    length = sum(segments.lengths)
    qkv = inputs(length, kv_heads=kv_heads, dim=size)
    narrow = tuple(x.detach().to(device, torch.bfloat16).requires_grad_() for x in qkv)
    read = torch.ones(length, dtype=torch.bool, device=device)
    read[padding] = False

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.to(dtype) for x in (q, k, v))
            return packed_attention(q, k, v, segments.to(device), causal=causal, implementation=name)[read].cpu()

        return with_gradients(torch.compile(attend) if compiled and name == "fused" else attend, narrow)

    no_further_than_plain_products(run, "fused", torch.bfloat16)
