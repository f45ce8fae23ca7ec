"""Generate for requests that join and leave a KV cache at random times. Prompts are read in chunks of random size, rows
pause while others decode, and blocks are reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS


@dataclass(eq=False)
class Request:
    """Hold a prompt of one segment, how many tokens to generate, and what is generated so far."""

    prompt: Batch
    new_tokens: int
    encoded: dict[str, Tensor] = field(default_factory=dict)  # embeddings of its media
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt["tokens"].shape[0]

    def need(self, block_size: int) -> int:
        """Return how many blocks it has at the end."""
        return -(-(self.length + self.new_tokens - 1) // block_size)

    def part(self, size: int) -> dict[str, Tensor]:
        """Return the next tokens of the prompt, or the last generated token, with their positions."""
        positions = self.prompt["positions"]
        if self.cached >= self.length:
            following = positions[..., -1].max() + 1 + self.cached - self.length
            return {"tokens": torch.tensor(self.tokens[-1:]), "positions": following.expand(*positions.shape[:-1], 1)}
        span = slice(self.cached, self.cached + size)
        return {"tokens": self.prompt["tokens"][span], "positions": positions[..., span]}

    def media(self, size: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by slots tensor: the slots among the next tokens, counted from the first of these, and embeddings."""
        parts = {}
        for name, embeddings in self.encoded.items():
            slots = self.prompt[name.replace("_embeddings", "_slots")]
            inside = (slots >= self.cached) & (slots < self.cached + size)
            if inside.any():
                parts[name] = (slots[inside] - self.cached, embeddings[inside])
        return parts


def generate(model: Any, requests: list[Request], seed: int, blocks: int, block_size: int, rows: int) -> int:
    """Fill `tokens` of all requests and return the number of calls. `rows`: how many may be in the cache at once."""
    chance = Random(seed)
    free = chance.sample(range(blocks), blocks)
    waiting, joined, calls = chance.sample(requests, len(requests)), list[Request](), 0
    cache = model.new_cache(blocks, block_size)
    while waiting or joined:
        while waiting and len(joined) < rows and chance.random() < 0.5:
            if sum(request.need(block_size) for request in [*joined, waiting[-1]]) > blocks:
                break
            joined.append(waiting.pop())
        parts: list[tuple[Request, int]] = []
        for request in chance.sample(joined, len(joined)):
            rest = request.length - request.cached
            size = chance.randint(1, rest) if rest > 0 else 1
            missing = -(-(request.cached + size) // block_size) - len(request.blocks)
            if chance.random() < 0.3:  # it pauses
                continue
            request.blocks += [free.pop() for _ in range(missing)]
            parts.append((request, size))
        if not parts:
            continue
        if chance.random() < 0.7:  # rows of one token first, as a scheduler would; any order is allowed
            parts.sort(key=lambda part: part[1] > 1)
        calls += 1
        step = CacheStep.of(
            [CacheRow(r.blocks, r.cached, size, r.cached + size >= r.length) for r, size in parts], block_size, "cpu"
        )
        logits = model(_packed(parts), logits="last", cache=cache, step=step)[LOGITS]
        chosen = iter(logits.argmax(-1).tolist())
        for request, size in parts:
            request.cached += size
            if request.cached >= request.length:
                request.tokens.append(next(chosen))
            if len(request.tokens) == request.new_tokens:
                joined.remove(request)
                free += request.blocks
                chance.shuffle(free)
    assert len(free) == blocks
    return calls


def _packed(parts: list[tuple[Request, int]]) -> Batch:
    """Return the new tokens of all rows, one row after another."""
    texts = [request.part(size) for request, size in parts]
    tensors = {name: torch.cat([text[name] for text in texts], dim=-1) for name in ("tokens", "positions")}
    media: dict[str, list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for request, size in parts:
        for name, (slots, embeddings) in request.media(size).items():
            media.setdefault(name, []).append((slots + start, embeddings))
        start += size
    for name, pieces in media.items():
        tensors[name.replace("_embeddings", "_slots")] = torch.cat([slots for slots, _ in pieces])
        tensors[name] = torch.cat([embeddings for _, embeddings in pieces])
    return Batch(tensors)
