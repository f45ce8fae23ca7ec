"""Layouts of InternVL train like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_words
from family_layouts import (
    BEHIND_ENCODER,
    DISTRIBUTED,
    EXPERTS,
    FSDP,
    IN_ENCODER,
    PIPELINE,
    RING_SHARED,
    SEQUENCE,
    TENSOR,
    TEXTS,
    ULYSSES,
    ULYSSES_SHARED,
    of_model,
    train_like_one_process,
)

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.models import resolve
from tessera.models.internvl import SPEC
from tessera.parallel.make_plan import make_plan
from tests.dist.layouts import Case
from tests.errors import raises

WORDS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
)  # as quickstart's
TINY: dict[str, Any] = {
    "text": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "vision": {
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
}
SIX_B = {**TINY, "vision": {**TINY["vision"], "use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}}
FOUR = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}
QWEN3 = {"attention_bias": False, "qk_norm": True, "head_dim": 8, "experts": FOUR}
SPARSE = {**TINY, "text": {**TINY["text"], **QWEN3}}
ODD = {**TINY, "text": {**TINY["text"], "vocab_size": 515}, "tie_word_embeddings": False}
CASES = [(TENSOR, TINY, "")]
PLAIN = (FSDP, DISTRIBUTED, SEQUENCE, PIPELINE, IN_ENCODER, BEHIND_ENCODER, ULYSSES, ULYSSES_SHARED, RING_SHARED)
MORE = [
    (TENSOR, SIX_B, "queries normalised over all heads"),
    (TENSOR, ODD, "words that do not split"),
    (SEQUENCE, ODD, "words that do not split"),
    *((case, TINY, "") for case in PLAIN),
    (ULYSSES_SHARED, SIX_B, "queries normalised"),
    (EXPERTS, SPARSE, ""),
]


def with_model(cases: list[tuple[Case, dict[str, Any], str]], folder: Path) -> list[Case]:
    words = write_words(folder / "words", 512, WORDS, TEXTS)
    fixed = {"family": "internvl", "preset": "quickstart", "tokenizer": str(words)}
    tiles = {"data.processor": {"max_tiles": 3}}
    return [of_model(case, {**fixed, "config": config}, note, **tiles) for case, config, note in cases]


@pytest.mark.slow  # Qwen2.5-VL and Qwen3-VL go the same ways in every run
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path)


@pytest.mark.slow  # Qwen2.5-VL is told the same
def test_what_does_not_split_is_told() -> None:
    """25 heads whose queries are normalised together stay whole on each rank, and the rest of the encoder is split."""
    _, config = resolve(ModelSection(family="internvl", preset="3-78b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    plan = make_plan(ParallelSection(tp=8), SPEC.main.plan(config), module, 8)  # type: ignore[arg-type]
    assert plan.layout.tensor is not None
    assert "vision.blocks.0.attn.qkv" not in plan.layout.tensor.layers
    assert plan.layout.tensor.layers["vision.blocks.0.mlp.up"] == "column"
    _, config = resolve(ModelSection(family="internvl", preset="3-1b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    with raises("layout.tp-not-divisor", "14"):
        make_plan(ParallelSection(tp=4), SPEC.main.plan(config), module, 4)  # type: ignore[arg-type]
