"""What a step will send, from the plan alone: bytes by collective and axis, for a rank at one position of a pipeline.

`tools.dry_run` counts the same by running a step in a world that does not exist; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.core.pattern import home
from tessera.parallel.axes import REPLICATE, TP_REST
from tessera.parallel.plan import Plan
from tessera.parallel.planning.holdings import Piece, of_stage
from tessera.parallel.traffic.context import context_traffic
from tessera.parallel.traffic.experts import expert_traffic
from tessera.parallel.traffic.lines import Traffic, added_up
from tessera.parallel.traffic.pipeline import pipeline_traffic
from tessera.parallel.traffic.tensor import tensor_traffic


def forecast(plan: Plan, position: int = 0) -> list[Traffic]:
    here = of_stage(plan.pieces, plan.pipeline, position)
    return added_up(
        [
            *_sharding(plan, here),
            *tensor_traffic(plan, here),
            *context_traffic(plan, here),
            *expert_traffic(plan, here),
            *pipeline_traffic(plan, position),
        ]
    )


def _sharding(plan: Plan, here: Sequence[Piece]) -> Iterator[Traffic]:
    """fully_shard gathers a group of weights before it is used, and sums its gradients into shares."""
    if not plan.sharded:
        return
    for group, members in _groups(plan, here).items():
        members = [piece for piece in members if piece.shape and not piece.whole]
        if not members:
            continue
        axis = plan.axes.label(members[0].view)
        padded = sum(piece.held * piece.shared_by for piece in members)
        trained = [piece for piece in members if piece.trained]
        if plan.axes.size(members[0].view) > 1:
            gathers = _gathers(plan, group)
            yield Traffic(axis, "all-gather", gathers, gathers * padded * plan.param_dtype.itemsize)
            if trained:
                size = sum(piece.held * piece.shared_by for piece in trained) * plan.reduce_dtype.itemsize
                yield Traffic(axis, "reduce-scatter", _reductions(plan), _reductions(plan) * size)
        if trained and plan.replicate > 1:
            size = sum(piece.held for piece in trained) * plan.reduce_dtype.itemsize
            yield Traffic(REPLICATE, "all-reduce", _reductions(plan), _reductions(plan) * size)


def _groups(plan: Plan, here: Sequence[Piece]) -> dict[str, list[Piece]]:
    """By the innermost shard group that a parameter lies in; "" is the root."""
    paths = set(plan.blocks)
    if plan.experts is not None:
        paths |= set(plan.experts.modules)
    if plan.tensor is not None and TP_REST in plan.axes.root:
        paths |= set(plan.tensor.towers)
    found: dict[str, list[Piece]] = {}
    for piece in here:
        found.setdefault(home(piece.name, paths) or "", []).append(piece)
    return found


def _gathers(plan: Plan, group: str) -> int:
    """In a pipeline weights stay gathered until the step ends; otherwise until a micro-batch does, or its forward."""
    again = bool(plan.reshard_after_forward) and group != "" and _gathered_for_backward(plan, group)
    if plan.pipeline is not None and not again:
        return 1
    return plan.microbatches * (2 if again else 1)


def _gathered_for_backward(plan: Plan, group: str) -> bool:
    """Where backward passes; and, for nothing, those that a block behind looks ahead to."""
    if plan.gradient_reaches(group) or group not in plan.blocks:
        return True
    at = plan.blocks.index(group)
    behind = plan.blocks[at + 1 : at + 1 + max(1, plan.prefetch_backward)]
    return any(plan.gradient_reaches(block) for block in behind)


def _reductions(plan: Plan) -> int:
    return 1 if plan.accumulate == "local" or plan.pipeline is not None else plan.microbatches
