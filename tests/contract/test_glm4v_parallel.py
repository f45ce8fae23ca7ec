"""Layouts of GLM-4.1V train like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_words
from family_layouts import (
    BEHIND_ENCODER,
    DISTRIBUTED,
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
from tessera.models.glm4v import SPEC
from tessera.models.glm4v.processor import GLM4V
from tessera.parallel.make_plan import make_plan
from tests.dist.layouts import Case
from tests.errors import raises

WORDS = ("<|endoftext|>", *GLM4V.special, "<|image|>", "<|video|>")  # as the quickstart preset numbers them
MODEL: dict[str, Any] = {
    "family": "glm4v",
    "preset": "quickstart",
    "config": {
        "text": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mrope_section": [0, 1, 1]},
        "vision": {
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "image_size": 20,
        },
    },
}
CASES = [TENSOR]
MORE = [FSDP, DISTRIBUTED, SEQUENCE, PIPELINE, IN_ENCODER, BEHIND_ENCODER, ULYSSES, ULYSSES_SHARED, RING_SHARED]


def with_model(cases: list[Case], folder: Path) -> list[Case]:
    words = write_words(folder / "words", 512, WORDS, TEXTS, end="<|endoftext|>")
    return [of_model(case, {**MODEL, "tokenizer": str(words)}) for case in cases]


@pytest.mark.slow  # Qwen2.5-VL and Qwen3-VL go the same ways in every run
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path)


def test_what_does_not_split_is_told() -> None:
    """Two key-value heads go to two ranks, not to four."""
    _, config = resolve(ModelSection(family="glm4v", preset="9b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    assert make_plan(ParallelSection(tp=2), SPEC.main.plan(config), module, 2).layout.tensor is not None  # type: ignore[arg-type]
    with raises("layout.tp-not-divisor") as caught:
        make_plan(ParallelSection(tp=4), SPEC.main.plan(config), module, 4)  # type: ignore[arg-type]
    assert caught.value.allowed == ["1", "2"]
