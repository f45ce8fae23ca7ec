"""LTX-Video: latents attend to each other and to a caption, with rotary positions over all heads together."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Batch, Segments
from tessera.diffusion.cross import CrossLayout, CrossTransformer
from tessera.diffusion.ltx_video.config import LTXVideoConfig
from tessera.nn.dit import CrossAttention, FeedForward, Modulation, PackedSelfAttention, by_head, gated_sum
from tessera.ops.pointwise import Angles, rotate

BASE = (20.0, 2048.0, 2048.0)  # seconds, pixel rows, pixel columns for half a turn of the lowest rotary frequency
THETA = 10_000.0
_EPS = 1e-6  # epsilon of the norm before the output layer


class LTXVideoAttention(PackedSelfAttention):
    """Attend inside each sample. Rotary positions treat all heads as one vector, so each head has its own
    frequencies."""

    def forward(self, x: Tensor, angles: Angles, segments: Segments) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x)
        q, k = (rotate(x.unsqueeze(1), angles, pairs=True) for x in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (by_head(x.flatten(1), None, self.head_dim) for x in (q, k, v))
        return self.out(self.core(q, k, v, segments).flatten(1))


class LTXVideoBlock(nn.Module):
    """Compute self-attention, cross attention to the caption, and an MLP. Norms have no weights."""

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_attention_heads, config.attention_head_dim
        self.eps = config.norm_eps
        self.modulation = Modulation(6, size)
        self.attn = LTXVideoAttention(size, heads, head_dim, 1e-5, config.attention)
        self.cross = CrossAttention(size, heads, head_dim, 1e-5, config.attention)
        self.mlp = FeedForward(size, 4 * size)

    def forward(self, x: Tensor, text: Tensor, image: None, modulation: Tensor, layout: CrossLayout) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(modulation, layout.times)
        attended = self.attn(self._normed(x, shift, scale), layout.angles, layout.segments)
        x = gated_sum(x, attended, gate)
        x = x + self.cross(x, text, layout.local, layout.text)
        return gated_sum(x, self.mlp(self._normed(x, mlp_shift, mlp_scale)), mlp_gate)

    def _normed(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * (1 + scale) + shift).to(x.dtype)


class LTXVideoModel(CrossTransformer):
    """Predict a velocity for each latent token. Batches may have `frame_rates` [S], the frames per second of each
    sample."""

    def __init__(self, config: LTXVideoConfig) -> None:
        super().__init__(config.shape, lambda: LTXVideoBlock(config), _EPS)
        self.config = config

    def angles(self, batch: Batch) -> Angles:
        """Return the rotary angles of every token, [T, hidden / 2], in float32. The order of operations is that of the
        published code: another order would round angles of the highest frequencies differently."""
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
