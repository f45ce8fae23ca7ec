"""Decoding on an accelerator: kernels against eager operations, captured calls against plain ones, and an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheRow, CacheStep
from tessera.engine.engine import Engine
from tessera.engine.graphs import DecodeGraphs
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.inference.loaded import LoadedModel
from tessera.models import FAMILIES
from tessera.nn.decoder import TextDecoder
from tessera.ops.cached_attention import cached_attention
from tests.close import assert_as_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "vocab_size": 1000}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


def rows_of(lengths: list[int], block_size: int) -> tuple[list[CacheRow], int]:
    """Return rows with one new token each, whose blocks are out of order; and the number of blocks."""
    counts = [-(-length // block_size) for length in lengths]
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    rows = []
    for length, count in zip(lengths, counts, strict=True):
        rows.append(CacheRow(free[:count], length - 1, 1))
        free = free[count:]
    return rows, sum(counts) + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "block_size"), [(128, 16, 2, 16), (80, 7, 1, 32), (64, 4, 4, 200)]
)
def test_paged_attention_is_that_of_rows_one_by_one(
    dtype: torch.dtype, size: int, heads: int, kv_heads: int, block_size: int
) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    rows, blocks = rows_of([1, 16, 17, 511, 512, 513, 9000], block_size)
    keys, values = torch.randn(2, blocks, block_size, kv_heads, size, device=device).to(dtype)
    q = torch.randn(len(rows), heads, size, device=device).to(dtype)
    step = CacheStep.of(rows, block_size, device)
    ours = cached_attention(q, keys, values, step, implementation="triton")
    peer = cached_attention(q, keys, values, step, implementation="eager")
    exact = cached_attention(q.double(), keys.double(), values.double(), step, implementation="eager")
    assert_as_close(ours, peer, exact)
    for number in (0, 3, 6):  # a row is the same in any company
        alone = CacheStep.of(rows[number : number + 1], block_size, device)
        assert torch.equal(cached_attention(q[number : number + 1], keys, values, alone)[0], ours[number])


def model_of(dtype: torch.dtype, family: str = "qwen3") -> tuple[Any, Any, Any]:
    spec = FAMILIES.get(family)
    config = spec.config.model_validate({**spec.presets["quickstart"], "text": {**text_of(spec), **SHAPE, **HEADS}})
    model: Any = spec.main.build(config).eval().requires_grad_(False)
    chance = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, chance)
        if not path.endswith("norm.weight"):  # logits that tell tokens apart
            parameter.data.mul_(2)
    return model.to(torch.accelerator.current_accelerator(), dtype), spec, config


def text_of(spec: Any) -> dict[str, Any]:
    return dict(spec.presets["quickstart"].get("text", {}))


@torch.no_grad()
def decoded(model: Any, dtype: torch.dtype, graphs: bool, count: int) -> Tensor:
    """Return the logits of four decode calls after a prompt of 40 tokens in each row."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    model = model.to(dtype)
    if graphs:
        for module in model.modules():
            if isinstance(module, TextDecoder):
                module.join_projections()
    cache = model.new_cache(4 * count + 1, 16)
    captured = DecodeGraphs(model, cache, 0, device)
    captured.usable = graphs
    blocks = [list(range(4 * row + 1, 4 * row + 5)) for row in range(count)]
    prompts = CacheStep.of([CacheRow(each, 0, 40) for each in blocks], 16, device)
    tokens = (torch.arange(40 * count, device=device) * 7) % 900
    positions = torch.arange(40, device=device).repeat(count)
    model(Batch({"tokens": tokens, "positions": positions}), logits="last", cache=cache, step=prompts)
    logits = []
    for start in range(40, 44):
        rows = [CacheRow(each, start, 1) for each in blocks]
        new = torch.arange(count, device=device) * 3 + start
        logits.append(captured.run(new, torch.full((count,), start, device=device), rows).clone())
    assert not graphs or captured.usable, "the calls were captured"
    assert len(captured._captured) == graphs
    return torch.stack(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5])
def test_captured_calls_with_fused_layers_give_the_logits_of_plain_ones(dtype: torch.dtype, count: int) -> None:
    model, _, _ = model_of(dtype)
    peer = decoded(model, dtype, False, count)  # weights that are not joined run as modules
    ours = decoded(model, dtype, True, count)
    assert_as_close(ours, peer, decoded(model, torch.float64, False, count))


def test_an_engine_with_graphs_answers_as_one_without() -> None:
    """In float32, where the likeliest token has a margin over rounding."""
    model, spec, config = model_of(torch.float32)
    loaded = LoadedModel(model, spec, config, None)
    requests = [
        Request(prompt_of(length), max_new_tokens=new)
        for length, new in ((5, 20), (70, 9), (33, 30), (17, 1), (600, 12))
    ]
    answers = []
    for graphs in (True, False):
        engine = Engine(loaded, EngineLimits(blocks=200, rows=4, tokens=256))
        if not graphs:
            engine._runner._graphs = None
        answers.append([answer.tokens for answer in engine.run(requests)])
        if graphs:
            assert engine._runner._graphs is not None
            assert engine._runner._graphs.usable
            assert engine._runner._graphs._captured
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [request.max_new_tokens for request in requests]


def prompt_of(length: int) -> Batch:
    tokens = torch.randint(0, 900, (length,), generator=torch.Generator().manual_seed(length))
    return Batch({"tokens": tokens, "positions": torch.arange(length)}, {"text": Segments.of([length])})
