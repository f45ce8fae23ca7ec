"""Compute attention over tokens of several ranks: exchange heads for tokens (Ulysses), or pass keys around a ring.

Ulysses: ranks with some tokens of all heads exchange them for all tokens of some heads, and back. The number of ranks
need not divide tokens or heads. Key and value heads are sent to all ranks whose query heads read them.

Ring: keys and values travel around the ranks, queries stay.

Two disjoint chunks of a packed row have at most one segment in common. Under a causal or full mask either all of its
queries in one chunk attend to all of its keys in the other, or none do. So attention to keys of another rank consists
of rectangles without a mask, whose sizes are known on the host; only attention to a rank's own keys needs segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.block_attention import block_attention, block_attention_backward, join, wide
from tessera.ops.registry import AUTO
from tessera.parallel.collectives import all_to_all
from tessera.parallel.sequence_sharding import Range, lengths_inside
from tessera.runtime.distributed import wait_for

# Tags of point-to-point messages: in backward, a rank sends keys and gradients to the same rank at the same time.
_KEYS, _GRADIENTS = 0, 1


@dataclass(frozen=True)
class Ring:
    group: dist.ProcessGroup
    ranks: int
    at: int

    def owner(self, step: int) -> int:
        """Return the ring position of the keys that this rank has after `step` steps."""
        return (self.at - step) % self.ranks

    def pass_on(self, sent: Tensor, shape: Sequence[int], tag: int) -> P2PExchange:
        """Send a tensor to the next rank and receive a tensor of `shape` from the rank before."""
        after, before = (dist.get_global_rank(self.group, self.owner(step)) for step in (-1, 1))
        received = sent.new_empty(shape)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, self.group, tag),
                dist.P2POp(dist.irecv, received, before, self.group, tag),
            ]
        )
        return P2PExchange(received, sent, works)


@dataclass(frozen=True)
class P2PExchange:
    received: Tensor
    sent: Tensor  # referenced here so that it is not freed before it is sent
    works: list[Any]

    def wait(self) -> Tensor:
        wait_for(self.works)
        return self.received


@dataclass(frozen=True)
class RingSchedule:
    """Hold the constants of a pass around the ring: the tokens of each rank, and the attention parameters."""

    ring: Ring
    ranges: Sequence[Sequence[Range]]  # token ranges of each ring rank
    lengths: Sequence[int]  # segment lengths of the full sequence
    causal: bool
    scale: float
    implementation: str = AUTO

    def rows(self, rank: int) -> int:
        return sum(end - start for start, end in self.ranges[rank])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None = None) -> tuple[Tensor, Tensor]:
        causal = self.causal and segments is not None
        return block_attention(
            q, k, v, segments=segments, causal=causal, scale=self.scale, implementation=self.implementation
        )

    def backward(self, *tensors: Tensor, segments: Segments | None = None) -> tuple[Tensor, Tensor, Tensor]:
        causal = self.causal and segments is not None
        return block_attention_backward(
            *tensors, segments=segments, causal=causal, scale=self.scale, implementation=self.implementation
        )

    def rectangles(self, owner: int) -> Iterator[tuple[slice, slice]]:
        """Yield the blocks of the attention matrix to compute: (slice of own queries, slice of `owner`'s keys)."""
        bounds = [0, *accumulate(self.lengths)]
        for (q_start, q_end), q_at in _with_offsets(self.ranges[self.ring.at]):
            for (k_start, k_end), k_at in _with_offsets(self.ranges[owner]):
                if k_start < q_start:
                    first, last = _segment_at(bounds, q_start)
                    queries, keys = (q_start, min(q_end, last)), (max(k_start, first), k_end)
                elif not self.causal:
                    first, last = _segment_at(bounds, k_start)
                    queries, keys = (max(q_start, first), q_end), (k_start, min(k_end, last))
                else:
                    continue
                if queries[0] < queries[1] and keys[0] < keys[1]:
                    yield _moved(queries, q_at - q_start), _moved(keys, k_at - k_start)


def own_segments(segments: Segments, ranges: Sequence[Range]) -> Segments:
    """Return the segments of a rank's tokens, which are two ranges. A segment in both ranges stays one segment.

    Bounds are computed on the device, so the host does not wait for it.
    """
    lengths = lengths_inside(segments.lengths, ranges)
    clipped = [(segments.bounds - start).clamp(0, stop - start) for start, stop in ranges]
    return Segments(torch.stack(clipped).sum(0, dtype=segments.bounds.dtype), max(lengths), tuple(lengths))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, course: RingSchedule) -> Tensor:
    """Return the attention outputs of this rank's tokens. `segments`: segments of the full sequence."""
    local = own_segments(segments, course.ranges[course.ring.at])
    out: Tensor = _RingAttention.apply(q, k, v, local, course)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, local: Segments, course: RingSchedule) -> Tensor:
        keys = torch.stack((k, v))
        incoming = _next_keys(course, keys, 0)
        part, lse = course.forward(q, k, v, local)
        out = wide(part)
        for step in range(1, course.ring.ranks):
            assert incoming is not None
            keys = incoming.wait()
            incoming = _next_keys(course, keys, step)
            for rows, columns in course.rectangles(course.ring.owner(step)):
                join(out, lse, rows, *course.forward(q[rows], *keys[:, columns]))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, local.bounds)
        ctx.segments, ctx.course = local, course
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Pass keys around the ring again, and their gradients after them; each rank adds to these gradients."""
        q, k, v, out, lse, bounds = ctx.saved_tensors
        course: RingSchedule = ctx.course
        grad, keys = grads[0].contiguous(), torch.stack((k, v))
        incoming = _next_keys(course, keys, 0)
        d_q, d_k, d_v = course.backward(grad, q, k, v, out, lse, segments=replace(ctx.segments, bounds=bounds))
        d_q = wide(d_q)
        d_incoming = _pass_gradients(course, wide(torch.stack((d_k, d_v))), 0)
        for step in range(1, course.ring.ranks):
            assert incoming is not None
            keys = incoming.wait()
            incoming = _next_keys(course, keys, step)
            d_keys = keys.new_zeros(keys.shape, dtype=d_q.dtype)
            for rows, columns in course.rectangles(course.ring.owner(step)):
                part = course.backward(grad[rows], q[rows], *keys[:, columns], out[rows], lse[:, rows])
                d_q[rows] += part[0]
                d_keys[0, columns] += part[1]
                d_keys[1, columns] += part[2]
            d_incoming = _pass_gradients(course, d_keys.add_(d_incoming.wait()), step)
        d_k, d_v = d_incoming.wait()
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _next_keys(course: RingSchedule, keys: Tensor, step: int) -> P2PExchange | None:
    """Start sending keys to the next rank while this step uses them. Return None in the last step."""
    ring = course.ring
    if step == ring.ranks - 1:
        return None
    return ring.pass_on(keys, (2, course.rows(ring.owner(step + 1)), *keys.shape[2:]), _KEYS)


def _pass_gradients(course: RingSchedule, d_keys: Tensor, step: int) -> P2PExchange:
    ring = course.ring
    return ring.pass_on(d_keys, (2, course.rows(ring.owner(step + 1)), *d_keys.shape[2:]), _GRADIENTS)


def _with_offsets(ranges: Sequence[Range]) -> Iterator[tuple[Range, int]]:
    at = 0
    for start, end in ranges:
        yield (start, end), at
        at += end - start


def _segment_at(bounds: Sequence[int], token: int) -> Range:
    number = bisect_right(bounds, token) - 1
    return bounds[number], bounds[number + 1]


def _moved(rows: Range, by: int) -> slice:
    return slice(rows[0] + by, rows[1] + by)


# ---------------------------------------------------------------------------------------------- Ulysses


@dataclass(frozen=True)
class HeadSharding:
    """Hold the heads of each rank: the number of query heads, and the indices of key heads."""

    queries: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]


def shard_heads(heads: int, kv_heads: int, ranks: int) -> HeadSharding:
    """Assign heads to ranks.

    Grouped-query attention needs equally many query heads per key head. A rank whose query heads do not allow this
    repeats key heads, one for each query head.
    """
    group = heads // kv_heads
    ends = [heads * rank // ranks for rank in range(ranks + 1)]
    keys = []
    for first, end in pairwise(ends):
        wanted = tuple(head // group for head in range(first, end))
        distinct = tuple(dict.fromkeys(wanted))
        often = len(wanted) // max(len(distinct), 1)
        in_groups = wanted == tuple(key for key in distinct for _ in range(often))
        keys.append(distinct if in_groups else wanted)
    return HeadSharding(tuple(end - first for first, end in pairwise(ends)), tuple(keys))


@dataclass(frozen=True)
class Ulysses:
    group: dist.ProcessGroup
    ranks: int
    at: int

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange tokens for heads: return all tokens of this rank's heads. `sizes`: tokens of each rank."""
        sharding = shard_heads(q.shape[1], k.shape[1], self.ranks)
        often = [sum(keys.count(head) for keys in sharding.keys) for head in range(k.shape[1])]
        kv_counts = [len(keys) for keys in sharding.keys]
        by_rank = zip(
            q.split(list(sharding.queries), 1),
            _repeated(k, often).split(kv_counts, 1),
            _repeated(v, often).split(kv_counts, 1),
            strict=True,
        )
        sent = [torch.cat(parts, 1) for parts in by_rank]  # [own tokens, heads of a rank, D]
        own_q, own_kv, size = sharding.queries[self.at], kv_counts[self.at], q.shape[2]
        width = (own_q + 2 * own_kv) * size
        flat = all_to_all(
            torch.cat([part.reshape(-1) for part in sent]),
            [part.numel() for part in sent],
            [tokens * width for tokens in sizes],
            self.group,
        )
        all_tokens = flat.view(sum(sizes), own_q + 2 * own_kv, size)
        split: tuple[Tensor, Tensor, Tensor] = all_tokens.split([own_q, own_kv, own_kv], 1)
        return split

    def to_tokens(self, out: Tensor, heads: int, sizes: Sequence[int]) -> Tensor:
        """Return `out` [all tokens, own heads, D] as [own tokens, all of the `heads`, D]."""
        width = out.shape[1] * out.shape[2]
        queries = shard_heads(heads, heads, self.ranks).queries
        tokens_here = sizes[self.at]
        flat = all_to_all(
            out.reshape(-1),
            [tokens * width for tokens in sizes],
            [tokens_here * count * out.shape[2] for count in queries],
            self.group,
        )
        parts = flat.split([tokens_here * count * out.shape[2] for count in queries])
        return torch.cat([part.view(tokens_here, -1, out.shape[2]) for part in parts], 1)


def _repeated(x: Tensor, often: Sequence[int]) -> Tensor:
    """Repeat head i `often[i]` times. An index tensor would be copied from the host, so it uses slices instead."""
    if all(count == 1 for count in often):
        return x
    return torch.cat([head.expand(-1, count, -1) for head, count in zip(x.split(1, 1), often, strict=True)], 1)
