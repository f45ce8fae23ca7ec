"""HunyuanVideo: refined text and latents in one sequence, in blocks with separate and then with shared weights."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.diffusion.hunyuan_video.config import HunyuanConfig, HunyuanVideoConfig
from tessera.nn.dit import FeedForward, TimeEmbedding
from tessera.nn.joint_attention import JointLayout, joint_layout
from tessera.nn.joint_transformer import GUIDANCE_UNIT, TIME_FEATURES, JointTransformer
from tessera.nn.token_refiner import TokenRefiner
from tessera.nn.vit import PatchEmbed
from tessera.ops.pointwise import axes_angles


def make_refiner(config: HunyuanConfig) -> TokenRefiner:
    size, heads, layers = config.hidden_size, config.num_attention_heads, config.num_refiner_layers
    return TokenRefiner(config.text_embed_dim, size, heads, layers, config.attention)


def make_layout(config: HunyuanConfig, batch: Batch) -> JointLayout:
    """Return the layout of a batch. Text is at position 0 and has no rotary positions."""
    angles = axes_angles(batch["positions"], config.rope_axes_dim, config.rope_theta)
    return joint_layout(batch, angles, rotate_text=False)


def rank_part(embedded: Tensor, batch: Batch, index: str) -> Tensor:
    """Return this rank's part of the embeddings. With context parallelism, every rank computes all embeddings."""
    sources = batch.get(f"{index}.sources")
    return embedded if sources is None else embedded.index_select(0, sources)


class HunyuanVideoEmbeddings(nn.Module):
    """Embed latents, text, and the conditions of a sample: time, pooled caption and guidance scale."""

    def __init__(self, config: HunyuanVideoConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.latents = PatchEmbed(config.in_channels * config.patch_values, size, bias=True)
        self.text = make_refiner(config)
        self.time = TimeEmbedding(TIME_FEATURES, size)
        self.pooled = FeedForward(config.pooled_projection_dim, size, size, F.silu)
        self.guidance = TimeEmbedding(TIME_FEATURES, size) if config.guidance_embeds else None
        self.replaces = config.shape.reference_time

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedded latents, embedded text, and a condition vector for each sample. If a conditioning first frame
        replaces its noisy latents, a condition vector at time 0 follows for each sample."""
        latents, times = self.latents(batch["latents"]), batch["timesteps"]
        text = self.text(batch["text"].to(latents.dtype), times, batch.segments["text"])
        pooled = self.pooled(batch["pooled"].to(latents.dtype))
        condition = self.time(times).to(latents.dtype) + pooled
        if self.guidance is not None:
            condition = condition + self.guidance(batch["guidance"] * GUIDANCE_UNIT)
        if self.replaces:
            condition = torch.cat([condition, self.time(torch.zeros_like(times)).to(latents.dtype) + pooled])
        return latents, rank_part(text, batch, "text_index"), F.silu(condition)


class HunyuanVideoModel(JointTransformer):
    """Predict a velocity for each latent token. Text and latents are one sequence. Batches also have `pooled` [S, W]
    and, for guidance-distilled models, `guidance` [S]. Conditioning frames that replace noisy latents use time 0."""

    def __init__(self, config: HunyuanVideoConfig) -> None:
        super().__init__(config.shape, HunyuanVideoEmbeddings(config))
        self.config = config

    def _layout(self, batch: Batch) -> JointLayout:
        layout = make_layout(self.config, batch)
        if not self.shape.reference_time:
            return layout
        index, samples = batch["latent_index"], batch["sample_index"]
        by_time = batch.with_tensors(sample_index=samples.index_add(0, index, self._time_offsets(batch)))
        return replace(layout, samples=make_layout(self.config, by_time).samples)

    def _by_time(self, layout: JointLayout, batch: Batch) -> JointLayout:
        if not self.shape.reference_time:
            return layout
        return replace(layout, latent_samples=layout.latent_samples + self._time_offsets(batch))

    def _time_offsets(self, batch: Batch) -> Tensor:
        """Return the offset of each latent token's condition vector: the first frame uses the vectors at time 0."""
        return (batch["positions"][0, batch["latent_index"]] == 0) * batch["timesteps"].shape[0]
