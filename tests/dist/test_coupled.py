"""Every pair of features that the validator accepts trains like one process: the "yes" in reference/layouts.md."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.coupling import FEATURES, Feature, combines, refusal
from tests.dist.layouts import Case, good, measure
from tests.toys.chat_set import MODEL

MOST_RANKS = 8
TEXT = {**MODEL["text"], "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
PICTURES: dict[str, Any] = {
    "model.config": {**MODEL, "text": TEXT, "tie_word_embeddings": False},
    "train.global_batch": 8,
}
EXPERTS: dict[str, Any] = {"model.config": {"layers": 4, "balance": 0.0}}  # pipelines refuse the balance loss


def case_of(feature: Feature, other: Feature) -> Case:
    parallel = {**feature.parallel, **other.parallel}
    together = prod(parallel.get(degree, 1) for degree in ("tp", "pp", "cp"))
    copies = 2 if parallel.get("shard") == 2 else 1
    world = min(MOST_RANKS, together * 2 * copies)
    with_experts = feature.needs_experts or other.needs_experts
    frozen = {"model.freeze": ["vision"]} if feature.model or other.model else {}
    model = {**(EXPERTS if with_experts else PICTURES), **frozen}
    return Case(f"{other.name} x {feature.name}", world, parallel, model, "experts" if with_experts else "chat")


def cases() -> list[Case]:
    pairs = [(one, other) for number, one in enumerate(FEATURES) for other in FEATURES[:number]]
    return [case_of(*pair) for pair in pairs if combines(*pair) and refusal(*pair) is None]


@pytest.mark.slow
def test_every_pair_that_is_accepted_trains_like_one_process(tmp_path: Path) -> None:
    results = measure(cases(), tmp_path)
    assert len(results) > 100
    assert {name: row for name, row in results.items() if not good(row)} == {}
