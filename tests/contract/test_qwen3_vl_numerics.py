"""Qwen3-VL's features of every depth and its positions; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import relative
from qwen3_vl_cases import Qwen3VL
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tessera.models.qwen3_vl.model import bilinear_positions
from tessera.models.vision.patches import block_positions


def test_features_of_every_depth_reach_the_words() -> None:
    """What a tap gives matters, and so does the layer after which it is added."""
    family = Qwen3VL()
    pair = family.pair(1, 2)
    model, batch = pair.model, family.pack(pair.config, family.cases(pair, 1, ["one"], 2))
    before = model(batch, logits=True)["logits"]
    for tap in (0, 1, 2):
        merger: Any = model.projector.taps[tap]
        with torch.no_grad():
            merger.down.bias.add_(1.0)
            assert relative(model(batch, logits=True)["logits"], before) > 1e-3
            merger.down.bias.sub_(1.0)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (3, 10, 2), (1, 48, 48), (1, 50, 70), (2, 2, 94)])
def test_entries_between_which_patches_lie(grid: tuple[int, int, int]) -> None:
    t, h, w = grid
    index, weights = bilinear_positions(block_positions(h, w, 2), h, w, 48)
    expected = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), 48, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(torch.from_numpy(index).repeat(t, 1), expected[0])
    assert torch.equal(torch.from_numpy(weights).repeat(t, 1), expected[1])
