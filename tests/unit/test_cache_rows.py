"""Rows that join and leave a KV cache in random order give the tokens that each gives alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.spec import ModelSpec
from tessera.models import FAMILIES
from tessera.nn.multimodal import MultimodalModel
from tests.errors import raises
from tests.toys import joining_rows, moe_decoder, two_encoders
from tests.toys.engine_models import new_tokens
from tests.toys.joining_rows import Request

MODELS = {
    "text with experts": (moe_decoder.SPEC, moe_decoder.MoEDecoderConfig(balance=0.0)),
    "images and audio": (two_encoders.SPEC, two_encoders.TwoEncoderConfig()),
    "images with DeepStack": (FAMILIES.get("qwen3_vl"), None),
}
PAGED, SLOTTED = 4, 80  # tokens of a block


@functools.cache
def model_of(name: str) -> tuple[ModelSpec, Any, Any]:
    spec, config = MODELS[name]
    if config is None:
        config = spec.config.model_validate(spec.presets["quickstart"])
    model: Any = spec.main.build(config).eval()
    chance = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        model.initialize(path, parameter.data, chance)
        if not path.endswith("norm.weight"):  # logits that tell tokens apart
            parameter.data.mul_(2)
    return spec, config, model


def request(spec: ModelSpec, config: Any, length: int, seed: int, new_tokens: int) -> Request:
    """Return the family's example with random tokens and media; every third one is text alone."""
    assert spec.example is not None
    chance = torch.Generator().manual_seed(seed)
    batch = spec.example(config, length)
    tensors = {name: batch[name] for name in ("tokens", "positions")}
    if seed % 3:
        tensors = {name: value for name, value in batch.tensors.items() if name != "labels"}
    for name, value in tensors.items():
        if value.is_floating_point():
            tensors[name] = torch.randn(value.shape, generator=chance)
        elif value.dtype == torch.uint8:
            tensors[name] = torch.randint(0, 256, value.shape, generator=chance, dtype=torch.uint8)
    tensors["tokens"] = torch.randint(0, 60, (length,), generator=chance)
    return Request(Batch(tensors, batch.segments if seed % 3 else {"text": Segments.of([length])}), new_tokens)


@functools.cache
@torch.no_grad()
def alone(name: str, seed: int) -> list[tuple[Request, list[int]]]:
    """Return requests, and the tokens that each gives alone."""
    spec, config, model = model_of(name)
    chance, pairs = Random(seed), []
    for number in range(6):
        each = request(spec, config, 4 * chance.randint(3, 9), 10 * seed + number, chance.randint(1, 7))
        (tokens,) = new_tokens(model, each.prompt, each.new_tokens)
        if isinstance(model, MultimodalModel):
            each.encoded = model.encode(each.prompt)
        pairs.append((each, tokens))
    assert len({tuple(tokens[:3]) for _, tokens in pairs}) > 3, "the prompts matter"
    return pairs


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        pytest.param(name, size, id=f"{name}-{kind}", marks=[pytest.mark.slow] if slow else [])
        for name in MODELS
        for kind, size in (("paged", PAGED), ("slotted", SLOTTED))
        for slow in [name != "images and audio"]
    ],
)
@torch.no_grad()
def test_rows_that_join_and_leave_give_the_tokens_that_each_gives_alone(name: str, block_size: int) -> None:
    model = model_of(name)[2]
    for seed in range(3):
        pairs = alone(name, seed)
        requests = [replace(each, tokens=[], blocks=[], cached=0) for each, _ in pairs]
        rows = 3
        blocks = rows if block_size == SLOTTED else 20  # fewer than all rows need at once
        calls = joining_rows.generate(model, requests, seed, blocks, block_size, rows)
        assert calls > max(each.new_tokens for each in requests)
        assert [each.tokens for each in requests] == [tokens for _, tokens in pairs], seed


def test_a_step_names_the_tokens_to_sample_and_where_new_ones_are_stored() -> None:
    rows = [CacheRow([5], 3, 1), CacheRow([2, 0, 7], 2, 7, sampled=False), CacheRow([1, 3], 4, 2)]
    step = CacheStep.of(rows, 4, "cpu", width=4)
    assert step.single == 1
    assert not step.prefill
    assert step.longest == 9
    assert step.lengths.tolist() == [4, 9, 6]
    assert step.table.tolist() == [[5, 0, 0, 0], [2, 0, 7, 0], [1, 3, 0, 0]]
    assert step.slots.tolist() == [23, 10, 11, 0, 1, 2, 3, 28, 12, 13]
    assert step.last.tolist() == [0, 9]
    assert step.segments.bounds.tolist() == [0, 1, 8, 10]
    assert CacheStep.of([CacheRow([1], 0, 4), CacheRow([0], 0, 1)], 4, "cpu").prefill


def test_a_row_longer_than_its_blocks_is_an_error() -> None:
    with raises("generation.cache-full"):
        CacheStep.of([CacheRow([0, 1], 5, 4)], 4, "cpu")
