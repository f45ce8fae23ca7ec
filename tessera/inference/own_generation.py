"""Generation by models that are classes of another library: they have a cache, positions and a loop of their own.

The engine does not run them: a class answers one batch of prompts after another. Sampling is that of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.engine.failures import not_finite_error
from tessera.engine.request import Request, Sampling
from tessera.engine.sampler import Sampler


@dataclass(frozen=True)
class OwnGeneration:
    """Hold a module with its own generation method, and the function that calls it (see `ModelSpec.generate`)."""

    module: Any
    generate: Callable[..., list[list[int]]]

    @torch.no_grad()
    def answer(
        self,
        batch: Batch,
        *,
        max_new_tokens: int,
        stop_tokens: Collection[int],
        sampling: Sampling,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of every prompt in a batch. `on_token(row, token)` is called for each of them."""
        rows = range(batch.segments["text"].bounds.numel() - 1)
        if not rows or not max_new_tokens:
            return [[] for _ in rows]
        sampler: Sampler | None = None

        def choose(logits: Tensor) -> Tensor:
            nonlocal sampler
            if sampler is None:
                sampler = Sampler(len(rows), logits.shape[-1], logits.device)
                for row in rows:
                    sampler.join(row, Request(batch, sampling.nth(row)))
            sampled = sampler.sample(logits, rows)
            if sampled.not_finite.any():
                raise not_finite_error()
            return sampled.tokens

        return self.generate(
            self.module,
            batch,
            max_new_tokens=max_new_tokens,
            stop_tokens=set(stop_tokens),
            choose=choose,
            greedy=sampling.temperature == 0,
            on_token=on_token,
        )
