"""Projectors: from features of an encoder to embeddings of the text decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.layers import LayerNorm
from tessera.nn.vit import ACTIVATIONS
from tessera.ops.pointwise import swiglu


class PatchMerger(nn.Module):
    """Merge the features of adjacent patches into one embedding.

    `inner`: inner width of the MLP; default: width of the merged features. `norm_joined`: normalise merged features
    instead of each patch's.
    """

    def __init__(
        self,
        features: int,
        merge: int,
        hidden: int,
        eps: float = 1e-6,
        *,
        inner: int | None = None,
        norm_joined: bool = False,
        norm: Callable[[int, float], nn.Module] = LayerNorm,
    ) -> None:
        super().__init__()
        self.joined = features * merge**2
        self.norm = norm(self.joined if norm_joined else features, eps)
        self.norm_joined = norm_joined
        self.up = nn.Linear(self.joined, inner or self.joined)
        self.down = nn.Linear(inner or self.joined, hidden)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.norm(x.reshape(-1, self.joined)) if self.norm_joined else self.norm(x).reshape(-1, self.joined)
        return self.down(F.gelu(self.up(joined)))


class MLPProjector(nn.Module):
    """Project each feature to an embedding. `inner`: inner width; default: width of the embedding.

    `newline`: put a learned embedding, which ends a line of an image, before all others; `media_index` 0 selects it.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        inner: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        newline: bool = False,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(features, inner or hidden, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.down = nn.Linear(inner or hidden, hidden, bias=bias)
        self.newline = nn.Parameter(torch.empty(hidden)) if newline else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out if self.newline is None else torch.cat([self.newline.to(out.dtype).unsqueeze(0), out])


class DeepStackMerger(nn.Module):
    """Merge adjacent patches (see `PatchMerger`) of the last block and of `taps` DeepStack blocks.

    Features [..., (1 + taps) * features] are concatenated along channels, the last block first, and so are the
    embeddings [N, (1 + taps) * hidden]. The decoder adds DeepStack embeddings after its first layers.
    """

    def __init__(self, features: int, merge: int, hidden: int, taps: int) -> None:
        super().__init__()
        self.features = features
        self.last = PatchMerger(features, merge, hidden)
        self.taps = nn.ModuleList(PatchMerger(features, merge, hidden, norm_joined=True) for _ in range(taps))

    def forward(self, x: Tensor) -> Tensor:
        last, *tapped = torch.split(x, self.features, dim=-1)
        embeddings = [self.last(last), *(merge(part) for merge, part in zip(self.taps, tapped, strict=True))]
        return torch.cat(embeddings, dim=-1)


class DownsampleMerger(nn.Module):
    """Merge the features of adjacent patches with a linear layer (a strided convolution) and a gated MLP."""

    def __init__(self, features: int, merge: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.joined = features * merge**2
        self.downsample = nn.Linear(self.joined, hidden)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = LayerNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.proj(self.downsample(x.reshape(-1, self.joined)))))
        return self.down(swiglu(self.gate(x), self.up(x)))
