"""Noise on embeddings is the same under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.layout_cases import DEEP, SEQUENCE
from tests.dist.layouts import Case, good, measure

NOISE = {"train.task_options": {"neftune_alpha": 5.0}}
CASES = [
    Case("fsdp 2", 2, {}, NOISE),
    Case("tp 2, sequence", 2, SEQUENCE, NOISE),
    Case("cp 2", 2, {"cp": 2}, NOISE),
    Case("1f1b", 2, {"pp": 2}, {**DEEP, **NOISE}),
]


@pytest.mark.slow
def test_noise_on_embeddings_trains_as_in_one_process(tmp_path: Path) -> None:
    results = measure(CASES, tmp_path)
    assert {name: row for name, row in results.items() if not good(row)} == {}
