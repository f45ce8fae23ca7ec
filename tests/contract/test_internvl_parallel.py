"""Layouts of InternVL train like one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection, ParallelSection
from tessera.data.tokenizer import train_tokenizer
from tessera.models import resolve
from tessera.models.internvl import SPEC
from tessera.parallel.plan import make_plan
from tests.dist.layouts import Case, good, measure

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
QWEN3 = {"attention_bias": False, "qk_norm": True, "head_dim": 8, "experts": EXPERTS}
SPARSE = {**TINY, "text": {**TINY["text"], **QWEN3}}
ODD = {**TINY, "text": {**TINY["text"], "vocab_size": 515}, "tie_word_embeddings": False}
DEALT = {"tp": 2, "towers": {"vision": {"tp": 1}}}
SHARED = {"cp": 2, "towers": {"vision": {"cp": 2}}}
CASES = [
    (Case("fsdp 2", 2), TINY),
    (Case("tp 2", 2, {"tp": 2}), TINY),
]
MORE = [
    (Case("tp 2, queries normalised over all heads", 2, {"tp": 2}), SIX_B),
    (Case("tp 2, words that do not split", 2, {"tp": 2}), ODD),
    (Case("tp 2, sequence parallel, words that do not split", 2, {"tp": 2, "sequence_parallel": True}), ODD),
    (Case("tp 2, whole tower, tiles dealt", 2, DEALT), TINY),
    (Case("tp 2, sequence parallel", 2, {"tp": 2, "sequence_parallel": True}), TINY),
    (Case("pp 2", 2, {"pp": 2}), TINY),
    (Case("pp 2, cut in the tower", 2, {"pp": 2, "layers": {"vision": [1, 1], "text": [0, 2]}}), TINY),
    (Case("pp 2, cut behind the tower", 2, {"pp": 2, "layers": {"vision": [2, 0], "text": [0, 2]}}), TINY),
    (Case("ulysses 2", 2, {"cp": 2}), TINY),
    (Case("ulysses 2, patches shared", 2, SHARED), TINY),
    (Case("ulysses 2, patches shared, queries normalised", 2, SHARED), SIX_B),
    (Case("ring 2, patches shared", 2, {**SHARED, "ulysses": 1}), TINY),
    (Case("experts, ep 2", 2, {"ep": 2}), SPARSE),
]


def measured(cases: list[tuple[Case, dict[str, Any]]], folder: Path) -> dict[str, dict[str, float]]:
    words = folder / "words"
    words.mkdir()
    train_tokenizer(["red blue tall small old Say"], 512, WORDS).save(str(words / "tokenizer.json"))
    fixed = {"family": "internvl", "preset": "quickstart", "tokenizer": str(words)}
    processor = {"max_tiles": 3}
    return measure(
        [
            replace(case, model={"model": {**fixed, "config": config}, "data.processor": processor})
            for case, config in cases
        ],
        folder,
    )


def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    found = measured(CASES, tmp_path)
    assert [name for name, row in found.items() if not good(row)] == [], found


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    found = measured(MORE, tmp_path)
    assert [name for name, row in found.items() if not good(row)] == [], found


def test_what_does_not_split_is_told() -> None:
    """25 heads whose queries are normalised together stay whole on each rank, and the rest of the tower is split."""
    _, config = resolve(ModelSection(family="internvl", preset="3-78b"))
    with torch.device("meta"):
        module = SPEC.build(config)
    made = make_plan(ParallelSection(tp=8), SPEC.plan(config), module, 8)  # type: ignore[arg-type]
    assert made.tensor is not None
    assert "vision.blocks.0.attn.qkv" not in made.tensor.layers
    assert made.tensor.layers["vision.blocks.0.mlp.up"] == "column"
    _, config = resolve(ModelSection(family="internvl", preset="3-1b"))
    with torch.device("meta"):
        module = SPEC.build(config)
    with pytest.raises(TesseraError, match="does not divide the 14 heads of text"):
        make_plan(ParallelSection(tp=4), SPEC.plan(config), module, 4)  # type: ignore[arg-type]
