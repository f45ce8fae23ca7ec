"""Models as engines run them: a module alone, and a model whose next token follows from the last one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.cache import CacheStep
from tessera.engine.offline import answers_to
from tessera.engine.request import Sampling
from tessera.nn.cache import KVCache


@dataclass(frozen=True)
class BareModel:
    """Hold a model without a processor: answers have no text."""

    generator: Any
    module: nn.Module
    over_ranks: bool = False
    processor: Any = None

    @staticmethod
    def of(model: Any, processor: Any = None, over_ranks: bool = False) -> BareModel:
        return BareModel(model, model if isinstance(model, nn.Module) else nn.Module(), over_ranks, processor)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Counter:
    """Say (last token + 1) in each row, and remember the calls."""

    vocabulary = 20

    def __init__(self) -> None:
        self.calls: list[tuple[Batch, CacheStep]] = []

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        cache = KVCache(blocks, block_size)
        cache.allocate(0, torch.zeros(1, 1, 1))
        return cache

    def __call__(self, batch: Batch, logits: str, cache: KVCache, step: CacheStep) -> dict[str, Tensor]:
        self.calls.append((batch, step))
        return {"logits": self.logits(batch["tokens"][step.last])}

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits after these tokens."""
        return 10.0 * torch.nn.functional.one_hot((tokens + 1) % self.vocabulary, self.vocabulary)


def new_tokens(
    model: Any,
    batch: Batch,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    sampling: Sampling | None = None,
    over_ranks: bool = False,
) -> list[list[int]]:
    """Return what a model answers to the prompts of a batch."""
    bare = BareModel.of(model, over_ranks=over_ranks)
    answers = answers_to(bare, batch, stop_tokens, max_new_tokens, sampling or Sampling())
    return [list(answer.tokens) for answer in answers]
