"""Layouts of LLaVA train like one process: tiles are dealt and shared, blocks that nobody reads are no one's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_layouts import (
    DISTRIBUTED,
    FSDP,
    PIPELINE,
    TENSOR,
    ULYSSES,
    ULYSSES_SHARED,
    of_model,
    train_like_one_process,
)
from llava_cases import write_words

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.models import resolve
from tessera.models.llava import SPEC
from tessera.parallel.make_plan import make_plan
from tessera.parallel.plan import Workload
from tests.dist.layouts import Case
from tests.errors import raises

_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_TILES = {"pinpoints": [[8 * h, 8 * w] for h in (1, 2) for w in (1, 2, 3)], "most": 2}
# The first reads all blocks of its encoder but not the norm behind them, the second all but one.
MODELS: dict[str, dict[str, Any]] = {
    "onevision": {"preset": "quickstart", "config": {"text": _TEXT, "vision": _VISION, "tiles": _TILES}},
    "1.5": {"preset": "quickstart-1.5", "config": {"text": _TEXT, "vision": _VISION, "image_token_id": 511}},
}
CASES = [("onevision", TENSOR)]
MORE = [
    *(("onevision", case) for case in (FSDP, PIPELINE, ULYSSES, ULYSSES_SHARED, DISTRIBUTED)),
    *(("1.5", case) for case in (FSDP, TENSOR, PIPELINE, ULYSSES)),
]
# The gradient of a key's bias is pure rounding in an encoder without rotary positions, and AdamW divides it by its own
# size.
WEIGHTS_APART = 10.0


def with_model(cases: list[tuple[str, Case]], folder: Path) -> list[Case]:
    """Each with the tokenizer of its kind."""
    plans = []
    for kind, case in cases:
        words = write_words(folder / f"words-{kind}", vicuna=kind == "1.5", vocab=512)
        model = {"family": "llava", **MODELS[kind], "tokenizer": str(words)}
        plans.append(of_model(case, model, "unread" if kind == "1.5" else "", **{"data.processor": {}}))
    return plans


@pytest.mark.slow  # Qwen2.5-VL and Qwen3-VL go the same ways in every run
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path, WEIGHTS_APART)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path, WEIGHTS_APART)


def test_a_pipeline_is_not_split_within_the_encoder() -> None:
    _, config = resolve(ModelSection(family="llava", preset="onevision-7b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    plan = make_plan(ParallelSection(pp=4), SPEC.main.plan(config), module, 4, workload=Workload(rows=4))
    assert plan.layout.pipeline is not None
    section = ParallelSection.model_validate({"pp": 2, "layers": {"vision": [13, 13], "text": [0, 28]}})
    with raises("layout.stage-boundary"):
        make_plan(section, SPEC.main.plan(config), module, 2, workload=Workload(rows=4))


def test_what_nobody_reads_is_frozen_in_every_plan() -> None:
    _, config = resolve(ModelSection(family="llava", preset="1.5-7b"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    plan = make_plan(ParallelSection(), SPEC.main.plan(config), module, 8)
    unread = [name for name in plan.frozen if name.startswith(("vision.blocks.23.", "vision.norm_after."))]
    assert len(unread) == len(plan.frozen) == 14
