"""Floating-point operations of one forward and backward pass.

Counted are the matrix products of the model itself: attention inside each segment (all of its square, with no discount
for causality), no recomputation, no padding of shorter segments, no blank picture of an idle tower.
"""

from __future__ import annotations

from itertools import pairwise

from tessera.core.types import Batch, Segments
from tessera.models.qwen2_vl.config import Qwen2VLConfig


def flops(config: Qwen2VLConfig, batch: Batch) -> float:
    """Reads segment bounds on the host: call it on a batch that has not yet gone to the device."""
    return _text(config, batch) + _vision(config, batch)


def _text(config: Qwen2VLConfig, batch: Batch) -> float:
    text = config.text
    width = text.num_attention_heads * text.head_size
    attention = 2 * text.hidden_size * (width + text.num_key_value_heads * text.head_size)
    layer = attention + 3 * text.hidden_size * text.intermediate_size
    weights = text.num_hidden_layers * layer + text.hidden_size * text.vocab_size
    squares = _squares(batch.segments["text"])
    forward = 2 * batch["tokens"].shape[0] * weights + 4 * text.num_hidden_layers * width * squares
    return 3.0 * forward


def _vision(config: Qwen2VLConfig, batch: Batch) -> float:
    pixels = batch.get("pixels")
    if pixels is None or pixels.shape[0] == 0:
        return 0.0
    vision, patches = config.vision, pixels.shape[0]
    joined = vision.embed_dim * vision.spatial_merge_size**2
    blocks = vision.depth * (4 + 2 * vision.mlp_ratio) * vision.embed_dim**2
    projector = joined * (joined + config.text.hidden_size)
    forward = (
        2 * patches * blocks
        + 2 * (patches // vision.spatial_merge_size**2) * projector
        + 4 * vision.depth * vision.embed_dim * _squares(batch.segments["vision"])
    )
    # Nothing asks for the gradient of pixels, so the first product has one backward product instead of two.
    embed = 2 * patches * vision.patch_values * vision.embed_dim
    return 3.0 * forward + 2.0 * embed


def _squares(segments: Segments) -> int:
    bounds = segments.bounds.tolist()
    return sum((end - start) ** 2 for start, end in pairwise(bounds))
