"""Attention over tokens that lie on a ring of ranks: keys and values travel around, queries stay.

Two chunks of a packed row that lie apart share one segment at most: the one that reaches from the one into the other.
All of its tokens here see all of its tokens there, or none does. So what a rank computes with the keys of another are
rectangles without a mask, and their extents are known on the host; only a rank's own tokens need packed attention.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.core.dist import wait_for
from tessera.core.types import Segments
from tessera.ops.block_attention import block_attention, block_attention_backward, join, wide
from tessera.ops.registry import AUTO
from tessera.parallel.context.deal import Range

_KEYS, _GRADIENTS = 0, 1  # tags: two kinds of parcels are under way at once in backward


@dataclass(frozen=True)
class Ring:
    group: dist.ProcessGroup
    ranks: int
    at: int

    def owner(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.at - step) % self.ranks

    def pass_on(self, sent: Tensor, shape: Sequence[int], tag: int) -> Parcel:
        """To the next rank, while one of `shape` comes from the rank before."""
        after, before = (dist.get_global_rank(self.group, self.owner(step)) for step in (-1, 1))
        received = sent.new_empty(shape)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, self.group, tag),
                dist.P2POp(dist.irecv, received, before, self.group, tag),
            ]
        )
        return Parcel(received, sent, works)


@dataclass(frozen=True)
class Parcel:
    received: Tensor
    sent: Tensor  # kept alive until it has gone
    works: list[Any]

    def arrive(self) -> Tensor:
        wait_for(self.works)
        return self.received


@dataclass(frozen=True)
class Course:
    """What does not change on the way: who has which tokens, and how they attend."""

    ring: Ring
    ranges: Sequence[Sequence[Range]]  # of each rank of the ring
    lengths: Sequence[int]  # of the segments of all tokens
    causal: bool
    scale: float
    implementation: str = AUTO

    def rows(self, rank: int) -> int:
        return sum(end - start for start, end in self.ranges[rank])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own: Segments | None = None) -> tuple[Tensor, Tensor]:
        causal = self.causal and own is not None
        return block_attention(q, k, v, pieces=own, causal=causal, scale=self.scale, implementation=self.implementation)

    def backward(self, *tensors: Tensor, own: Segments | None = None) -> tuple[Tensor, Tensor, Tensor]:
        causal = self.causal and own is not None
        return block_attention_backward(
            *tensors, pieces=own, causal=causal, scale=self.scale, implementation=self.implementation
        )

    def rectangles(self, owner: int) -> Iterator[tuple[slice, slice]]:
        """(own queries, keys of `owner`) as places among the tokens of each."""
        bounds = [0, *accumulate(self.lengths)]
        for (q_start, q_end), q_at in _with_places(self.ranges[self.ring.at]):
            for (k_start, k_end), k_at in _with_places(self.ranges[owner]):
                if k_start < q_start:
                    first, last = _piece_at(bounds, q_start)
                    queries, keys = (q_start, min(q_end, last)), (max(k_start, first), k_end)
                elif not self.causal:
                    first, last = _piece_at(bounds, k_start)
                    queries, keys = (max(q_start, first), q_end), (k_start, min(k_end, last))
                else:
                    continue
                if queries[0] < queries[1] and keys[0] < keys[1]:
                    yield _moved(queries, q_at - q_start), _moved(keys, k_at - k_start)


def own_segments(segments: Segments, ranges: Sequence[Range]) -> Segments:
    """Of a rank's own tokens, joined. A segment that has tokens in two of its chunks is one piece here as well. The
    bounds are computed where they are, so nothing is waited for."""
    ends = list(accumulate(segments.lengths))
    lengths = [
        sum(max(0, min(end, stop) - max(end - length, start)) for start, stop in ranges)
        for end, length in zip(ends, segments.lengths, strict=True)
    ]
    clipped = [(segments.bounds - start).clamp(0, stop - start) for start, stop in ranges]
    return Segments(torch.stack(clipped).sum(0, dtype=segments.bounds.dtype), max(lengths), tuple(lengths))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, course: Course) -> Tensor:
    """`q`, `k`, `v` of this rank's tokens; `segments` of all tokens."""
    own = own_segments(segments, course.ranges[course.ring.at])
    out: Tensor = _RingAttention.apply(q, k, v, own, course)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Segments, course: Course) -> Tensor:
        keys = torch.stack((k, v))
        under_way = _next_keys(course, keys, 0)
        part, lse = course.forward(q, k, v, own)
        out = wide(part)
        for step in range(1, course.ring.ranks):
            assert under_way is not None
            keys = under_way.arrive()
            under_way = _next_keys(course, keys, step)
            for rows, columns in course.rectangles(course.ring.owner(step)):
                join(out, lse, rows, *course.forward(q[rows], *keys[:, columns]))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, own.bounds)
        ctx.own, ctx.course = own, course
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Keys travel once more. Their gradients travel behind them, grow at each rank, and end at their owner."""
        q, k, v, out, lse, bounds = ctx.saved_tensors
        course: Course = ctx.course
        grad, keys = grads[0].contiguous(), torch.stack((k, v))
        under_way = _next_keys(course, keys, 0)
        d_q, d_k, d_v = course.backward(grad, q, k, v, out, lse, own=replace(ctx.own, bounds=bounds))
        d_q = wide(d_q)
        d_under_way = _pass_gradients(course, wide(torch.stack((d_k, d_v))), 0)
        for step in range(1, course.ring.ranks):
            assert under_way is not None
            keys = under_way.arrive()
            under_way = _next_keys(course, keys, step)
            d_keys = keys.new_zeros(keys.shape, dtype=d_q.dtype)
            for rows, columns in course.rectangles(course.ring.owner(step)):
                part = course.backward(grad[rows], q[rows], *keys[:, columns], out[rows], lse[:, rows])
                d_q[rows] += part[0]
                d_keys[0, columns] += part[1]
                d_keys[1, columns] += part[2]
            d_under_way = _pass_gradients(course, d_keys.add_(d_under_way.arrive()), step)
        d_k, d_v = d_under_way.arrive()
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _next_keys(course: Course, keys: Tensor, step: int) -> Parcel | None:
    """Under way before this step's are used; after the last step nobody wants them."""
    ring = course.ring
    if step == ring.ranks - 1:
        return None
    return ring.pass_on(keys, (2, course.rows(ring.owner(step + 1)), *keys.shape[2:]), _KEYS)


def _pass_gradients(course: Course, d_keys: Tensor, step: int) -> Parcel:
    ring = course.ring
    return ring.pass_on(d_keys, (2, course.rows(ring.owner(step + 1)), *d_keys.shape[2:]), _GRADIENTS)


def _with_places(ranges: Sequence[Range]) -> Iterator[tuple[Range, int]]:
    at = 0
    for start, end in ranges:
        yield (start, end), at
        at += end - start


def _piece_at(bounds: Sequence[int], token: int) -> Range:
    number = bisect_right(bounds, token) - 1
    return bounds[number], bounds[number + 1]


def _moved(rows: Range, by: int) -> slice:
    return slice(rows[0] + by, rows[1] + by)
