"""What ranks among which experts are dealt or sliced send each other in a step, if tokens choose evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.parallel.axes import EP, TENSOR
from tessera.parallel.plan import Plan
from tessera.parallel.planning.holdings import Piece
from tessera.parallel.traffic.lines import Traffic

INDEX = 8  # bytes of the number of an expert


def expert_traffic(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    experts = plan.experts
    if experts is None:
        return
    for path, chosen in experts.choices.items():
        if not any(piece.name.startswith(path + ".") for piece in here):
            continue
        passes = 2 if any(path == r.path or path.startswith(r.path + ".") for r in plan.recompute) else 1
        yield from _layer(plan, chosen, _hidden(plan, path), passes)


def _hidden(plan: Plan, path: str) -> int:
    """Of the dimension that tp does not cut."""
    assert plan.experts is not None
    name, cut = next(iter(plan.experts.stacks[path].items()))
    shape = next(piece.shape for piece in plan.pieces if piece.name == f"{path}.{name}")
    return shape[2 if cut == 1 else 1]


def _layer(plan: Plan, chosen: int, width: int, passes: int) -> Iterator[Traffic]:
    assert plan.experts is not None
    size, count, tokens = plan.param_dtype.itemsize, plan.microbatches, plan.rows[""]
    if plan.experts.ep > 1:
        # There and back; in backward likewise.
        exchanged = tokens * chosen * width * size
        yield Traffic(EP, "all-to-all", 2 * count * (passes + 1), 2 * count * (passes + 1) * exchanged)
    if plan.experts.tp == 1:
        return
    axis = plan.axes.label(TENSOR)
    whole, weights, ids = tokens * width * size, tokens * chosen * size, tokens * chosen * INDEX
    if plan.experts.sequence:
        yield Traffic(axis, "all-gather", 3 * count * passes, count * passes * (whole + weights + ids))
        yield Traffic(axis, "reduce-scatter", 2 * count, count * (whole + weights))
        yield Traffic(axis, "reduce-scatter", count * passes, count * passes * whole)
        yield Traffic(axis, "all-gather", count, count * whole)
    else:
        yield Traffic(axis, "all-reduce", 2 * count, count * (whole + weights))
        yield Traffic(axis, "all-reduce", count * passes, count * passes * whole)
