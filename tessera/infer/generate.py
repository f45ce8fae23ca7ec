"""One token after another: the prompt is read once into a cache, then every token costs one token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tessera.core.errors import TesseraError
from tessera.core.types import Batch
from tessera.infer.sampling import Chooser, Sampling


@torch.no_grad()
def generate(
    model: Any,
    batch: Batch,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    sampling: Sampling,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continues every segment of a prompt batch (see `Processor.prompt`) and returns the new tokens of each.

    `model` is called as `model(batch, logits="last", cache=cache)`; `model.new_cache(rows, capacity)` makes the cache.
    A row ends before a stop token and produces nothing more while others go on. `on_token(row, token)` is called for
    each token as it comes.
    """
    segments = batch.segments["text"]
    rows = segments.bounds.numel() - 1
    if max_new_tokens < 0:
        raise TesseraError(f"max_new_tokens is {max_new_tokens}", allowed=["0 and above"])
    produced: list[list[int]] = [[] for _ in range(rows)]
    if rows == 0 or max_new_tokens == 0:
        return produced
    stops = set(stop_tokens)
    done = [False] * rows
    chooser = Chooser(sampling, rows)
    cache = model.new_cache(rows, segments.longest + max_new_tokens)
    positions = _next_positions(batch)
    step = batch
    for count in range(max_new_tokens):
        logits = model(step, logits="last", cache=cache).logits
        _check_numbers(logits)
        chosen = chooser.choose(logits)
        for row, token in enumerate(chosen.tolist()):
            if done[row] or token in stops:
                done[row] = True
                continue
            produced[row].append(token)
            if on_token is not None:
                on_token(row, token)
        if all(done):
            break
        step = Batch({"tokens": chosen, "positions": positions + count})
    return produced


def _next_positions(batch: Batch) -> Tensor:
    """[3, rows] or [rows]: one past the largest position of each prompt, which with images is not its length. An answer
    that is trained on stands there too (see `grid_positions`)."""
    positions, bounds = batch["positions"], batch.segments["text"].bounds.tolist()
    starts = [positions[..., a:b].max() + 1 for a, b in pairwise(bounds)]
    following = torch.stack(starts)
    return following.expand(3, -1) if positions.dim() == 2 else following


def _check_numbers(logits: Tensor) -> None:
    if logits.isnan().any():
        raise TesseraError(
            "the model's output is not a number (nan)",
            fix="its weights are damaged or its training diverged: look at the loss, or take an older checkpoint",
        )
