"""What the ranks of a pipeline send each other in a step."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.parallel.axes import PP
from tessera.parallel.plan import Plan
from tessera.parallel.traffic.lines import Traffic


def pipeline_traffic(plan: Plan, position: int) -> Iterator[Traffic]:
    """Carries go forward, their gradients come back; stages on one rank hand over without sending."""
    pipeline = plan.pipeline
    if pipeline is None:
        return
    count = pipeline.microbatches
    for stage in pipeline.stages_of(position):
        if stage + 1 < len(pipeline.stages) and pipeline.owner[stage + 1] != position:
            yield Traffic(PP, "send", count, count * _carried(plan, stage))
        if stage > 0 and pipeline.owner[stage - 1] != position and pipeline.needs_gradient(stage - 1, plan.pieces):
            yield Traffic(PP, "send", count, count * _carried(plan, stage - 1))
    for piece in plan.pieces:
        if piece.name in pipeline.copies and piece.trained:
            homes = {pipeline.owner[pipeline.home(piece.name)], pipeline.owner[-1]}
            if position in homes and len(homes) > 1:
                yield Traffic(PP, "send", 1, piece.held * plan.storage_dtype.itemsize)


def _carried(plan: Plan, stage: int) -> int:
    assert plan.pipeline is not None
    planned = plan.pipeline.stages[stage]
    assert planned.hands_on is not None
    tokens = plan.pipeline.tokens if planned.media else plan.rows[""]
    return planned.hands_on.rows_per_token * tokens * planned.hands_on.width * plan.param_dtype.itemsize
