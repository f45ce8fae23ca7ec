"""CogVideoX and HunyuanVideo beside diffusers, by their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import CogVideoXPipeline
from generation import GenerationFamily, Grid, from_patches, grid_positions, samples_of, to_patches
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.diffusion.cogvideox import SPEC as COGVIDEOX
from tessera.diffusion.hunyuan_video import SPEC as HUNYUAN
from tessera.diffusion.hunyuan_video_1_5 import SPEC as HUNYUAN_15

PADDING = 3
Packed = Mapping[str, tuple[Sequence[int], int]]  # by name: elements of each sample, and their width


def joint_batch(
    grids: Sequence[Grid],
    patch_values: int,
    conditions: Packed,
    generator: torch.Generator,
    before: bool = False,
) -> Batch:
    """A row in which the conditions of a sample and its latents are one sequence. `before`: latents come first."""
    chance = {"generator": generator}
    tensors = {"timesteps": torch.rand(len(grids) + 1, **chance) * 1000}  # type: ignore[call-overload]
    segments, kinds, places, lengths = {}, [], [], []
    for name, (counts, width) in conditions.items():
        tensors[name] = torch.randn(sum(counts), width, **chance)  # type: ignore[call-overload]
        segments[name] = Segments.of([*counts, 0])
    for number, grid in enumerate([*grids, (1, 1, PADDING)]):
        parts = [(name, segments[name].lengths[number]) for name in conditions]
        parts = [("latent", prod(grid)), *parts] if before else [*parts, ("latent", prod(grid))]
        kinds += [name for name, count in parts for _ in range(count)]
        places += [grid_positions(grid) if name == "latent" else torch.zeros(3, n).long() for name, n in parts]
        lengths.append(sum(count for _, count in parts))
    for name in ("latent", *conditions):
        tensors[f"{name}_index"] = torch.tensor([at for at, kind in enumerate(kinds) if kind == name]).long()
    count = tensors["latent_index"].shape[0]
    tensors |= {
        "latents": torch.randn(count, patch_values, **chance),  # type: ignore[call-overload]
        "positions": torch.cat(places, dim=1),
        "sample_index": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
    }
    segments["latents"] = Segments.of(lengths)
    return Batch(tensors, segments, seeds=(0,), shapes={"latents": tuple(grids)})


class CogVideoX(GenerationFamily):
    spec = COGVIDEOX
    _tiny: ClassVar[dict[str, Any]] = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 6,
        "text_embed_dim": 12,
        "num_layers": 2,
        "sample_width": 6,
        "sample_height": 8,
        "sample_frames": 5,
        "max_text_seq_length": 5,
    }
    _rope: ClassVar[dict[str, Any]] = {**_tiny, "use_rotary_positional_embeddings": True}
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "sines": _tiny,
        "plain norms": {**_tiny, "norm_elementwise_affine": False, "patch_bias": False, "num_layers": 1},
        "rotated": _rope,
        "stored positions": {**_rope, "in_channels": 8, "use_learned_positional_embeddings": True},
        "1.5": {**_rope, "patch_size_t": 2, "patch_bias": False, "in_channels": 8, "ofs_embed_dim": 6},
    }

    quick = ("sines", "1.5")

    def grids_of(self, config: Any) -> Sequence[Grid]:
        return (config.grid, config.grid) if config.use_learned_positional_embeddings else self.grids

    def trained(self, batch: Batch) -> Tensor:
        return torch.arange(batch["latents"].shape[0] - PADDING)

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        values = config.in_channels * config.patch_values
        return joint_batch(self.grids_of(config), values, {"text": ([5, 5], config.text_embed_dim)}, generator)

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs, grids = [], self.grids_of(config)
        counts = [*map(prod, grids), PADDING]
        for at, (grid, latents, text) in enumerate(
            zip(grids, batch["latents"].split(counts)[:-1], samples_of(batch, "text"), strict=True)
        ):
            video = from_patches(latents, grid, config.patch)
            frames, rows, columns = video.shape[1:]
            rotation = CogVideoXPipeline._prepare_rotary_positional_embeddings(
                SimpleNamespace(vae_scale_factor_spatial=8, transformer=reference),  # type: ignore[arg-type]
                8 * rows,
                8 * columns,
                frames,
                torch.device("cpu"),
            )
            out = reference(
                video.transpose(0, 1)[None],
                text[None],
                batch["timesteps"][at : at + 1],
                ofs=torch.tensor([2.0]) if config.ofs_embed_dim else None,
                image_rotary_emb=rotation if config.use_rotary_positional_embeddings else None,
                return_dict=False,
            )
            outputs.append(to_patches(out[0][0].transpose(0, 1), config.patch))
        return outputs


class HunyuanVideo(GenerationFamily):
    spec = HUNYUAN
    _tiny: ClassVar[dict[str, Any]] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 12,
        "pooled_projection_dim": 6,
        "rope_axes_dim": [2, 4, 6],
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "plain": _tiny,
        "first frame in place": {**_tiny, "image_condition_type": "token_replace", "num_single_layers": 1},
        "first frame as channels": {
            **_tiny,
            "image_condition_type": "latent_concat",
            "in_channels": 9,
            "guidance_embeds": False,
            "num_refiner_layers": 2,
        },
        "double alone": {**_tiny, "num_single_layers": 0, "patch_size_t": 2, "patch_size": 1, "mlp_ratio": 2.0},
    }
    quick = ("first frame in place", "double alone")
    trained = CogVideoX.trained

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        values = config.in_channels * config.patch_values
        batch = joint_batch(self.grids, values, {"text": ([5, 3], config.text_embed_dim)}, generator, before=True)
        pooled = torch.randn(3, config.pooled_projection_dim, generator=generator)
        return batch.with_tensors(pooled=pooled, guidance=torch.rand(3, generator=generator) * 5)

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs = []
        counts = [*map(prod, self.grids), PADDING]
        for at, (grid, latents, text) in enumerate(
            zip(self.grids, batch["latents"].split(counts)[:-1], samples_of(batch, "text"), strict=True)
        ):
            out = reference(
                from_patches(latents, grid, config.patch)[None],
                batch["timesteps"][at : at + 1],
                text[None],
                torch.ones(1, len(text)),
                batch["pooled"][at : at + 1],
                batch["guidance"][at : at + 1] * 1000,
                return_dict=False,
            )
            outputs.append(to_patches(out[0][0], config.patch))
        return outputs


class HunyuanVideo15(GenerationFamily):
    spec = HUNYUAN_15
    _tiny: ClassVar[dict[str, Any]] = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 12,
        "text_embed_2_dim": 6,
        "image_embed_dim": 10,
        "rope_axes_dim": [2, 4, 6],
    }
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "image": _tiny,
        "text alone": {**_tiny, "task_type": "t2v"},
        "patches": {**_tiny, "patch_size": 2, "patch_size_t": 2, "mlp_ratio": 3.0, "num_layers": 1},
        "larger": {**_tiny, "num_refiner_layers": 2, "target_size": 960},
    }
    quick = ("image",)  # a layer of 2048 x 2048 is in all of them
    trained = CogVideoX.trained

    def batch(self, config: Any, generator: torch.Generator) -> Batch:
        conditions: dict[str, tuple[Sequence[int], int]] = {"text_2": ([4, 2], config.text_embed_2_dim)}
        if config.task_type == "i2v":
            conditions = {"image_embeds": ([3, 3], config.image_embed_dim), **conditions}
        conditions["text"] = ([5, 3], config.text_embed_dim)
        return joint_batch(self.grids, config.in_channels * config.patch_values, conditions, generator)

    def outputs(self, reference: Any, config: Any, batch: Batch) -> list[Tensor]:
        outputs = []
        counts = [*map(prod, self.grids), PADDING]
        parts = (batch["latents"].split(counts)[:-1], samples_of(batch, "text"), samples_of(batch, "text_2"))
        for at, (grid, latents, text, second) in enumerate(zip(self.grids, *parts, strict=True)):
            # Features of zeros are those of no image.
            features = text.new_zeros(2, config.image_embed_dim)
            if "image_embeds" in batch:
                features = samples_of(batch, "image_embeds")[at]
            out = reference(
                from_patches(latents, grid, config.patch)[None],
                batch["timesteps"][at : at + 1].to(latents.dtype),
                text[None],
                torch.ones(1, len(text)),
                None,
                second[None],
                torch.ones(1, len(second)),
                features[None],
                return_dict=False,
            )
            outputs.append(to_patches(out[0][0], config.patch))
        return outputs
