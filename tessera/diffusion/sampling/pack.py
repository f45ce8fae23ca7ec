"""Pack samples that are to be generated into the batch that a generation model reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.core.batch import Batch, Segments
from tessera.diffusion.encoders import SampleConditions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.given_images import Grid
from tessera.diffusion.sampling.denoise import Inputs


def packed(
    samples: Sequence[SampleConditions], family: GenerationFamily, grid: Grid, scale: float, dtype: torch.dtype
) -> Inputs:
    """Return one forward pass of samples whose latents are `grid` tokens. `scale`: of embedded guidance."""
    count = grid[0] * grid[1] * grid[2]
    positions, generated, latents, lengths, at = [], [], [], [], 0
    device = samples[0].text.device
    for sample in samples:
        grids = [grid, *(size for _, size in sample.references)]
        still = 0 if sample.first is None else len(sample.first)
        tokens = torch.zeros(count, family.patch_values, dtype=dtype, device=device)
        if sample.first is not None:
            tokens[:still] = sample.first.to(dtype)
        latents += [tokens, *(image.to(dtype) for image, _ in sample.references)]
        generated.append(torch.arange(at + still, at + count))
        at += sum(len(part) for part in latents[-len(grids) :])
        conditions = len(sample.text) + _embeds(sample) if family.joint else 0
        positions.append(family.positions(conditions, grids))
        lengths.append(positions[-1].shape[1])
    texts = [sample.text for sample in samples]
    tensors = {
        "latents": torch.cat(latents),
        "text": torch.cat(texts).to(dtype),
        "positions": torch.cat(positions, dim=1).to(device),
        "sample_index": torch.repeat_interleave(torch.tensor(lengths)).to(device),
    }
    segments = {"latents": Segments.of(lengths), "text": Segments.of([len(text) for text in texts])}
    if family.joint:
        kinds_at = [(len(sample.text), len(sample.text) + _embeds(sample)) for sample in samples]
        places = [torch.arange(length) for length in lengths]
        # Text is 0, embeddings of a given image are 1, latents are 2.
        kinds = torch.cat(
            [(at >= first).int() + (at >= last).int() for at, (first, last) in zip(places, kinds_at, strict=True)]
        )
        for number, name in enumerate(("text_index", "image_embeds_index", "latent_index")):
            if number != 1 or family.image_embeds:
                tensors[name] = (kinds == number).nonzero().flatten().to(device)
    pooled = [sample.pooled for sample in samples if sample.pooled is not None]
    if pooled:
        tensors["pooled"] = torch.stack(pooled).to(dtype)
    embeds = [sample.image_embeds for sample in samples if sample.image_embeds is not None]
    if embeds:
        tensors["image_embeds"] = torch.cat(embeds).to(dtype)
        segments["image_embeds"] = Segments.of([len(rows) for rows in embeds])
    if family.guidance_input:
        tensors["guidance"] = torch.full((len(samples),), scale, dtype=torch.float32, device=device)
    channels = [sample.condition for sample in samples if sample.condition is not None]
    shapes = tuple(tuple(size) for sample in samples for size in [grid, *(one for _, one in sample.references)])
    batch = Batch(tensors, {name: bounds.to(device) for name, bounds in segments.items()}, shapes={"latents": shapes})
    index = torch.cat(generated).to(device)
    # Models without times of tokens set the time of a first frame to zero themselves.
    if family.token_times and any(sample.first is not None for sample in samples):
        assert not family.joint, "elements of the main sequence are latent tokens"
        given_tokens = torch.ones(at, dtype=torch.bool, device=device).index_fill(0, index, False)
        batch = batch.with_tensors(time_index=torch.where(given_tokens, len(samples), batch["sample_index"]))
    return Inputs(batch, index, torch.cat(channels).to(dtype) if channels else None)


def _embeds(sample: SampleConditions) -> int:
    return 0 if sample.image_embeds is None else len(sample.image_embeds)
