"""Wan: latents of a video attend to each other, to the text and to embeddings of conditioning images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.diffusion.cross import CrossLayout, CrossTransformer
from tessera.diffusion.wan.config import WanConfig
from tessera.errors import TesseraError
from tessera.nn.dit import (
    CrossAttention,
    FeatureRMSNorm,
    FeedForward,
    Modulation,
    PackedSelfAttention,
    Projections,
    WideLayerNorm,
    by_head,
    gated_sum,
    modulated_norm,
)
from tessera.ops.pointwise import Angles, axes_angles


class ImageProjection(nn.Module):
    """Project embeddings of conditioning images for cross attention. `positions`: learned positions per sample."""

    def __init__(self, size: int, hidden: int, positions: int | None) -> None:
        super().__init__()
        self.norm_in = WideLayerNorm(size, 1e-5)
        self.mlp = FeedForward(size, size, hidden, F.gelu)
        self.norm_out = WideLayerNorm(hidden, 1e-5)
        self.positions = None if positions is None else nn.Parameter(torch.empty(positions, size))

    def forward(self, embeds: Tensor) -> Tensor:
        if self.positions is not None:
            if embeds.shape[0] % self.positions.shape[0]:
                raise TesseraError(
                    f"{embeds.shape[0]} image embeddings are not a multiple of {self.positions.shape[0]} per sample",
                    where="image_embeds",
                    fix="set train.task_options.given=first_last: this model needs the first and the last frame",
                    code="generation.image-embedding-mismatch",
                )
            repeats = embeds.shape[0] // self.positions.shape[0]
            embeds = embeds + self.positions.to(embeds.dtype).repeat(repeats, 1)
        return self.norm_out(self.mlp(self.norm_in(embeds)))


class TextAndImageAttention(CrossAttention):
    """Compute cross attention to text. Embeddings of conditioning images have separate key and value projections."""

    def __init__(self, config: WanConfig) -> None:
        heads, size = config.num_attention_heads, config.attention_head_dim
        super().__init__(config.hidden, heads, size, config.eps, config.attention)
        images = config.image_dim is not None
        self.image_kv = Projections(config.hidden, k=config.hidden, v=config.hidden) if images else None
        self.image_norm = FeatureRMSNorm(config.hidden, config.eps) if images else None

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None, layout: CrossLayout) -> Tensor:  # type: ignore[override]
        q = by_head(self.q(x), self.q_norm, self.head_dim)
        attended = self.attend(q, self.kv(text), self.k_norm, layout.local, layout.text)
        if self.image_kv is not None:
            assert layout.image is not None
            attended = attended + self.attend(q, self.image_kv(image), self.image_norm, layout.local, layout.image)
        return self.out(attended.flatten(1))


class WanBlock(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        heads, size = config.num_attention_heads, config.attention_head_dim
        self.eps = config.eps
        self.modulation = Modulation(6, config.hidden)
        self.attn = PackedSelfAttention(config.hidden, heads, size, config.eps, config.attention)
        self.cross_norm = WideLayerNorm(config.hidden, config.eps) if config.cross_attn_norm else None
        self.cross = TextAndImageAttention(config)
        self.mlp = FeedForward(config.hidden, config.ffn_dim)

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None, modulation: Tensor, layout: CrossLayout) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(modulation, layout.times)
        attended = self.attn(modulated_norm(x, shift, scale, self.eps), layout.angles, layout.segments)
        x = gated_sum(x, attended, gate)
        x = x + self.cross(x if self.cross_norm is None else self.cross_norm(x), text, image, layout)
        return gated_sum(x, self.mlp(modulated_norm(x, mlp_shift, mlp_scale, self.eps)), mlp_gate)


class WanModel(CrossTransformer):
    """Predict a velocity for each token. Weights are initialized as in the published code."""

    narrow_init = ("text", "time")

    def __init__(self, config: WanConfig) -> None:
        embeds = config.image_dim
        image = None if embeds is None else ImageProjection(embeds, config.hidden, config.pos_embed_seq_len)
        super().__init__(config.shape, lambda: WanBlock(config), config.eps, image)
        self.config = config

    def angles(self, batch: Batch) -> Angles:
        return axes_angles(batch["positions"], self.config.rope_sizes, 10_000.0)
