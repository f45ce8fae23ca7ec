"""Wan: latents of a video attend to each other and to the text, modulated by time.

Batches have `latents` [T, patch values], `positions` [3, T] (frame, row, column, in patches), `sample_index` [T],
`timesteps`, `text` [L, width] and, where the configuration says so, `image_embeds` [M, width]; see `diffusion.batches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.outputs import LATENTS, Outputs
from tessera.diffusion.cross import latent_segments
from tessera.diffusion.wan.config import WanConfig
from tessera.errors import TesseraError
from tessera.nn.dit import (
    CrossAttention,
    FeatureRMSNorm,
    FeedForward,
    Modulation,
    PackedSelfAttention,
    Projections,
    TimeEmbedding,
    WideLayerNorm,
    by_head,
    gated_sum,
    modulated_norm,
    time_index,
)
from tessera.nn.stage_carry import pack_carry, unpack_carry
from tessera.nn.vit import PatchEmbed
from tessera.ops.pointwise import Angles, axes_angles


@dataclass(frozen=True)
class WanLayout:
    """Hold the inputs of all blocks that have no gradient."""

    angles: Angles
    times: Tensor | None  # [T]: which entry of the modulation belongs to each token; see `time_index`
    segments: Segments  # of the whole sequence
    local: Segments  # of the tokens that this rank has
    text: Segments
    image: Segments | None


class ImageProjection(nn.Module):
    """Turn embeddings of given images into keys for cross attention; `positions` of them are those of one sample."""

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
                    f"{embeds.shape[0]} image embeddings are not whole samples of {self.positions.shape[0]}",
                    where="image_embeds",
                    fix="give the embeddings of the first and of the last frame of every sample",
                    code="generation.image-embedding-mismatch",
                )
            repeats = embeds.shape[0] // self.positions.shape[0]
            embeds = embeds + self.positions.to(embeds.dtype).repeat(repeats, 1)
        out: Tensor = self.norm_out(self.mlp(self.norm_in(embeds)))
        return out


class WanEmbeddings(nn.Module):
    """Embed tokens and conditions: all that the blocks read and that has weights."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.patch = PatchEmbed(config.patch_values, hidden, bias=True)
        self.time = TimeEmbedding(config.freq_dim, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.text = FeedForward(config.text_dim, hidden, hidden)
        image = config.image_dim
        self.image = None if image is None else ImageProjection(image, hidden, config.pos_embed_seq_len)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return embedded tokens, text and images, and time [S, 7, D]: the embedding, then the modulation of blocks."""
        x: Tensor = self.patch(batch["latents"])
        time = self.time(batch["timesteps"]).to(x.dtype)
        modulation = self.modulation(F.silu(time)).view(time.shape[0], 6, -1)
        image = None if self.image is None else self.image(batch["image_embeds"].to(x.dtype))
        return x, self.text(batch["text"].to(x.dtype)), image, torch.cat([time.unsqueeze(1), modulation], dim=1)


class TextAndImageAttention(CrossAttention):
    """Attend to text and, with keys and values of their own, to embeddings of given images."""

    def __init__(self, config: WanConfig) -> None:
        heads, size = config.num_attention_heads, config.attention_head_dim
        super().__init__(config.hidden, heads, size, "across_heads", config.eps, config.attention)
        images = config.image_dim is not None
        self.image_kv = Projections(config.hidden, k=config.hidden, v=config.hidden) if images else None
        self.image_norm = FeatureRMSNorm(config.hidden, config.eps) if images else None

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None, layout: WanLayout) -> Tensor:  # type: ignore[override]
        q = by_head(self.q(x), self.q_norm, self.head_dim)
        attended = self.attend(q, self.kv(text), self.k_norm, layout.local, layout.text)
        if self.image_kv is not None:
            assert layout.image is not None
            attended = attended + self.attend(q, self.image_kv(image), self.image_norm, layout.local, layout.image)
        out: Tensor = self.out(attended.flatten(1))
        return out


class WanBlock(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        heads, size = config.num_attention_heads, config.attention_head_dim
        self.eps = config.eps
        self.modulation = Modulation(6, config.hidden)
        self.attn = PackedSelfAttention(config.hidden, heads, size, "across_heads", config.eps, config.attention)
        self.cross_norm = WideLayerNorm(config.hidden, config.eps) if config.cross_attn_norm else None
        self.cross = TextAndImageAttention(config)
        self.mlp = FeedForward(config.hidden, config.ffn_dim)

    def forward(self, x: Tensor, text: Tensor, image: Tensor | None, modulation: Tensor, layout: WanLayout) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(modulation, layout.times)
        attended = self.attn(modulated_norm(x, shift, scale, self.eps), layout.angles, layout.segments)
        x = gated_sum(x, attended, gate)
        x = x + self.cross(x if self.cross_norm is None else self.cross_norm(x), text, image, layout)
        return gated_sum(x, self.mlp(modulated_norm(x, mlp_shift, mlp_scale, self.eps)), mlp_gate)


class WanHead(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = Modulation(2, config.hidden)
        self.proj = nn.Linear(config.hidden, config.out_channels * prod(config.patch_size))

    def forward(self, x: Tensor, time: Tensor, times: Tensor | None) -> Tensor:
        shift, scale = self.modulation(time.unsqueeze(1), times)
        out: Tensor = self.proj(modulated_norm(x, shift, scale, self.eps))
        return out


class WanModel(nn.Module):
    """Predict a velocity for each token.

    Parts that are None are in another pipeline stage. `carry` holds the activation of the stage before: tokens, then
    text, image embeddings and time, which are computed once and travel with the tokens.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: WanEmbeddings | None = WanEmbeddings(config)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.head: WanHead | None = WanHead(config)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Outputs | Tensor:
        if self.embed is not None:
            x, text, image, time = self.embed(batch)
        else:
            x, text, image, time = self._unpacked(carry, batch)
        layout = self._layout(batch)
        for block in self.blocks:
            if block is not None:
                x = block(x, text, image, time[:, 1:], layout)
        if self.head is None:
            parts = (text, image, time.flatten(0, 1))
            return pack_carry(x, *(part for part in parts if part is not None))
        return {LATENTS: self.head(x, time[:, 0], layout.times)}

    def _layout(self, batch: Batch) -> WanLayout:
        segments = batch.segments["latents"]
        return WanLayout(
            axes_angles(batch["positions"], self.config.rope_sizes, 10_000.0),
            time_index(batch),
            segments,
            latent_segments(batch),
            batch.segments["text"],
            batch.segments.get("image_embeds"),
        )

    def _unpacked(self, carry: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        embeds = batch.get("image_embeds")
        images = 0 if self.config.image_dim is None or embeds is None else embeds.shape[0]
        counts = (batch["latents"].shape[0], batch["text"].shape[0], images, 7 * batch["timesteps"].shape[0])
        x, text, image, time = unpack_carry(carry, *counts)
        return x, text, image if images else None, time.view(-1, 7, time.shape[-1])

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill an unsharded parameter with the initial weights of the published code."""
        *path, kind = name.split(".")
        if kind in ("bias", "positions") or path[:2] == ["head", "proj"]:
            tensor.zero_()
        elif "norm" in path[-1]:
            tensor.fill_(1.0)
        elif kind == "table":
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        elif path[:2] in (["embed", "text"], ["embed", "time"]):
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            bound = (6.0 / sum(tensor.shape)) ** 0.5
            tensor.uniform_(-bound, bound, generator=generator)
