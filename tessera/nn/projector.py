"""From features of a tower to embeddings of the text."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.norm import LayerNorm


class PatchMerger(nn.Module):
    """Joins the features of neighbouring patches (they lie one after another) into one embedding."""

    def __init__(self, features: int, merge: int, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.joined = features * merge**2
        self.norm = LayerNorm(features, eps)
        self.up = nn.Linear(self.joined, self.joined)
        self.down = nn.Linear(self.joined, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x).reshape(-1, self.joined))))
        return out
