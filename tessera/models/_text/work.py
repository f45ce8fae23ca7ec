"""Floating-point operations of a text tower in one forward and backward pass.

Counted are the matrix products of the model itself: half the square of attention inside each segment, since it is
causal; no recomputation, no padding of shorter segments, no gradient that nobody asks for (`core.types.Passes`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tessera.core.types import FULL, Batch, Training
from tessera.models._text.config import TextConfig
from tessera.models._text.plan import layer_weights


def text_work(text: TextConfig, measures: Mapping[str, np.ndarray], training: Training) -> np.ndarray:
    """The head reads those positions alone that are trained, where their number is told."""
    tokens = measures["tokens"].astype(np.float64)
    routers = 0
    if text.experts is not None:
        sparse = sum(text.experts_in(layer) is not None for layer in range(text.num_hidden_layers))
        routers = sparse * text.hidden_size * text.experts.num_experts
    weights = text.num_hidden_layers * layer_weights(text) + routers
    width = text.num_attention_heads * text.head_size
    layers, head = training.get("text", FULL), training.get("head", FULL)
    total: np.ndarray = (
        layers.weights * 2 * tokens * weights
        + head.weights * 2 * measures.get("trained", tokens) * text.hidden_size * text.vocab_size
        + layers.attention * 4 * text.num_hidden_layers * width * _pairs(measures) / 2
    )
    return total


def measures_of(batch: Batch) -> dict[str, np.ndarray]:
    """A batch in the words of the index. `token_pairs` is given, since a batch has many segments."""
    vision, pixels = batch.segments.get("vision"), batch.get("pixels")
    windows = batch.segments.get("vision.windows")
    return {
        "tokens": np.array(batch["tokens"].shape[0]),
        "trained": np.array(batch["trained" if "trained" in batch else "tokens"].shape[0]),
        "token_pairs": np.array(sum(length**2 for length in batch.segments["text"].lengths)),
        "patches": np.array(0 if pixels is None else pixels.shape[0]),
        "patch_pairs": np.array(0 if vision is None else sum(length**2 for length in vision.lengths)),
        "window_pairs": np.array(0 if windows is None else sum(length**2 for length in windows.lengths)),
    }


def _pairs(measures: Mapping[str, np.ndarray]) -> np.ndarray:
    """Squares of segments: of pairs of tokens, half attend to each other. Samples are one segment each, unless it is
    told."""
    return measures.get("token_pairs", measures["tokens"].astype(np.float64) ** 2)
