"""From features of a tower to embeddings of the text."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.norm import LayerNorm
from tessera.nn.vit import ACTIVATIONS
from tessera.ops.glu import swiglu


class PatchMerger(nn.Module):
    """Joins the features of neighbouring patches (they lie one after another) into one embedding.

    `inner`: how wide it is in between, as wide as the joined features if nothing is said. `norm_joined`: features are
    normalised when they are joined, instead of patch by patch.
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
        out: Tensor = self.down(F.gelu(self.up(joined)))
        return out


class MLPProjector(nn.Module):
    """Each feature becomes one embedding. With a `newline`, a learned embedding comes before all of them: what ends a
    line of a picture, for `media_index` to choose."""

    def __init__(
        self, features: int, hidden: int, *, activation: str = "gelu", bias: bool = True, newline: bool = False
    ) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.down = nn.Linear(hidden, hidden, bias=bias)
        self.newline = nn.Parameter(torch.empty(hidden)) if newline else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out if self.newline is None else torch.cat([self.newline.to(out.dtype).unsqueeze(0), out])


class DeepStackMerger(nn.Module):
    """Of a tower with taps: the last block's features become an embedding, and behind it, in one wide row, come those
    of each tap, which a decoder adds after its first layers."""

    def __init__(self, features: int, merge: int, hidden: int, taps: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.features = features
        self.last = PatchMerger(features, merge, hidden, eps)
        self.taps = nn.ModuleList(PatchMerger(features, merge, hidden, eps, norm_joined=True) for _ in range(taps))

    def forward(self, x: Tensor) -> Tensor:
        last, *tapped = torch.split(x, self.features, dim=-1)
        made = [self.last(last), *(merge(part) for merge, part in zip(self.taps, tapped, strict=True))]
        return torch.cat(made, dim=-1)


class DownsampleMerger(nn.Module):
    """Joins the features of neighbouring patches by one product (a convolution in disguise), and makes an embedding of
    what comes out by a gated MLP. It is as wide as the text from the first product on."""

    def __init__(self, features: int, merge: int, hidden: int, intermediate: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.joined = features * merge**2
        self.downsample = nn.Linear(self.joined, hidden)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = LayerNorm(hidden, eps)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.proj(self.downsample(x.reshape(-1, self.joined)))))
        out: Tensor = self.down(swiglu(self.gate(x), self.up(x)))
        return out
