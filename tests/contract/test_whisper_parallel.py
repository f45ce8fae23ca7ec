"""Layouts of Whisper train like one process, and what does not apply to it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_layouts import FSDP, PIPELINE, TENSOR, of_model, train_like_one_process
from whisper_cases import config_of, write_samples, write_tokenizer_files

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.models import resolve
from tessera.models.whisper import SPEC
from tessera.parallel.make_plan import make_plan
from tests.dist.layouts import Case
from tests.errors import raises

CASES = [TENSOR]
MORE = [
    FSDP,
    PIPELINE,
    Case("pp 2, split in the encoder", 2, {"pp": 2, "layers": {"audio": [1, 1], "text": [0, 2]}}),
    Case("pp 2, split behind the encoder", 2, {"pp": 2, "layers": {"audio": [2, 0], "text": [0, 2]}}),
    Case("pp 2, split in the decoder", 2, {"pp": 2, "layers": {"audio": [2, 0], "text": [1, 1]}}),
]


def with_model(cases: list[Case], folder: Path) -> list[Case]:
    _, config = config_of(0, attention="auto")
    write_tokenizer_files(folder / "words", config)
    model: dict[str, Any] = {
        "family": "whisper",
        "config": json.loads(config.model_dump_json()),
        "tokenizer": str(folder / "words"),
    }
    more = {"data.train": str(write_samples(folder / "sounds", 16)), "data.processor": {}, "data.length": 96}
    return [of_model(case, model, **more) for case in cases]


@pytest.mark.slow
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path)


def test_what_does_not_apply_is_refused() -> None:
    _, config = resolve(ModelSection(family="whisper", preset="large-v3"))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    plan = SPEC.main.plan(config)
    assert make_plan(ParallelSection(tp=4), plan, module, 4).layout.tensor is not None
    with raises("layout.attention-not-declared"):
        make_plan(ParallelSection(cp=2), plan, module, 2)
    with raises("layout.sequence-style-missing"):
        make_plan(ParallelSection(tp=2, sequence_parallel=True), plan, module, 2)
    with raises("layout.tp-not-divisor") as caught:
        make_plan(ParallelSection(tp=8), plan, module, 8)  # 20 heads
    assert caught.value.allowed == ["1", "2", "4", "5", "10", "20"]
