"""From logits to the next token. A row's draw depends on seed, row and step, never on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.core.errors import TesseraError
from tessera.core.rng import generator


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. `top_k` 0 and `top_p` 1 mean no limit; with both, k comes first."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise TesseraError(f"temperature is {self.temperature}", where="sampling", allowed=["0 and above"])
        if self.top_k < 0:
            raise TesseraError(f"top_k is {self.top_k}", where="sampling", allowed=["0 (no limit) and above"])
        if not 0 < self.top_p <= 1:
            raise TesseraError(f"top_p is {self.top_p}", where="sampling", allowed=["above 0, up to 1"])


class Chooser:
    """Chooses one token for every row, step after step."""

    def __init__(self, sampling: Sampling, rows: int) -> None:
        self._sampling = sampling
        # On the host: the same numbers on every device.
        self._generators = [generator("cpu", sampling.seed, "sample", row) for row in range(rows)]

    def choose(self, logits: Tensor) -> Tensor:
        """[rows, vocabulary] -> [rows]."""
        if self._sampling.temperature == 0:
            return logits.argmax(dim=-1)
        draws = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators])
        return pick(logits, self._sampling, draws.to(logits.device, torch.float32))


def pick(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """The tokens at which the sum of the allowed probabilities, likeliest first, passes `draws` in [0, 1)."""
    scores, order = (logits.float() / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scores.shape[-1]:
        scores[:, sampling.top_k :] = -torch.inf
    chances = scores.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    chances = chances.masked_fill(before >= sampling.top_p, 0.0)
    chances[:, 0] += chances.sum(dim=-1) == 0  # rounding never leaves nothing to choose from
    reached = chances.cumsum(dim=-1)
    place = torch.searchsorted(reached, draws[:, None] * reached[:, -1:], right=True)
    last = (chances > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(place, last)).squeeze(-1)
