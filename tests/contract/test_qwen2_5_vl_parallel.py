"""Layouts of Qwen2.5-VL train like one process: windows are dealt, shared and cut with the frames they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_layouts import (
    DISTRIBUTED,
    FSDP,
    IN_ENCODER,
    PIPELINE,
    RING_SHARED,
    TENSOR,
    ULYSSES,
    ULYSSES_SHARED,
    of_model,
    train_like_one_process,
)
from parity import relative
from qwen2_5_vl_cases import Qwen25VL

from tessera.config.run_config import ModelSection, ParallelSection
from tessera.models import resolve
from tessera.models.qwen2_5_vl import SPEC
from tessera.parallel.make_plan import make_plan
from tessera.parallel.sequence_sharding import BatchSharding, EncoderSharding, SequenceSharding, shard_batch
from tests.dist.layouts import Case
from tests.errors import raises

# Pictures of the set have up to 4 x 4 tokens: windows of 2 x 2 cut them, also at the edges.
MODEL: dict[str, Any] = {
    "family": "qwen2_5_vl",
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
    },
}
CASES = [TENSOR]
MORE = [FSDP, DISTRIBUTED, PIPELINE, IN_ENCODER, ULYSSES, ULYSSES_SHARED, RING_SHARED]


def with_model(cases: list[Case], folder: Path) -> list[Case]:
    return [of_model(case, {**MODEL, "tokenizer": str(folder / "data" / "tokenizer")}) for case in cases]


@pytest.mark.slow  # Qwen2.5-Omni has the same vision encoder and decoder in `make test`
def test_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(CASES, tmp_path), tmp_path)


@pytest.mark.slow
def test_more_layouts_train_like_one_process(tmp_path: Path) -> None:
    train_like_one_process(with_model(MORE, tmp_path), tmp_path)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_windows_are_dealt_with_their_frames(ranks: int) -> None:
    """The features of all hands together are those of the whole; of nine ranks some have nothing to look at."""
    family = Qwen25VL()
    pair = family.pair(0, 0)
    model = pair.model
    batch = family.pack(pair.config, family.cases(pair, 0, ["several", "text", "mixed"], 0), 4)
    whole = model.vision(batch)
    streams = SPEC.main.plan(pair.config).streams
    encoder = EncoderSharding("vision", streams["vision"], ranks)
    plan = BatchSharding(streams["text"], SequenceSharding(1, 1), (encoder,))
    hands = [shard_batch(batch, plan, 0, {"vision": hand}) for hand in range(ranks)]
    places = hands[0][encoder.dp_key]
    counts = hands[0].segments[encoder.dp_key].lengths
    assert sum(counts) == len(whole)
    longest = max(counts)
    gathered = torch.zeros(ranks * longest, whole.shape[1])
    for number, (hand, count) in enumerate(zip(hands, counts, strict=True)):
        assert ("pixels" in hand) == ("vision.windows" in hand.segments) == (count > 0)
        if count:
            assert hand.segments["vision.windows"].bounds[-1] == len(hand["pixels"]) == count
            gathered[number * longest : number * longest + count] = model.vision(hand)
    assert relative(gathered[places], whole) < family.tolerance
    assert torch.equal(hands[0]["media_slots"][hands[0]["media_slots.sources"].argsort()], batch["media_slots"])


@pytest.mark.parametrize(
    ("preset", "changes", "tp", "error"),
    [
        ("7b", {}, 8, "layout.tp-not-divisor 28"),
        pytest.param(
            *("72b", {"vision.intermediate_size": 3420}, 8, "layout.tp-not-divisor 3420 vision.blocks.0.mlp"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_split_is_told(preset: str, changes: dict[str, Any], tp: int, error: str) -> None:
    _, config = resolve(ModelSection(family="qwen2_5_vl", preset=preset, config=changes))
    with torch.device("meta"):
        module = SPEC.main.build(config)
    with raises(error):
        make_plan(ParallelSection(tp=tp), SPEC.main.plan(config), module, tp)
    # An encoder that is not split distributes its images instead: then it has nothing to divide.
    if preset == "72b":
        section = ParallelSection.model_validate({"tp": tp, "encoders": {"vision": {"tp": 1}}})
        assert make_plan(section, SPEC.main.plan(config), module, tp).layout.tensor is not None
