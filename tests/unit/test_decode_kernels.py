"""Kernels of decoding, in Triton's interpreter: against the eager operations, and both against float64.

Triton reads TRITON_INTERPRET when it is imported: `TRITON_INTERPRET=1 pytest tests/unit/test_decode_kernels.py`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.cache import CacheRow, CacheStep
from tessera.nn.cache import KVCache
from tessera.nn.decoder import DecoderShape, TextDecoder
from tessera.nn.moe import MoE, MoEShape
from tessera.ops.cached_attention import cached_attention
from tessera.ops.decode_layers import adjacent, decode_layers, join
from tessera.ops.pointwise import Rope
from tests.close import assert_as_close


@pytest.fixture
def interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1; tests/gpu compiles the kernels")
    pytest.importorskip("triton")


def rows_of(lengths: list[int], block_size: int) -> list[CacheRow]:
    """Return rows with one new token each, whose blocks are out of order."""
    rows, free = [], torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    for length in lengths:
        count = -(-length // block_size)
        rows.append(CacheRow(free[:count], length - 1, 1))
        free = free[count:]
    return rows


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "block_size", "part", "most"),
    [(64, 4, 2, 16, 64, 2), (80, 7, 1, 16, 64, 64), (128, 2, 2, 32, 512, 64), (24, 20, 1, 170, 16, 4)],
)
def test_paged_attention_is_that_of_rows_one_by_one(
    size: int, heads: int, kv_heads: int, block_size: int, part: int, most: int
) -> None:
    from tessera.ops.paged_attention import LAUNCH, paged_attention

    launch = LAUNCH._replace(part=part, most=most)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 50, block_size, kv_heads, size)
    step = CacheStep.of(rows_of([1, 5, 64, 65, 170], block_size), block_size, "cpu", width=13)
    q = torch.randn(5, heads, size)
    ours = paged_attention(q, keys, values, step.table, step.lengths, step.longest, size**-0.5, launch)
    peer = cached_attention(q, keys, values, step, implementation="eager")
    exact = cached_attention(q.double(), keys.double(), values.double(), step, implementation="eager")
    assert_as_close(ours, peer, exact)
    longer = paged_attention(q, keys, values, step.table, step.lengths, 4000, size**-0.5, launch)
    assert torch.equal(longer, ours)  # a row does not depend on how long others may be


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["biases", "norms", "experts"])
def test_fused_layers_are_the_layers(kind: str, count: int) -> None:
    """Partial rotation, sizes that are no powers of two; with a row alone, other kernels run."""
    shape: dict[str, Any] = {"qkv_bias": kind == "biases", "qk_norm": kind != "biases"}
    moe = MoEShape(48, 32, 4, 2)
    decoder: Any = TextDecoder(
        DecoderShape(50, 48, 72, 2, 4, 2, 24, 1e-6, Rope(24 if kind == "norms" else 16, 1e4), **shape),
        lambda layer: MoE(moe) if kind == "experts" and layer else None,
    )
    torch.manual_seed(0)
    for parameter in decoder.requires_grad_(False).parameters():
        parameter.normal_(0, 0.2)
    results = {name: decode(decoder, count, name) for name in ("plain", "fused", "exact")}
    for fused, plain, exact in zip(*(results[name] for name in ("fused", "plain", "exact")), strict=True):
        assert_as_close(fused, plain, exact)


@torch.no_grad()
def decode(decoder: Any, count: int, name: str) -> list[Tensor]:
    """Return the hidden states of a token after nine others in each row, and the contents of the cache."""
    decoder.to(torch.float64 if name == "exact" else torch.float32)
    dtype, shape, cache = decoder.norm.weight.dtype, decoder.shape, KVCache(3 * count, 4)
    chance = torch.Generator().manual_seed(1)
    blocks = [[3 * row + 2, 3 * row, 3 * row + 1] for row in range(count)]
    step = CacheStep.of([CacheRow(each, 0, 9) for each in blocks], 4, "cpu")
    x = torch.randn(10 * count, shape.hidden, generator=chance).to(dtype)
    decoder(x[count:], torch.arange(9).repeat(count), step.segments, cache=cache, step=step)
    step = CacheStep.of([CacheRow(each, 9, 1) for each in blocks], 4, "cpu")
    positions = torch.full((count,), 9)
    if name == "fused":
        decoder.join_projections()
        weights = [weights for layer in decoder.layers if (weights := layer.decode_weights()) is not None]
        assert len(weights) == shape.layers
        norm, angles = (decoder.norm.weight, decoder.norm.eps), shape.rope.angles(positions)
        out = decode_layers(weights, norm, x[:count], angles, lambda layer: cache.layers[layer], step)
    else:
        out = decoder(x[:count], positions, step.segments, cache=cache, step=step)
    return [out, *(memory for pair in cache.layers.values() for memory in pair)]


def test_joined_weights_keep_names_and_values_and_trained_ones_stay() -> None:
    decoder: Any = TextDecoder(DecoderShape(9, 8, 12, 1, 2, 1, 4, 1e-6, Rope(4, 1e4), qkv_bias=True))
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    decoder.join_projections()
    assert decoder.layers[0].decode_weights() is None  # trained: an optimizer may hold addresses
    decoder.requires_grad_(False).join_projections()
    weights = decoder.layers[0].decode_weights()
    assert weights is not None
    assert torch.equal(weights.qkv, torch.cat([before[f"layers.0.attn.{name}.weight"] for name in "qkv"]))
    after = decoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        decoder.layers[0].attn.k.weight.fill_(3.0)  # replaced in place
    assert bool((weights.qkv[8:12] == 3).all())


def test_only_adjacent_tensors_are_adjacent() -> None:
    a, b = torch.randn(2, 3, 4)
    assert adjacent([a, b]) is not None
    assert adjacent([b, a]) is None
    assert adjacent([a, b.clone()]) is None
    join([b, a])
    joined = adjacent([b, a])
    assert joined is not None
    assert torch.equal(joined, torch.cat([b, a]))
