"""Flux, Stable Diffusion 3 and Qwen-Image beside diffusers: text and latents in one sequence, reference images."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
from generation import GenerationFamily, Grid, from_patches, samples_of, to_patches
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.diffusion.flux import SPEC as FLUX
from tessera.diffusion.qwen_image import SPEC as QWEN_IMAGE
from tessera.diffusion.sd3 import SPEC as SD3

PADDING = 3


class JointFamily(GenerationFamily):
    """Two samples, each an image and perhaps reference images, and padding."""

    grids = ((1, 2, 3), (1, 3, 2))
    text = (3, 6)
    weight_scale = 0.06  # with larger gates, blocks magnify the rounding of the first one

    def images(self, config: Any) -> list[list[Grid]]:
        """The image and the reference images of each sample."""
        return [[grid] for grid in self.grids]

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        shape, images = config.shape, self.images(config)
        latents = [sum(map(prod, grids)) for grids in images]
        both = [(text, count) for text, count in zip(self.text, latents, strict=True)] + [(0, PADDING)]
        family = config.generation()
        places = [family.positions(*sample) for sample in zip(self.text, images, strict=True)]
        is_text = torch.cat([torch.tensor([1] * text + [0] * count) for text, count in both]).bool()
        samples = len(both)
        tensors = {
            "latents": torch.randn(sum(latents) + PADDING, shape.latent_values, generator=generator),
            "text": torch.randn(sum(self.text), shape.text_width, generator=generator),
            "positions": torch.cat([*places, torch.zeros(3, PADDING, dtype=torch.int64)], dim=1),
            "sample_index": torch.arange(samples).repeat_interleave(torch.tensor([sum(one) for one in both])),
            "text_index": is_text.nonzero().flatten(),
            "latent_index": (~is_text).nonzero().flatten(),
            # Diffusers divides them by a thousand: here that is exact.
            "timesteps": torch.randint(1024, (samples,), generator=generator) / 1024 * 1000,
        }
        if shape.pooled_width:
            tensors["pooled"] = torch.randn(samples, shape.pooled_width, generator=generator)
        if shape.guidance:
            tensors["guidance"] = torch.rand(samples, generator=generator) * 5
        segments = {"latents": Segments.of([sum(one) for one in both]), "text": Segments.of([*self.text, 0])}
        return Batch(tensors, segments, seeds=(0,), shapes={"latents": self.grids})

    def trained(self, batch: Batch) -> Tensor:
        return torch.arange(batch["latents"].shape[0] - PADDING)

    def latents_of(self, config: Any, batch: Batch) -> list[Tensor]:
        counts = [sum(map(prod, grids)) for grids in self.images(config)]
        return list(batch["latents"].split([*counts, PADDING]))[:-1]


class Flux(JointFamily):
    spec = FLUX
    _tiny: ClassVar[dict[str, Any]] = {
        "in_channels": 12,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 14,
        "axes_dims_rope": [4, 4, 4],
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "schnell": _tiny,
        "dev": {**_tiny, "guidance_embeds": True},
        "double alone": {**_tiny, "num_single_layers": 0, "num_attention_heads": 3, "axes_dims_rope": [2, 4, 6]},
        "single alone": {**_tiny, "num_layers": 0, "in_channels": 24, "out_channels": 8},
    }
    quick = ("dev", "single alone")

    def images(self, config: Any) -> list[list[Grid]]:
        # With guidance, the first sample has a reference image, as in Kontext.
        references: list[Grid] = [(1, 2, 2)] if config.guidance_embeds else []
        return [[self.grids[0], *references], [self.grids[1]]]

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs = []
        pairs = zip(samples_of(batch, "text"), self.latents_of(config, batch), self.images(config), strict=True)
        for at, (text, latents, grids) in enumerate(pairs):
            ids = [torch.zeros(*grid[1:], 3) for grid in grids]
            for number, (places, grid) in enumerate(zip(ids, grids, strict=True)):
                places[..., 0] = number
                places[..., 1] += torch.arange(grid[1])[:, None]
                places[..., 2] += torch.arange(grid[2])[None]
            guidance = batch["guidance"][at : at + 1] if config.guidance_embeds else None
            out = reference(
                latents[None],
                text[None],
                batch["pooled"][at : at + 1],
                batch["timesteps"][at : at + 1] / 1000,
                torch.cat([places.flatten(0, 1) for places in ids]),
                torch.zeros(len(text), 3),
                guidance,
                return_dict=False,
            )
            outputs.append(out[0][0])
        return outputs


class QwenImage(JointFamily):
    spec = QWEN_IMAGE
    _tiny: ClassVar[dict[str, Any]] = {
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "axes_dims_rope": [4, 4, 4],
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "text": _tiny,
        "wide": {
            **_tiny,
            "num_attention_heads": 3,
            "axes_dims_rope": [2, 6, 4],
            "in_channels": 8,
            "out_channels": None,
        },
        "edit": {**_tiny, "num_layers": 3},
        "time of references": {**_tiny, "num_attention_heads": 4, "zero_cond_t": True},
    }
    quick = ("edit",)

    def images(self, config: Any) -> list[list[Grid]]:
        if config.zero_cond_t or config.num_layers == 3:
            return [[self.grids[0], (1, 2, 2), (1, 1, 4)], [self.grids[1], (1, 4, 5)]]
        return [[grid] for grid in self.grids]

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs = []
        pairs = zip(samples_of(batch, "text"), self.latents_of(config, batch), self.images(config), strict=True)
        for at, (text, latents, grids) in enumerate(pairs):
            out = reference(
                latents[None],
                text[None],
                None,
                batch["timesteps"][at : at + 1] / 1000,
                [grids],
                return_dict=False,
            )
            outputs.append(out[0][0])
        return outputs


class StableDiffusion3(JointFamily):
    spec = SD3
    _tiny: ClassVar[dict[str, Any]] = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 20,
        "caption_projection_dim": 24,
        "pooled_projection_dim": 14,
        "pos_embed_max_size": 6,
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "3": _tiny,
        "3.5 medium": {
            **_tiny,
            "num_layers": 3,
            "dual_attention_layers": [0, 2],
            "qk_norm": "rms_norm",
        },
        "3.5 large": {**_tiny, "qk_norm": "rms_norm", "pos_embed_max_size": 7},
        "channels": {**_tiny, "in_channels": 5, "patch_size": 3, "sample_size": 9, "num_layers": 1},
    }
    quick = ("3.5 medium", "channels")

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs, patch = [], (1, config.patch_size, config.patch_size)
        pairs = zip(samples_of(batch, "text"), self.latents_of(config, batch), self.grids, strict=True)
        for at, (text, latents, grid) in enumerate(pairs):
            out = reference(
                from_patches(latents, grid, patch)[:, 0][None],
                text[None],
                batch["pooled"][at : at + 1],
                batch["timesteps"][at : at + 1],
                return_dict=False,
            )
            outputs.append(to_patches(out[0][0][:, None], patch))
        return outputs
