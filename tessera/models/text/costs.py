"""FLOPs of one forward and backward pass, and example batches for estimates and dry runs.

Counted are the matrix products of the model itself: half the square of causal attention inside each segment, no
recomputation, no padding of shorter segments, no blank input of an idle encoder, and no gradient that is not needed
(`core.types.Passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.spec import FULL, Training
from tessera.models.text.decoder import TextConfig, layer_weights
from tessera.models.vision.patches import block_positions
from tessera.nn.vit import VisionShape

Measures = Mapping[str, np.ndarray]  # counts of samples by name, as `Processor.measure` gives them
EXAMPLE_IMAGES = 16  # a common number of ranks among which images are sharded


def text_work(text: TextConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of the text decoder and head for each sample.

    The head is computed at trained positions alone, where `measures` has their number. A sample is one segment, unless
    `measures` has `token_pairs`, the sum of squared segment lengths.
    """
    tokens = measures["tokens"].astype(np.float64)
    routers = 0
    if text.experts is not None:
        sparse = sum(text.experts_in(layer) is not None for layer in range(text.num_hidden_layers))
        routers = sparse * text.hidden_size * text.experts.num_experts
    weights = text.num_hidden_layers * layer_weights(text) + routers
    width = text.num_attention_heads * text.head_size
    pairs = measures.get("token_pairs", tokens**2)
    layers, head = training.get("text", FULL), training.get("head", FULL)
    total: np.ndarray = (
        layers.weights * 2 * tokens * weights
        + head.weights * 2 * measures.get("trained", tokens) * text.hidden_size * text.vocab_size
        + layers.attention * 4 * text.num_hidden_layers * width * pairs / 2
    )
    return total


@dataclass(frozen=True)
class VisionCosts:
    """Hold the sizes from which the FLOPs of a vision encoder and its projector follow."""

    shape: VisionShape
    projector_weights: int  # weights that one visual token is multiplied by in the projector
    patches: int  # of a block of merged patches, a tile or an image, class token included
    tokens: int = 1  # visual tokens made of that many patches

    def work(self, measures: Measures, training: Training) -> np.ndarray:
        """Return the FLOPs of encoder and projector for each sample."""
        patches = measures["patches"].astype(np.float64)
        shape, blocks = self.shape, self.shape.blocks_used
        full = len(shape.full_attn_blocks) if shape.windows else blocks
        pairs = full * measures["patch_pairs"].astype(np.float64)
        if shape.windows:
            pairs = pairs + (blocks - full) * measures["window_pairs"].astype(np.float64)
        encoder, projector = training.get("vision", FULL), training.get("projector", FULL)
        total: np.ndarray = (
            encoder.weights * 2 * patches * blocks * shape.block_weights
            + projector.weights * 2 * (patches / self.patches * self.tokens) * self.projector_weights
            + encoder.attention * 4 * shape.hidden * pairs
            + encoder.first * 2 * patches * shape.patch_values * shape.hidden
        )
        return total


def language_work(config: Any, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
    """Return the FLOPs of samples of a text-only family, by stream."""
    return {"text": text_work(config.text, measures, training)}


def vision_language_work(
    costs: Callable[[Any], VisionCosts],
    config: Any,
    measures: Measures,
    training: Training = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Return the FLOPs of samples of a vision-language family, by stream."""
    return {
        "text": text_work(config.text, measures, training),
        "vision": costs(config).work(measures, training),
    }


def batch_flops(
    work: Callable[..., dict[str, np.ndarray]],
    config: Any,
    batch: Batch,
    training: Training = MappingProxyType({}),
) -> float:
    """Return the FLOPs of a whole batch, by the family's `work` for samples. The batch must still be on the host."""
    return float(sum(part.sum() for part in work(config, measures_of(batch), training).values()))


def measures_of(batch: Batch) -> dict[str, np.ndarray]:
    """Return the measures of a batch under the names that the sample index uses."""
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


# ---------------------------------------------------------------------------------------------- example batches


def example_batch(tokens: int, media: Mapping[str, Tensor], lengths: list[int] | None = None, axes: int = 1) -> Batch:
    """Return a batch of one conversation with `tokens` tokens, all zero, and further tensors in `media`.

    `lengths`: patches of each image, if there are any. `axes`: axes of positions, 1 or 3.
    """
    positions = torch.arange(tokens)
    tensors = {
        "tokens": torch.zeros(tokens, dtype=torch.int64),
        "labels": torch.zeros(tokens, dtype=torch.int64),
        "positions": positions if axes == 1 else positions.expand(axes, -1).clone(),
        **media,
    }
    segments = {"text": Segments.of([tokens])}
    if lengths:
        segments["vision"] = Segments.of(lengths)
    return Batch(tensors, segments, sample_ids=("example",), seeds=(0,))


def example_with_images(
    tokens: int,
    merge: int,
    patch_values: int,
    table: Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]] | None = None,
) -> Batch:
    """Return a batch of `tokens` tokens of which square images of one size take about a quarter.

    `table`: for encoders with learned position embeddings, gives table indices and weights of patches, from their
    positions and the height and width of the image in patches.
    """
    side = max(1, isqrt(tokens // (4 * EXAMPLE_IMAGES)))
    images = max(1, min(EXAMPLE_IMAGES, tokens // (4 * side * side)))
    patches = side * merge
    positions = block_positions(patches, patches, merge)
    pixels = torch.zeros(images * patches**2, patch_values)

    def for_all_images(values: np.ndarray) -> Tensor:
        # On the current default device: estimates make batches on the meta device.
        return torch.as_tensor(values, device=pixels.device).repeat(images, 1)

    media = {
        "pixels": pixels,
        "patch_positions": for_all_images(positions),
        "media_slots": torch.arange(images * side * side),
    }
    if table is not None:
        media["patch_index"], media["patch_weights"] = (
            for_all_images(one) for one in table(positions, patches, patches)
        )
    return example_batch(tokens, media, [patches**2] * images, axes=3)
