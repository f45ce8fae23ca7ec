"""A batch that nobody has to load: what forecasts and dry runs work on."""

from __future__ import annotations

from tessera.core.types import Batch
from tessera.models._text.example import with_pictures
from tessera.models.qwen2_vl.config import Qwen2VLConfig


def example(config: Qwen2VLConfig, tokens: int) -> Batch:
    return with_pictures(tokens, config.vision.spatial_merge_size, config.vision.patch_values)
