"""Wan beside diffusers: text to video, given images, first and last frame, tokens with times of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from generation import GenerationFamily, cross_batch, from_patches, samples_of, to_patches
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.wan import SPEC

_TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 20,
    "freq_dim": 16,
    "ffn_dim": 40,
    "num_layers": 2,
}
_IMAGES = {"in_channels": 9, "image_dim": 14, "added_kv_proj_dim": 24}


class Wan(GenerationFamily):
    spec = SPEC
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "text": _TINY,
        "wide": {**_TINY, "num_attention_heads": 3, "attention_head_dim": 16, "out_channels": 5, "eps": 1e-5},
        "patches": {**_TINY, "patch_size": [2, 1, 3], "cross_attn_norm": False, "num_layers": 1},
        "image": {**_TINY, **_IMAGES},
        "first and last": {**_TINY, **_IMAGES, "pos_embed_seq_len": 10, "num_layers": 1},
        "token times": {**_TINY, "in_channels": 48, "out_channels": 48},
    }
    quick = ("image", "token times")

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        images = config.image_dim
        # Diffusers takes the last 512 embeddings for text where there are images.
        text = [512, 512] if images else [5, 9]
        batch = cross_batch(
            self.grids,
            config.patch_values,
            (text, config.text_dim),
            generator,
            images=([config.pos_embed_seq_len or 7] * 2, images) if images else None,
        )
        if config.generation().token_times:
            tokens = batch["latents"].shape[0]
            return batch.with_tensors(timesteps=torch.rand(tokens, generator=generator) * 1000)
        return batch

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        times = batch["timesteps"]
        by_sample = list(times[:-1].split(1))
        if config.generation().token_times:
            by_sample = [part[None] for part in samples_of(batch, "timesteps", "latents")]
        outputs = []
        for at, (grid, latents, text) in enumerate(
            zip(self.grids, samples_of(batch, "latents"), samples_of(batch, "text"), strict=True)
        ):
            image = None
            if config.image_dim is not None:
                image = samples_of(batch, "image_embeds")[at][None]
                if config.pos_embed_seq_len:  # diffusers is given the two frames as two entries of a batch
                    image = image.view(2, -1, config.image_dim)
            video = from_patches(latents, grid, config.patch_size)[None]
            out = reference(video, by_sample[at], text[None], image, return_dict=False)[0][0]
            outputs.append(to_patches(out, config.patch_size))
        return outputs
