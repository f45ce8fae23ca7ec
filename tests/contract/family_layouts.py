"""Layouts in which tiny vision-language models train like one process. Their encoders and decoders have two layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.dist.layouts import Case, good, measure

_SHARED = {"encoders": {"vision": {"cp": 2}}}
FSDP = Case("fsdp 2", 2)
TENSOR = Case("tp 2", 2, {"tp": 2})
DISTRIBUTED = Case("tp 2, whole encoder, images distributed", 2, {"tp": 2, "encoders": {"vision": {"tp": 1}}})
SEQUENCE = Case("tp 2, sequence parallel", 2, {"tp": 2, "sequence_parallel": True})
PIPELINE = Case("pp 2", 2, {"pp": 2})
IN_ENCODER = Case("pp 2, split in the encoder", 2, {"pp": 2, "layers": {"vision": [1, 1], "text": [0, 2]}})
BEHIND_ENCODER = Case("pp 2, split behind the encoder", 2, {"pp": 2, "layers": {"vision": [2, 0], "text": [0, 2]}})
ULYSSES = Case("ulysses 2", 2, {"cp": 2})
ULYSSES_SHARED = Case("ulysses 2, patches shared", 2, {"cp": 2, **_SHARED})
RING_SHARED = Case("ring 2, patches shared", 2, {"cp": 2, "ulysses": 1, **_SHARED})
EXPERTS = Case("experts, ep 2", 2, {"ep": 2})
TEXTS = ["red blue tall small old Say"]  # what the tokenizers of these models learn


def of_model(case: Case, model: dict[str, Any], note: str = "", **more: Any) -> Case:
    """The case with a family's model in it. `note`: what tells it from others of the same layout."""
    name = f"{case.name}, {note}" if note else case.name
    return replace(case, name=name, model={"model": model, **more})


def train_like_one_process(cases: Iterable[Case], folder: Path, weights_apart: float = 1.0) -> None:
    """`weights_apart`: so much further than all else may weights be from those of one process."""
    measured = measure(list(cases), folder)
    rows = {name: {**row, "weight": row["weight"] / weights_apart} for name, row in measured.items()}
    assert [name for name, row in rows.items() if not good(row)] == [], measured
