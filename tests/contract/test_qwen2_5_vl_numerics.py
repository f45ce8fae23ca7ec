"""Windows of Qwen2.5-VL; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import relative
from qwen2_5_vl_cases import Qwen25VL
from transformers.vision_utils import get_vision_window_index

from tessera.models.qwen2_5_vl import SPEC
from tessera.models.qwen2_5_vl.model import window_order, window_sizes

FAMILY = Qwen25VL()


def test_windows_matter() -> None:
    """What is compared with transformers would differ if windows were ignored, and if all blocks kept to them."""
    pair = FAMILY.pair(0, 3)
    config, model = pair.config, pair.model
    batch = FAMILY.pack(config, FAMILY.cases(pair, 0, ["one"], 3))
    right = model(batch, logits=True)["logits"]
    for full in ((), (0, 1, 2)):
        changed = config.vision.model_copy(update={"fullatt_block_indexes": full})
        other = SPEC.main.build(config.model_copy(update={"vision": changed}))
        other.load_state_dict(model.state_dict())
        assert relative(other(batch, logits=True)["logits"], right) > 1e-2


@pytest.mark.parametrize("side", [1, 2, 3, 4, 8])
def test_windows_are_the_references(side: int) -> None:
    for rows, columns in ((1, 1), (4, 4), (5, 9), (8, 3), (2, 17)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        index, bounds = get_vision_window_index(grid, spatial_merge_size=2, window_size=side * 28, patch_size=14)
        assert np.array_equal(window_order(rows, columns, side), index.numpy())
        assert [4 * size for size in window_sizes(rows, columns, side)] == bounds.diff().tolist()


def test_a_pass_forward_and_back_asks_the_device_for_nothing() -> None:
    """On the meta device there are no numbers: whoever wanted one, or a shape that depends on one, would fail."""
    pair = FAMILY.pair(0, 0)
    batch = FAMILY.pack(pair.config, FAMILY.cases(pair, 0, ["mixed", "text", "several"], 0), 3).to("meta")
    model = SPEC.main.build(pair.config).to("meta")
    logits = model(batch, logits=True)["logits"]
    assert logits.shape == (batch["tokens"].shape[0], pair.config.text.vocab_size)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
