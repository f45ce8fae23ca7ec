"""Pack samples of a generation model into one batch, with one segment of the main sequence per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.samples import EncodedMedia

IMAGE_EMBEDS = "image_embeds"
# Batch tensors for families whose empty caption differs between samples: the rows of its embeddings from index
# `empty_starts` on. Earlier rows equal those of the sample's caption.
EMPTY_TEXT, EMPTY_STARTS = "empty_text", "empty_starts"
_LATENTS = "latents"


def latent_lengths(batch: Batch, family: GenerationFamily) -> list[int]:
    """Return the number of latent tokens of each sample.

    In joint models a segment also contains text and image embeddings, which are not counted.
    """
    lengths = batch.segments[_LATENTS].lengths
    if not family.joint:
        return list(lengths)
    texts = batch.segments["text"].lengths
    embeds = batch.segments[IMAGE_EMBEDS].lengths if IMAGE_EMBEDS in batch.segments else [0] * len(texts)
    return [whole - text - more for whole, text, more in zip(lengths, texts, embeds, strict=True)]


def pack(family: GenerationFamily, items: Sequence[EncodedMedia]) -> Batch:
    """Return samples as one packed batch with a segment each. An item without a grid is padding or an unreadable
    sample: its tokens do not count in the loss."""
    joint = family.joint
    positions, text_index, embeds_index, latent_index, trained, reference_index = [], [], [], [], [], []
    shapes: dict[str, list[tuple[int, ...]]] = {
        _LATENTS: [],
        "frames": [],
        "references": [],
        "reference_latents": [],
    }
    reference_sample: list[int] = []
    at = latents = 0
    for number, item in enumerate(items):
        text, embeds = (item.text, item.embeds) if joint else (0, 0)
        before = text + embeds
        blank = math.prod(item.grid) == 0
        grids = [(1, 1, item.length)] if blank else [item.grid, *item.reference_grids]
        positions.append(torch.zeros(3, item.length, dtype=torch.int64) if blank else family.positions(before, grids))
        text_index.append(torch.arange(at, at + text))
        embeds_index.append(torch.arange(at + text, at + before))
        latent_index.append(torch.arange(at + before, at + item.length))
        count = math.prod(grids[0])
        trained.append(torch.arange(latents, latents + (0 if blank else count)))
        reference_index.append(torch.arange(latents + count, latents + item.length - before))
        shapes[_LATENTS].append(grids[0])
        frames = item.tensors.get("frames")
        shapes["frames"].append((0, 0, 0) if frames is None else tuple(frames.shape[:3]))
        shapes["reference_latents"] += item.reference_grids if item.references else ()
        shapes["references"] += [tuple(image.shape[:3]) for image in item.references]
        reference_sample += [number] * len(item.references)
        at, latents = at + item.length, latents + item.length - before
    tensors = {
        "positions": torch.cat(positions, dim=1),
        "sample_index": torch.repeat_interleave(torch.tensor([item.length for item in items])),
        "trained": torch.cat(trained),
    }
    bounds = {_LATENTS: Segments.of([item.length for item in items])}
    bounds["text"] = Segments.of([item.text for item in items])
    if joint:
        tensors |= {"text_index": torch.cat(text_index), "latent_index": torch.cat(latent_index)}
    if family.embeds_in_sequence:
        tensors[f"{IMAGE_EMBEDS}_index"] = torch.cat(embeds_index)
        bounds[IMAGE_EMBEDS] = Segments.of([item.embeds for item in items])
    if reference_sample:
        images = [image.reshape(-1, 3) for item in items for image in item.references]
        tensors |= {"references": torch.cat(images), "reference_index": torch.cat(reference_index)}
        tensors["reference_sample"] = torch.tensor(reference_sample)
    _join(family, items, tensors, bounds)
    counts: dict[str, int] = {}
    for item in items:
        for name, count in item.counts.items():
            counts[name] = counts.get(name, 0) + count
    return Batch(tensors, bounds, {name: tuple(sizes) for name, sizes in shapes.items() if sizes}, counts=counts)


def _join(
    family: GenerationFamily, items: Sequence[EncodedMedia], tensors: dict[str, Tensor], bounds: dict[str, Segments]
) -> None:
    """Concatenate the tensors of all samples into the batch: pixels and token ids, or stored features."""
    names = dict.fromkeys(name for item in items for name in item.tensors)
    if not names:  # all samples of the batch are unreadable
        tensors["frames"] = torch.empty(0, 3, dtype=torch.uint8)
        for name in family.id_names:
            tensors[name], bounds[name] = torch.empty(0, dtype=torch.int64), Segments.of([0] * len(items))
    sizes = [item.length - (item.text + item.embeds if family.joint else 0) for item in items]
    for name in names:
        parts = [item.tensors.get(name) for item in items]
        present = [part for part in parts if part is not None]
        if name == "frames":
            tensors[name] = torch.cat([part.reshape(-1, 3) for part in present])
        elif name in ("clean", "condition"):
            like = present[0]
            tensors[name] = torch.cat(
                [
                    part if part is not None else like.new_zeros(n, like.shape[1])
                    for part, n in zip(parts, sizes, strict=True)
                ]
            )
        elif name == "pooled":
            tensors[name] = torch.cat([torch.zeros_like(present[0]) if part is None else part for part in parts])
        else:
            tensors[name] = torch.cat(present)
            bounds[name] = Segments.of([0 if part is None else len(part) for part in parts])
