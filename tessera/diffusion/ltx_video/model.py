"""LTX-Video: latents that attend to each other and to a caption, with rotations over all heads together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.core.outputs import LATENTS, Outputs
from tessera.diffusion.cross import latent_segments
from tessera.diffusion.ltx_video.config import TIME_FEATURES, LTXVideoConfig
from tessera.nn.dit import (
    CrossAttention,
    FeedForward,
    Modulation,
    PackedSelfAttention,
    TimeEmbedding,
    by_head,
    gated_sum,
    modulated_norm,
    time_index,
)
from tessera.nn.stage_carry import pack_carry, unpack_carry
from tessera.ops.pointwise import Angles, rotate

BASE = (20.0, 2048.0, 2048.0)  # seconds, and rows and columns of pixels, over which a rotation makes half a turn
THETA = 10_000.0


@dataclass(frozen=True)
class LTXVideoLayout:
    """Hold the inputs of all blocks that have no gradient."""

    angles: Angles
    times: Tensor | None  # [T]: which entry of the modulation belongs to each token; None: each has one
    segments: Segments  # of the whole sequence
    local: Segments  # of the tokens that this rank has
    text: Segments


class LTXVideoAttention(PackedSelfAttention):
    """Attend inside each sample. Positions rotate a token's features as if all heads were one, so every head has
    frequencies of its own."""

    def forward(self, x: Tensor, angles: Angles, segments: Segments) -> Tensor:
        q, k, v = self.qkv(x)
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k = (rotate(x.unsqueeze(1), angles, pairs=True) for x in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (by_head(x.flatten(1), None, self.head_dim) for x in (q, k, v))
        out: Tensor = self.out(self.core(q, k, v, segments).flatten(1))
        return out


class LTXVideoBlock(nn.Module):
    """Compute one block: attention among latents, attention to the caption, MLP. Norms have no weights."""

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_attention_heads, config.attention_head_dim
        self.eps = config.norm_eps
        self.modulation = Modulation(6, size)
        self.attn = LTXVideoAttention(size, heads, head_dim, "across_heads", 1e-5, config.attention)
        self.cross = CrossAttention(size, heads, head_dim, "across_heads", 1e-5, config.attention)
        self.mlp = FeedForward(size, 4 * size)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, layout: LTXVideoLayout) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(time, layout.times)
        attended = self.attn(self._normed(x, shift, scale), layout.angles, layout.segments)
        x = gated_sum(x, attended, gate)
        x = x + self.cross(x, text, layout.local, layout.text)
        return gated_sum(x, self.mlp(self._normed(x, mlp_shift, mlp_scale)), mlp_gate)

    def _normed(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * (1 + scale) + shift).to(x.dtype)


class LTXVideoEmbeddings(nn.Module):
    """Embed tokens and conditions: all that the blocks read and that has weights."""

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.patch = nn.Linear(config.in_channels, size)
        self.time = TimeEmbedding(TIME_FEATURES, size)
        self.modulation = nn.Linear(size, 6 * size)
        self.text = FeedForward(config.caption_channels, size, size)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedded tokens and text, and time [S, 7, D]: the embedding, then the modulation of blocks."""
        dtype = self.patch.weight.dtype
        time = self.time(batch["timesteps"])
        modulation = self.modulation(F.silu(time)).unflatten(-1, (6, -1))
        x, text = self.patch(batch["latents"].to(dtype)), self.text(batch["text"].to(dtype))
        return x, text, torch.cat([time.unsqueeze(1), modulation], dim=1)


class LTXVideoHead(nn.Module):
    """Predict the values of patches."""

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__()
        self.modulation = Modulation(2, config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.predicted)

    def forward(self, x: Tensor, time: Tensor, times: Tensor | None) -> Tensor:
        shift, scale = self.modulation(time, times)
        out: Tensor = self.proj(modulated_norm(x, shift, scale))
        return out


class LTXVideoModel(nn.Module):
    """Predict a velocity for each latent token. Batches are those of families with cross attention; besides, they may
    have `frame_rates` [S], the frames per second of each sample.

    Parts that are None are in another pipeline stage. `carry` holds the activation of the stage before: tokens, then
    text and time, which are computed once and travel with the tokens.
    """

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: LTXVideoEmbeddings | None = LTXVideoEmbeddings(config)
        self.blocks = nn.ModuleList(LTXVideoBlock(config) for _ in range(config.num_layers))
        self.head: LTXVideoHead | None = LTXVideoHead(config)

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Outputs | Tensor:
        if self.embed is not None:
            x, text, time = self.embed(batch)
        else:
            counts = (batch["sample_index"].shape[0], batch["text"].shape[0], 7 * batch["timesteps"].shape[0])
            x, text, time = unpack_carry(carry, *counts)
            time = time.view(-1, 7, time.shape[-1])
        layout = self._layout(batch)
        for block in self.blocks:
            if block is not None:
                x = block(x, text, time[:, 1:], layout)
        if self.head is None:
            return pack_carry(x, text, time.flatten(0, 1))
        return {LATENTS: self.head(x, time[:, :1], layout.times)}

    def _layout(self, batch: Batch) -> LTXVideoLayout:
        segments = batch.segments["latents"]
        return LTXVideoLayout(
            self._angles(batch), time_index(batch), segments, latent_segments(batch), batch.segments["text"]
        )

    def _angles(self, batch: Batch) -> Angles:
        """Return the rotation of every token, [T, hidden / 2]: products in fp32 in the published order, because the
        highest frequencies turn so often that another order gives another angle."""
        config = self.config
        frames, rows, columns = batch["positions"].float().unbind()
        steps = config.vae_compression
        rates: Tensor | float = config.frame_rate
        if "frame_rates" in batch:
            rates = batch["frame_rates"].float()[batch["sample_index"]]
        if config.coordinates == "frames":
            first = (frames * config.patch_size_t * steps[0] + (1 - steps[0])).clamp(min=0)
            axes = [first * (1.0 / rates), rows * config.patch_size * steps[1], columns * config.patch_size * steps[2]]
        else:
            axes = [frames * (steps[0] / rates) * config.patch_size_t]
            axes += [at * step * config.patch_size for at, step in ((rows, steps[1]), (columns, steps[2]))]
        places = torch.stack([axis / base for axis, base in zip(axes, BASE, strict=True)], dim=-1)  # [T, 3]
        size = config.hidden_size
        ladder = torch.linspace(0.0, 1.0, size // 6, device=places.device, dtype=torch.float32)
        turns = THETA**ladder * math.pi / 2.0
        angles = (turns * (places.unsqueeze(-1) * 2 - 1)).transpose(-1, -2).flatten(1)
        angles = F.pad(angles, (size // 2 - angles.shape[-1], 0))
        return Angles(angles.cos(), angles.sin())

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill an unsharded parameter with initial weights: the prediction begins at zero."""
        *path, kind = name.split(".")
        if kind == "bias" or path[:2] == ["head", "proj"]:
            tensor.zero_()
        elif path[-1].endswith("norm"):
            tensor.fill_(1.0)
        elif kind == "table":
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        else:
            bound = (6.0 / sum(tensor.shape)) ** 0.5
            tensor.uniform_(-bound, bound, generator=generator)
