"""Pack samples that are to be generated into the batch that a generation model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.diffusion.forms import GenerationForm, Grid, sample_positions
from tessera.diffusion.sampling.denoise import Inputs


@dataclass(frozen=True)
class SampleConditions:
    """Hold what one sample is made from."""

    text: Tensor  # [L, D]
    pooled: Tensor | None = None  # [Dp]
    image_embeds: Tensor | None = None  # [M, Di]
    condition: Tensor | None = None  # [n, values]: channels beside the latents
    first: Tensor | None = None  # [n, values]: tokens of given frames, which take the place of noise
    references: tuple[tuple[Tensor, Grid], ...] = field(default_factory=tuple)  # tokens [n, values] of given images


def packed(
    samples: Sequence[SampleConditions], form: GenerationForm, grid: Grid, scale: float, dtype: torch.dtype
) -> Inputs:
    """Return one forward pass of samples whose latents are `grid` tokens. `scale`: of embedded guidance."""
    count = grid[0] * grid[1] * grid[2]
    positions, generated, latents, lengths, at = [], [], [], [], 0
    device = samples[0].text.device
    for sample in samples:
        grids = [grid, *(size for _, size in sample.references)]
        given = 0 if sample.first is None else len(sample.first)
        own = torch.zeros(count, form.patch_values, dtype=dtype, device=device)
        if sample.first is not None:
            own[:given] = sample.first.to(dtype)
        latents += [own, *(tokens.to(dtype) for tokens, _ in sample.references)]
        generated.append(torch.arange(at + given, at + count))
        at += sum(len(tokens) for tokens in latents[-len(grids) :])
        words, shown = (len(sample.text), _embeds(sample)) if form.joint else (0, 0)
        positions.append(sample_positions(form, words + shown, grids))
        lengths.append(positions[-1].shape[1])
    texts = [sample.text for sample in samples]
    tensors = {
        "latents": torch.cat(latents),
        "text": torch.cat(texts).to(dtype),
        "positions": torch.cat(positions, dim=1).to(device),
        "sample_index": torch.repeat_interleave(torch.tensor(lengths)).to(device),
    }
    segments = {"latents": Segments.of(lengths), "text": Segments.of([len(text) for text in texts])}
    if form.joint:
        bounds = [(len(sample.text), len(sample.text) + _embeds(sample)) for sample in samples]
        places = [torch.arange(length) for length in lengths]
        # Text is 0, embeddings of a given image are 1, latents are 2.
        kinds = torch.cat(
            [(at >= first).int() + (at >= last).int() for at, (first, last) in zip(places, bounds, strict=True)]
        )
        for number, name in enumerate(("text_index", "image_embeds_index", "latent_index")):
            if number != 1 or form.image_embeds:
                tensors[name] = (kinds == number).nonzero().flatten().to(device)
    pooled = [sample.pooled for sample in samples if sample.pooled is not None]
    if pooled:
        tensors["pooled"] = torch.stack(pooled).to(dtype)
    embeds = [sample.image_embeds for sample in samples if sample.image_embeds is not None]
    if embeds:
        tensors["image_embeds"] = torch.cat(embeds).to(dtype)
        segments["image_embeds"] = Segments.of([len(one) for one in embeds])
    if form.guidance:
        tensors["guidance"] = torch.full((len(samples),), scale, dtype=torch.float32, device=device)
    conditions = [sample.condition for sample in samples if sample.condition is not None]
    shapes = tuple(tuple(size) for sample in samples for size in [grid, *(one for _, one in sample.references)])
    batch = Batch(tensors, {name: one.to(device) for name, one in segments.items()}, shapes={"latents": shapes})
    index = torch.cat(generated).to(device)
    # Other models know by themselves that a first frame has the time zero.
    if form.token_times and any(sample.first is not None for sample in samples):
        assert not form.joint, "elements of the main sequence are latent tokens"
        still = torch.ones(at, dtype=torch.bool, device=device).index_fill(0, index, False)
        batch = batch.with_tensors(time_index=torch.where(still, len(samples), batch["sample_index"]))
    return Inputs(batch, index, torch.cat(conditions).to(dtype) if conditions else None)


def _embeds(sample: SampleConditions) -> int:
    return 0 if sample.image_embeds is None else len(sample.image_embeds)
