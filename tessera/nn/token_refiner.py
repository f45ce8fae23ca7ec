"""A small transformer over the text of each sample, with gates from the timestep and the mean text embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.core.batch import Segments
from tessera.nn.dit import FeedForward, Projections, TimeEmbedding, by_head, gated_sum, spread
from tessera.nn.layers import LayerNorm, PackedAttention
from tessera.ops.registry import AUTO
from tessera.ops.rows import segment_of

TIME_FEATURES = 256
_MLP_RATIO = 4


def segment_means(x: Tensor, segments: Segments) -> Tensor:
    """Return the mean [S, D] of each segment of `x` [T, D] in fp32, zero for empty segments."""
    counts = segments.bounds.diff()
    inside = torch.arange(counts.shape[0], device=x.device).unsqueeze(1) == segment_of(segments, x.shape[0])
    return inside.float() @ x.float() / counts.clamp(min=1).unsqueeze(1)


class RefinerBlock(nn.Module):
    """Compute attention within the text of each sample and an MLP. `condition` gives the gates of their outputs."""

    def __init__(self, size: int, heads: int, attention: str) -> None:
        super().__init__()
        self.head_dim = size // heads
        self.attn_norm, self.mlp_norm = LayerNorm(size, 1e-6), LayerNorm(size, 1e-6)
        self.qkv = Projections(size, q=size, k=size, v=size)
        self.core = PackedAttention(False, attention, self.head_dim)
        self.out = nn.Linear(size, size)
        self.mlp = FeedForward(size, _MLP_RATIO * size, activation=F.silu)
        self.modulation = nn.Linear(size, 2 * size)

    def forward(self, x: Tensor, condition: Tensor, samples: Tensor, segments: Segments) -> Tensor:
        gate, mlp_gate = spread(self.modulation(condition), samples).chunk(2, dim=-1)
        q, k, v = (by_head(part, None, self.head_dim) for part in self.qkv(self.attn_norm(x)))
        x = gated_sum(x, self.out(self.core(q, k, v, segments).flatten(1)), gate)
        return gated_sum(x, self.mlp(self.mlp_norm(x)), mlp_gate)


class TokenRefiner(nn.Module):
    """Embed text [L, W] and let the tokens of each sample attend to each other."""

    def __init__(self, text_width: int, size: int, heads: int, layers: int, attention: str = AUTO) -> None:
        super().__init__()
        self.embed = nn.Linear(text_width, size)
        self.time = TimeEmbedding(TIME_FEATURES, size)
        self.pooled = FeedForward(text_width, size, size, F.silu)
        self.blocks = nn.ModuleList(RefinerBlock(size, heads, attention) for _ in range(layers))

    def forward(self, text: Tensor, timesteps: Tensor, segments: Segments) -> Tensor:
        condition = F.silu(self.time(timesteps) + self.pooled(segment_means(text, segments).to(text.dtype)))
        samples = segment_of(segments, text.shape[0])
        x: Tensor = self.embed(text)
        for block in self.blocks:
            x = block(x, condition, samples, segments)
        return x
