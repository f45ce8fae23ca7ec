"""Layouts of Qwen3-Omni train like one process: two encoders of different widths, features of images for later layers
of a decoder with experts, and micro-batches without input for one of the encoders, or for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_layouts import TENSOR, train_like_one_process
from omni_layouts import APART, MORE, train_on_one_kind_at_a_time, with_model

from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tests.dist.layouts import Case

# As the quickstart preset numbers them.
MODEL: dict[str, Any] = {
    "family": "qwen3_omni",
    "preset": "quickstart",
    "freeze": ["audio.blocks.{*}.attn.k.bias"],  # its gradient is zero but for rounding
    "config": {
        "text": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "mrope_section": [2, 1, 1],
            "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
        "vision": {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0],
        },
        "audio": {
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 36,
            "d_model": 20,
            "downsample_hidden_size": 4,
            "n_window_infer": 100,
        },
    },
}
CASES = [TENSOR]


def cases_of(cases: list[Case], folder: Path) -> list[Case]:
    return with_model(cases, folder, MODEL, QWEN3_OMNI.special_words())


@pytest.mark.slow  # Qwen2.5-Omni has the same encoder in `make test`
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(cases_of(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(cases_of([Case("ep 2", 2, {"ep": 2}), *MORE], tmp_path), tmp_path)


@pytest.mark.slow
def test_micro_batches_of_one_kind_train_like_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on_one_kind_at_a_time(cases_of(APART, tmp_path), tmp_path, monkeypatch)
