"""Layouts of Qwen2.5-Omni train like one process: two encoders of different widths, and micro-batches without input for
one of them, or for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_layouts import TENSOR, train_like_one_process
from omni_layouts import APART, MORE, train_on_one_kind_at_a_time, with_model

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.models import resolve
from tessera.models.qwen2_5_omni import SPEC
from tessera.models.qwen2_5_omni.processor import OMNI
from tessera.parallel.make_plan import make_plan
from tests.dist.layouts import Case
from tests.errors import raises

# As the quickstart preset numbers them.
MODEL: dict[str, Any] = {
    "family": "qwen2_5_omni",
    "preset": "quickstart",
    "config": {
        "text": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mrope_section": [1, 1, 2]},
        "vision": {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "audio": {
            "num_mel_bins": 8,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 36,
            "d_model": 20,
            "n_window": 10,
        },
    },
}
CASES = [TENSOR]


def cases_of(cases: list[Case], folder: Path) -> list[Case]:
    return with_model(cases, folder, MODEL, OMNI.special_words())


def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(cases_of(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(cases_of(MORE, tmp_path), tmp_path)


def test_heads_that_do_not_split_are_told() -> None:
    _, config = resolve(ModelSection(family="qwen2_5_omni", preset="7b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    with raises("layout.tp-not-divisor 20 audio.blocks"):
        make_plan(ParallelSection(tp=8), SPEC.main.plan(config), module, 8)


@pytest.mark.slow
def test_micro_batches_of_one_kind_train_like_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_on_one_kind_at_a_time(cases_of(APART, tmp_path), tmp_path, monkeypatch)
