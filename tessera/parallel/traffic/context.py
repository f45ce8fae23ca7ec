"""What ranks that share rows, and ranks that deal pictures, send each other in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.parallel.axes import CONTEXT, DEAL, RING, ULYSSES
from tessera.parallel.context.ulysses import deal_heads
from tessera.parallel.plan import Plan
from tessera.parallel.planning.context import Heads
from tessera.parallel.planning.holdings import Piece
from tessera.parallel.traffic.lines import Traffic

WIDE = 4  # bytes: gradients of keys travel in fp32


def context_traffic(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    if plan.context is None:
        return
    for path, heads in plan.context.attention.items():
        if heads is not None and _is_here(path, here):
            passes = 2 if any(path.startswith(part.path + ".") for part in plan.recompute) else 1
            yield from _attention(plan, heads, passes)
    yield from _dealt_features(plan, here)


def _attention(plan: Plan, heads: Heads, forwards: int) -> Iterator[Traffic]:
    """Of one layer, at the first rank: the others differ by a row or a head where these do not divide."""
    ring, ulysses = plan.axes.size(RING), plan.axes.size(ULYSSES)
    split, size = plan.context.split if plan.context else None, plan.param_dtype.itemsize
    assert split is not None
    tokens = plan.workload.tokens
    keys = heads.keys
    if ulysses > 1:
        hands = deal_heads(heads.queries, heads.keys, ulysses)
        keys = len(hands.keys[0])
        own, joined = split.sizes(tokens, 0)[0], sum(split.sizes(tokens, 0))
        sent = own * (heads.queries + 2 * sum(len(k) for k in hands.keys))
        got = joined * (hands.queries[0] + 2 * keys)
        out = max(own * heads.queries, joined * hands.queries[0])
        exchanged = (max(sent, got) + out) * heads.size * size
        count = plan.microbatches * (forwards + 1)
        yield Traffic(ULYSSES, "all-to-all", 2 * count, count * exchanged)
    if ring > 1:
        rows = sum(end - start for start, end in split.of_ring(tokens, 0))
        parcel = 2 * rows * keys * heads.size
        travels = plan.microbatches * (forwards + 1) * (ring - 1)
        yield Traffic(RING, "send", travels, travels * parcel * size)
        back = plan.microbatches * ring
        yield Traffic(RING, "send", back, back * parcel * WIDE)


def _dealt_features(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    """Features of the pictures that each rank looked at, gathered where the tower ends; their gradients come back."""
    assert plan.context is not None
    for tower in plan.context.towers:
        if tower.dealt == 1 or not _is_here(f"{tower.ends_with}.x", here):
            continue
        width = next(p.shape[0] for p in plan.pieces if p.name.startswith(tower.path + ".") and "norm" in p.name)
        size = plan.rows[tower.path] * tower.dealt * width * plan.param_dtype.itemsize
        yield Traffic(plan.axes.label(DEAL), "all-gather", plan.microbatches, plan.microbatches * size)
        if plan.axes.size(CONTEXT) > 1 and plan.gradient_reaches(tower.path):
            axis = plan.axes.label(CONTEXT)
            yield Traffic(axis, "reduce-scatter", plan.microbatches, plan.microbatches * size)


def _is_here(path: str, here: Sequence[Piece]) -> bool:
    layer = path.rpartition(".")[0]
    return any(piece.name.startswith(layer + ".") for piece in here)
