"""What GLM-4.1V computes in a way of its own; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import relative

from tessera.models.glm4v.model import bicubic_positions
from tessera.models.vision.patches import block_positions
from tessera.weights.operations import ConvToLinear, InterleavedToHalfRope


@pytest.mark.parametrize(("height", "width", "side"), [(24, 24, 24), (2, 2, 24), (6, 40, 5), (50, 34, 24), (4, 2, 1)])
def test_positions_between_entries_are_those_of_grid_sample(height: int, width: int, side: int) -> None:
    table = torch.randn(side * side, 7, generator=torch.Generator().manual_seed(0))
    places = block_positions(height, width, 2)
    index, weights = bicubic_positions(places, height, width, side)
    ours = (table[torch.from_numpy(index)] * torch.from_numpy(weights)[..., None]).sum(1)
    at = torch.from_numpy((places[:, ::-1].astype(np.float32) + 0.5) / np.float32([width, height]) * 2 - 1)
    picture = table.view(1, side, side, 7).permute(0, 3, 1, 2)
    sampled = torch.nn.functional.grid_sample(
        picture, at[None, :, None], mode="bicubic", align_corners=False, padding_mode="border"
    )
    assert relative(ours, sampled[0, :, :, 0].T) < 1e-5
    assert weights.sum(1) == pytest.approx(1.0, abs=1e-6)


def test_weight_operations_go_both_ways() -> None:
    theirs = torch.arange(24.0).reshape(12, 2)
    turned = InterleavedToHalfRope(head_dim=6, rotary_dim=4)
    ours = turned.to_native([theirs])
    assert ours[:, 0].div(2).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert torch.equal(turned.to_foreign(ours)[0], theirs)
    assert turned.to_native([theirs[:, 0]]).shape == (12,)
    convolution = torch.nn.Conv2d(3, 4, 2, stride=2, bias=False)
    linear = ConvToLinear(2).to_native([convolution.weight])
    patches = torch.randn(5, 2, 2, 3)
    expected = convolution(patches.permute(0, 3, 1, 2)).flatten(1)
    torch.testing.assert_close(patches.flatten(1) @ linear.T, expected)
    assert torch.equal(ConvToLinear(2).to_foreign(linear)[0], convolution.weight)
