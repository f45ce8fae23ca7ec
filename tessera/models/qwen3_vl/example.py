"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

from math import isqrt

import torch

from tessera.core.types import Batch
from tessera.data.patches import block_positions
from tessera.models._text.example import with_pictures
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.positions import between_entries


def example(config: Qwen3VLConfig, tokens: int) -> Batch:
    vision = config.vision
    batch = with_pictures(tokens, vision.spatial_merge_size, vision.patch_values)
    pictures = batch.segments["vision"].lengths
    side = isqrt(pictures[0])
    found = between_entries(block_positions(side, side, vision.spatial_merge_size), side, side, vision.table_side)
    # By way of the device of the moment: forecasts make batches without data.
    index, weights = (torch.as_tensor(one, device=batch["pixels"].device).repeat(len(pictures), 1) for one in found)
    return batch.with_tensors(patch_index=index, patch_weights=weights)
