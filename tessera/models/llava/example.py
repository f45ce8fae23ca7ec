"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

import torch

from tessera.core.types import Batch, Segments
from tessera.models.llava.config import LlavaConfig

PICTURES = 16  # as many as ranks commonly deal pictures among


def example(config: LlavaConfig, tokens: int) -> Batch:
    """One conversation of so many tokens with pictures of one square each, which take about half of them; of rows too
    short for one picture it takes a part."""
    patches, first = config.vision.patches, config.first_feature
    each = config.features + (config.tiles is not None)  # with the end of a line
    pictures = max(1, min(PICTURES, tokens // (2 * each)))
    used = min(pictures * each, tokens)
    count = torch.arange(tokens)
    tensors = {
        "tokens": torch.zeros(tokens, dtype=torch.int64),
        "labels": torch.zeros(tokens, dtype=torch.int64),
        "positions": count,
        "pixels": torch.zeros(pictures * patches, config.vision.patch_values),
        "patch_index": torch.arange(patches).repeat(pictures),
        "media_slots": count[:used].clone(),
    }
    kept = torch.arange(pictures * patches).view(pictures, patches)[:, first:].flatten()
    if config.tiles is None:
        tensors["media_patches"] = kept[:used]
    else:
        tensors["media_patches"] = kept
        numbers = torch.arange(1, pictures * config.features + 1).view(pictures, -1)
        tensors["media_index"] = torch.nn.functional.pad(numbers, (0, 1)).flatten()[:used]
    return Batch(
        tensors,
        {"text": Segments.of([tokens]), "vision": Segments.of([patches] * pictures)},
        sample_ids=("example",),
        seeds=(0,),
    )
