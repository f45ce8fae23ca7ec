"""Rows shared by several ranks: attention that reaches over all of a row, and towers that deal pictures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.core.types import Batch, Segments
from tessera.ops.registry import AUTO
from tessera.parallel.axes import CONTEXT, DEAL, RING, ULYSSES
from tessera.parallel.context.deal import Split
from tessera.parallel.context.ring import Course, Ring, ring_attention
from tessera.parallel.context.ulysses import Ulysses
from tessera.parallel.mesh import Mesh
from tessera.parallel.planning.context import ContextPlan, TowerPart
from tessera.parallel.wrapping import present, wrap_submodule


def apply_context(module: nn.Module, plan: ContextPlan, mesh: Mesh) -> None:
    """`module` may be a stage: what the plan names and the module lacks is passed over."""
    for path in present(module, plan.attention):
        wrap_submodule(module, path, partial(ContextAttention, split=plan.split, mesh=mesh))
    for tower in plan.towers:
        for path in present(module, tower.attention):
            assert tower.split is not None
            wrap_submodule(module, path, partial(ContextAttention, split=tower.split, mesh=mesh))
        if tower.ends_with is None or present(module, [tower.ends_with]):
            module.get_submodule(tower.path).register_forward_hook(Gather(tower, mesh))


class ContextAttention(nn.Module):
    """Attention whose tokens lie on several ranks, in place of one that has them all (`core`, which has no weights).

    Same call: queries, keys and values of the own tokens, segments of all tokens. If the own ones are all there are,
    rows have not been shared (as in generating), and nobody else is needed.
    """

    def __init__(self, core: nn.Module, split: Split, mesh: Mesh) -> None:
        super().__init__()
        self.core = core
        self.split = split
        ulysses, ring = mesh.group(ULYSSES), mesh.group(RING)
        self.ulysses = None if ulysses is None else Ulysses(ulysses, split.ulysses, mesh.position(ULYSSES))
        self.ring = None if ring is None else Ring(ring, split.ring, mesh.position(RING))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        lengths = segments.lengths or tuple(segments.bounds.diff().tolist())
        rows = sum(lengths)
        if q.shape[0] == rows:
            whole: Tensor = self.core(q, k, v, segments)
            return whole
        heads = q.shape[1]
        sizes = self.split.sizes(rows, 0 if self.ring is None else self.ring.at)
        if self.ulysses is not None:
            q, k, v = self.ulysses.to_heads(q, k, v, sizes)
        out: Tensor
        if self.ring is None:
            out = self.core(q, k, v, segments)
        else:
            out = ring_attention(q, k, v, segments, self._course(self.ring, rows, lengths, q.shape[-1]))
        return out if self.ulysses is None else self.ulysses.to_tokens(out, heads, sizes)

    def _course(self, ring: Ring, rows: int, lengths: tuple[int, ...], size: int) -> Course:
        """The plan has seen that `core` is causal or full, and nothing else."""
        named = getattr(self.core, "implementation", AUTO)
        return Course(
            ring,
            [self.split.of_ring(rows, at) for at in range(ring.ranks)],
            lengths,
            bool(self.core.causal),
            getattr(self.core, "scale", None) or size**-0.5,
            "eager" if named == "eager" else AUTO,  # other names are of ways to compute a whole attention
        )


class Gather:
    """A hook on a tower: from features of the own pieces, or parts of pieces, to those of all, in order.

    Every rank uses all of them, for its own tokens. So a feature's gradient is the sum over ranks that have other
    tokens; ranks that compute the same tokens together have it whole already.
    """

    def __init__(self, tower: TowerPart, mesh: Mesh) -> None:
        self.tower = tower
        self.deal = mesh.group(DEAL)
        # Often the same ranks: then one group of them does.
        same = mesh.axes.views[DEAL] == mesh.axes.views[CONTEXT]
        self.context = self.deal if same else mesh.group(CONTEXT)
        self.place = mesh.position(DEAL)
        self.context_place = mesh.position(CONTEXT)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], features: Tensor) -> Tensor:
        batch: Batch = args[0]
        if self.tower.split is not None:
            features = _gathered(features, batch, self.tower.shared_key, self.context, self.context, self.context_place)
        if self.tower.dealt > 1:
            over = None if self.tower.split is not None else self.context
            features = _gathered(features, batch, self.tower.dealt_key, self.deal, over, self.place)
        return features


def _gathered(
    features: Tensor,
    batch: Batch,
    key: str,
    group: dist.ProcessGroup | None,
    summed: dist.ProcessGroup | None,
    place: int,
) -> Tensor:
    """A batch without the key was not dealt. One without pictures leaves the features of a blank one as they are."""
    if key not in batch.segments or batch.segments[key].longest == 0:
        return features
    rows = batch.segments[key].lengths
    found: Tensor = _GatherRows.apply(features[: rows[place]], batch[key], batch.segments[key].longest, group, summed)
    return found


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        places: Tensor,
        longest: int,
        group: dist.ProcessGroup,
        summed: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows, ctx.longest, ctx.group, ctx.summed = own.shape[0], longest, group, summed
        padded = own.new_zeros(longest, own.shape[1])
        padded[: own.shape[0]] = own
        everyone = own.new_empty(dist.get_world_size(group) * longest, own.shape[1])
        dist.all_gather_into_tensor(everyone, padded, group=group)
        return everyone.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        ranks, place = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        padded = grads[0].new_zeros(ranks * ctx.longest, grads[0].shape[1]).index_copy(0, places, grads[0])
        if ctx.summed is not None:
            # Ranks that share rows are the outer axis of those that deal: each gets the sums of what lies with it.
            inner = ranks // dist.get_world_size(ctx.summed)
            part = padded.new_empty(inner * ctx.longest, padded.shape[1])
            dist.reduce_scatter_tensor(part, padded, group=ctx.summed)
            padded, place = part, place % inner
        start = place * ctx.longest
        return padded[start : start + ctx.rows], None, None, None, None
