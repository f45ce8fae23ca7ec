"""FLOPs of one forward and backward pass, and example batches for estimates and dry runs.

Only matrix products of the model itself are counted: half the square of causal attention inside each segment, no
recomputation, no padding of shorter segments, no blank input of an idle encoder, and no gradient that is not needed
(`core.spec.Passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tessera.core.batch import Batch, Segments
from tessera.core.spec import FULL, Training
from tessera.models.processing.streams import MediaStreams
from tessera.models.text.decoder import TextConfig, layer_weights

Measures = Mapping[str, np.ndarray]  # {name from `Processor.measure`, such as "tokens": its value for each sample}


def text_work(text: TextConfig, measures: Measures, training: Training) -> np.ndarray:
    """Return the FLOPs of the text decoder and head for each sample.

    `measures` has "tokens". If it has "trained", the number of tokens with a label, the head is counted only for those.
    If it has "token_pairs", the sum of squared segment lengths, attention is counted by it, else by tokens squared.
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


def language_work(config: Any, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
    """Return {"text": FLOPs of each sample} for a text-only family."""
    return {"text": text_work(config.text, measures, training)}


def batch_flops(
    work: Callable[..., dict[str, np.ndarray]],
    streams: MediaStreams,
    config: Any,
    batch: Batch,
    training: Training = MappingProxyType({}),
) -> float:
    """Return the FLOPs of a batch. `work`: the family's function for the FLOPs of samples, such as `language_work`."""
    return float(sum(part.sum() for part in work(config, measures_of(batch, streams), training).values()))


def measures_of(batch: Batch, streams: MediaStreams) -> dict[str, np.ndarray]:
    """Return the number of tokens, patches and pairs of a batch, as `Measures`. `streams`: those of the processor."""
    measures = {
        "tokens": batch["tokens"].shape[0],
        "trained": batch["trained" if "trained" in batch else "tokens"].shape[0],
        "token_pairs": sum(length**2 for length in batch.segments["text"].lengths),
    }
    for stream in streams.values():
        measures |= stream.measures_of(batch)
    return {name: np.array(value) for name, value in measures.items()}


# ---------------------------------------------------------------------------------------------- example batches


def example_batch(tokens: int, axes: int = 1) -> Batch:
    """Return a training batch of one conversation with `tokens` tokens. All have the id 0 and the label 0.

    `axes`: number of position axes, 1 or 3.
    """
    positions = torch.arange(tokens)
    tensors = {
        "tokens": torch.zeros(tokens, dtype=torch.int64),
        "labels": torch.zeros(tokens, dtype=torch.int64),
        "trained": positions.clone(),
        "positions": positions if axes == 1 else positions.expand(axes, -1).clone(),
    }
    return Batch(tensors, {"text": Segments.of([tokens])}, sample_ids=("example",), seeds=(0,))
