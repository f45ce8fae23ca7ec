"""LTX-Video beside diffusers: patches, rates of frames, tokens with times of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from generation import GenerationFamily, cross_batch, samples_of
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.ltx_video import SPEC


class LTXVideo(GenerationFamily):
    spec = SPEC
    _tiny: ClassVar[dict[str, Any]] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 3,
        "attention_head_dim": 10,
        "cross_attention_dim": 30,
        "num_layers": 2,
        "caption_channels": 12,
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "plain": _tiny,
        "patches": {**_tiny, "in_channels": 16, "out_channels": None, "patch_size": 2, "num_layers": 1},
        "wide": {**_tiny, "attention_head_dim": 16, "cross_attention_dim": 48, "in_channels": 6, "norm_eps": 1e-5},
        "token times": {**_tiny, "num_attention_heads": 2, "cross_attention_dim": 20, "num_layers": 3},
    }

    quick = ("patches", "token times")

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        batch = cross_batch(self.grids, config.in_channels, ([5, 9], config.caption_channels), generator)
        if config == self.config("token times"):
            return batch.with_tensors(timesteps=torch.rand(batch["latents"].shape[0], generator=generator) * 1000)
        return batch.with_tensors(frame_rates=torch.tensor([24.0, 50.0, 1.0])) if config.patch_size > 1 else batch

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs = []
        times = list(batch["timesteps"].split(1))
        if config == self.config("token times"):
            times = [part[None] for part in samples_of(batch, "timesteps", "latents")]
        for at, (grid, latents, text) in enumerate(
            zip(self.grids, samples_of(batch, "latents"), samples_of(batch, "text"), strict=True)
        ):
            rate = float(batch["frame_rates"][at]) if "frame_rates" in batch else config.frame_rate
            out = reference(
                latents[None],
                text[None],
                times[at],
                torch.ones(1, len(text)),
                *grid,
                rope_interpolation_scale=(8 / rate, 32, 32),
                return_dict=False,
            )
            outputs.append(out[0][0])
        return outputs
