"""What generation families share: their main sequence, costs of a batch, and batches that are made up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import Stream
from tessera.core.spec import FULL, Training
from tessera.models.text.costs import Measures

# The main sequence of a family with cross attention. Latents themselves are made by the task, on the device, from whole
# samples; the index tells it which of them a rank has.
LATENTS = Stream(
    tensors=("sample_index", "positions", "time_index"),
    segments="latents",
    dim=-1,
    positions=("trained",),
    index="token_index",
    own_segments="latents.own",
)
EXAMPLE_TEXT = 512


def latent_segments(batch: Batch) -> Segments:
    """Return the bounds of the samples among the tokens that a rank has."""
    return batch.segments.get(LATENTS.own_segments, batch.segments[LATENTS.segments])


@dataclass(frozen=True)
class CrossCosts:
    """Hold the sizes from which the FLOPs of a transformer with cross attention follow: weights by which an element is
    multiplied."""

    width: int  # of attention: heads x head size
    layers: int
    block: int  # weights of one block, for each token
    text_block: int  # keys and values of one block, for each text embedding
    embed: int  # the patch embedding
    text: tuple[int, int]  # the projection of text: its first layer, whose input has no gradient, and the rest
    time: tuple[int, int]  # the same of the embedding of time and modulation, for each entry of `timesteps`
    head: int
    image: int = 0  # the projection of image embeddings; their keys and values are as those of text


def cross_work(costs: CrossCosts, measures: Measures, training: Training) -> dict[str, np.ndarray]:
    """Return the FLOPs of one forward and backward pass for each sample."""
    passes, first, last = (training.get(part, FULL) for part in ("blocks", "embed", "head"))
    tokens, text, times = (measures[name].astype(np.float64) for name in ("tokens", "text", "samples"))
    images = measures.get("image_embeds", np.zeros_like(text))
    read = text + images
    total: np.ndarray = (
        passes.weights * 2 * costs.layers * (tokens * costs.block + read * costs.text_block)
        + passes.attention * 4 * costs.layers * costs.width * tokens * (tokens + read)
        + first.first * 2 * (tokens * costs.embed + text * costs.text[0] + times * costs.time[0])
        + first.weights * 2 * (text * costs.text[1] + times * costs.time[1] + images * costs.image)
        + last.weights * 2 * tokens * costs.head
    )
    return {"latents": total}


def cross_flops(costs: CrossCosts, batch: Batch, training: Training) -> float:
    """Return the FLOPs of a whole batch, which is still on the host."""
    names = {"tokens": "latents", "text": "text", "image_embeds": "image_embeds"}
    measures = {n: np.array(batch.segments[of].lengths) for n, of in names.items() if of in batch.segments}
    count = len(measures["tokens"])
    times = batch["timesteps"].shape[0] if "timesteps" in batch else count
    measures["samples"] = np.full(count, times / count)
    return float(cross_work(costs, measures, training)["latents"].sum())


def cross_example(tokens: int, patch_values: int, text_width: int, **more: tuple[int, int]) -> Batch:
    """Return a batch of one sample with `tokens` latent tokens, all zero. `more`: lengths and widths of further packed
    tensors that the model reads."""
    index = torch.zeros(tokens, dtype=torch.int64)
    tensors: dict[str, Tensor] = {
        "sample_index": index,
        "positions": torch.stack([index, index, torch.arange(tokens)]),
        "latents": torch.zeros(tokens, patch_values),
        "text": torch.zeros(EXAMPLE_TEXT, text_width),
        "timesteps": torch.zeros(1),
        **{name: torch.zeros(shape) for name, shape in more.items()},
    }
    segments = {"latents": Segments.of([tokens]), "text": Segments.of([EXAMPLE_TEXT])}
    segments |= {name: Segments.of([length]) for name, (length, _) in more.items()}
    return Batch(tensors, segments, sample_ids=("example",), seeds=(0,), shapes={"latents": ((1, 1, tokens),)})
