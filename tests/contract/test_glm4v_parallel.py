"""Layouts of GLM-4.1V train like one process."""

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
from tessera.models._chat.templates import GLM4V
from tessera.models.glm4v import SPEC
from tessera.parallel.plan import make_plan
from tests.dist.layouts import Case, good, measure

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
SHARED = {"towers": {"vision": {"cp": 2}}}
CASES = [
    Case("fsdp 2", 2),
    Case("tp 2", 2, {"tp": 2}),
]
MORE = [
    Case("tp 2, whole tower, pictures dealt", 2, {"tp": 2, "towers": {"vision": {"tp": 1}}}),
    Case("tp 2, sequence parallel", 2, {"tp": 2, "sequence_parallel": True}),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, cut in the tower", 2, {"pp": 2, "layers": {"vision": [1, 1], "text": [0, 2]}}),
    Case("pp 2, cut behind the tower", 2, {"pp": 2, "layers": {"vision": [2, 0], "text": [0, 2]}}),
    Case("ulysses 2", 2, {"cp": 2}),
    Case("ulysses 2, patches shared", 2, {"cp": 2, **SHARED}),
    Case("ring 2, patches shared", 2, {"cp": 2, "ulysses": 1, **SHARED}),
]


def measured(cases: list[Case], folder: Path) -> dict[str, dict[str, float]]:
    words = folder / "words"
    words.mkdir()
    train_tokenizer(["red blue tall small old Say"], 512, WORDS).save(str(words / "tokenizer.json"))
    model = {**MODEL, "tokenizer": str(words)}
    return measure([replace(case, model={"model": model}) for case in cases], folder)


def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    found = measured(CASES, tmp_path)
    assert [name for name, row in found.items() if not good(row)] == [], found


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    found = measured(MORE, tmp_path)
    assert [name for name, row in found.items() if not good(row)] == [], found


def test_what_does_not_split_is_told() -> None:
    """Two key-value heads go to two ranks, not to four."""
    _, config = resolve(ModelSection(family="glm4v", preset="9b"))
    with torch.device("meta"):
        module = SPEC.build(config)
    assert make_plan(ParallelSection(tp=2), SPEC.plan(config), module, 2).tensor is not None  # type: ignore[arg-type]
    with pytest.raises(TesseraError, match="does not divide the 2 heads of text") as caught:
        make_plan(ParallelSection(tp=4), SPEC.plan(config), module, 4)  # type: ignore[arg-type]
    assert caught.value.allowed == ["1", "2"]
