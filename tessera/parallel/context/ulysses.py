"""Tokens for heads: ranks that each have some tokens of all heads get all tokens of some heads, and back.

Neither tokens nor heads need divide by the ranks. Keys and values go where the queries that read them go; heads that
several ranks read are sent to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.parallel.collectives import all_to_all


@dataclass(frozen=True)
class Hands:
    """Which heads each rank gets: so many queries, and these keys and values."""

    queries: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]


def deal_heads(heads: int, kv_heads: int, ranks: int) -> Hands:
    """Attention takes queries that share keys in groups of one size. Where a rank's share does not fall into such, it
    gets a key for each query."""
    group = heads // kv_heads
    ends = [heads * rank // ranks for rank in range(ranks + 1)]
    keys = []
    for first, end in pairwise(ends):
        wanted = tuple(head // group for head in range(first, end))
        distinct = tuple(dict.fromkeys(wanted))
        often = len(wanted) // max(len(distinct), 1)
        in_groups = wanted == tuple(key for key in distinct for _ in range(often))
        keys.append(distinct if in_groups else wanted)
    return Hands(tuple(end - first for first, end in pairwise(ends)), tuple(keys))


@dataclass(frozen=True)
class Ulysses:
    group: dist.ProcessGroup
    ranks: int
    at: int

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """`sizes`: tokens of each rank. One exchange for all three."""
        hands = deal_heads(q.shape[1], k.shape[1], self.ranks)
        often = [sum(keys.count(head) for keys in hands.keys) for head in range(k.shape[1])]
        kv_counts = [len(keys) for keys in hands.keys]
        by_rank = zip(
            q.split(list(hands.queries), 1),
            _repeated(k, often).split(kv_counts, 1),
            _repeated(v, often).split(kv_counts, 1),
            strict=True,
        )
        sent = [torch.cat(parts, 1) for parts in by_rank]  # [own tokens, heads of a rank, D]
        own_q, own_kv, size = hands.queries[self.at], kv_counts[self.at], q.shape[2]
        width = (own_q + 2 * own_kv) * size
        flat = all_to_all(
            torch.cat([part.reshape(-1) for part in sent]),
            [part.numel() for part in sent],
            [tokens * width for tokens in sizes],
            self.group,
        )
        all_tokens = flat.view(sum(sizes), own_q + 2 * own_kv, size)
        found: tuple[Tensor, Tensor, Tensor] = all_tokens.split([own_q, own_kv, own_kv], 1)
        return found

    def to_tokens(self, out: Tensor, heads: int, sizes: Sequence[int]) -> Tensor:
        """`out` [all tokens, own heads, D] -> [own tokens, all of the `heads`, D]."""
        width = out.shape[1] * out.shape[2]
        queries = deal_heads(heads, heads, self.ranks).queries
        own = sizes[self.at]
        flat = all_to_all(
            out.reshape(-1),
            [tokens * width for tokens in sizes],
            [own * count * out.shape[2] for count in queries],
            self.group,
        )
        parts = flat.split([own * count * out.shape[2] for count in queries])
        return torch.cat([part.view(own, -1, out.shape[2]) for part in parts], 1)


def _repeated(x: Tensor, often: Sequence[int]) -> Tensor:
    """Head i `often[i]` times. No index: that would have to come from the host."""
    if all(count == 1 for count in often):
        return x
    return torch.cat([head.expand(-1, count, -1) for head, count in zip(x.split(1, 1), often, strict=True)], 1)
