"""Describe pipeline schedules: requirements, the rank of each stage, and the fraction of time that ranks wait.

No process group is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tessera.config.run_config import ParallelSection, Schedule
from tessera.errors import TesseraError
from tessera.runtime.torch_internals import schedule_actions

SINGLE: tuple[Schedule, ...] = ("gpipe", "1f1b")  # one stage on each rank
# These split backward: gradients of inputs first, gradients of weights later.
SPLITS_BACKWARD: tuple[Schedule, ...] = ("interleaved-zb", "zbv")
_WORK = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # cost of an action relative to a forward pass
_WORK_UNSPLIT = {"F": 1.0, "B": 2.0, "I": 2.0, "W": 0.0}
_SPELLED = re.compile(r"(\d+)([FBIW])(\d+)")  # an action as torch prints it: stage, kind, micro-batch
_SEEN = 4  # rounds of micro-batches to simulate; the time of more rounds follows from the slowest rank

Action = tuple[int, str, int]  # (stage, kind, micro-batch); F: forward, B: backward, I and W: its input and weight half


def schedule_class(schedule: Schedule) -> Any:
    """Return torch's class of a schedule. Import it here: `torch.distributed.pipelining` imports the slow compiler."""
    from torch.distributed import pipelining

    classes: dict[Schedule, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }
    return classes[schedule]


def resolve_schedule(section: ParallelSection, microbatches: int) -> tuple[Schedule, int]:
    """Return (schedule, stages on each rank), with defaults where the recipe has no such key.

    With fewer micro-batches than pipeline ranks the default is gpipe, since torch's 1f1b then raises an error.
    """
    virtual = section.virtual or (2 if section.schedule == "zbv" else 1)
    single: Schedule = "1f1b" if microbatches >= section.pp else "gpipe"
    schedule: Schedule = section.schedule or ("interleaved" if virtual > 1 else single)
    if schedule == "zbv" and virtual != 2:
        raise TesseraError(
            f"schedule zbv has two stages on each rank, not {virtual}",
            where="parallel.virtual",
            allowed=["2"],
            code="layout.schedule-virtual",
        )
    if schedule in SINGLE and virtual > 1:
        raise TesseraError(
            f"schedule {schedule} has one stage on each rank, not {virtual}",
            where="parallel.schedule and parallel.virtual",
            fix="parallel.schedule: interleaved, or parallel.virtual: 1",
            code="layout.schedule-virtual",
        )
    return schedule, virtual


def placement(schedule: Schedule, pp: int, count: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: 0..pp-1 repeated, or for zbv 0..pp-1 and back to 0."""
    if schedule == "zbv":
        return tuple(stage if stage < pp else count - 1 - stage for stage in range(count))
    return tuple(stage % pp for stage in range(count))


def check_microbatches(schedule: Schedule, pp: int, microbatches: int, rows_of_each: int) -> None:
    """Raise if a schedule does not support this number of micro-batches.

    `rows_of_each`: rows that all data-parallel ranks together compute in one micro-batch.
    """
    if _serves(schedule, pp, microbatches):
        return
    below = next((m for m in range(microbatches - 1, 0, -1) if _serves(schedule, pp, m)), None)
    above = next(m for m in range(microbatches + 1, microbatches + 2 * pp + 1) if _serves(schedule, pp, m))
    near = [m for m in (below, above) if m is not None]
    needs = f"at least {pp}" if schedule == "1f1b" else "rounds of equal size"
    raise TesseraError(
        f"schedule {schedule} over {pp} ranks needs {needs}, and a step has {microbatches} micro-batches",
        where="train.global_batch",
        allowed=[m * rows_of_each for m in near],
        fix=f"train.global_batch: {near[-1] * rows_of_each}, or another parallel.schedule",
        code="layout.schedule-microbatches",
    )


def _serves(schedule: Schedule, pp: int, microbatches: int) -> bool:
    """Return whether torch's schedule accepts this number of micro-batches."""
    if schedule == "1f1b":
        return microbatches >= pp
    if schedule in ("interleaved", "interleaved-zb"):
        return microbatches % max(1, microbatches // pp) == 0
    return True


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def splits_at_functions() -> bool:
    """Return whether torch can split the backward of a stage whose output comes from a custom `autograd.Function`.

    Split: into gradients of inputs and of weights. Torch 2.11 cannot; newer versions may, so this function tries it.
    """
    x = torch.ones((), requires_grad=True)
    y = _Twice.apply(x)
    node = y.grad_fn
    y.detach_()
    try:
        (gradient,) = torch.autograd.grad([GradientEdge(node, 0)], [x], grad_outputs=[torch.ones(())])
    except RuntimeError:
        return False
    return float(gradient) == 2.0


# ---------------------------------------------------------------------------------------------- waiting


def bubble_share(
    schedule: Schedule,
    pp: int,
    costs: Sequence[float],
    owner: Sequence[int],
    microbatches: int,
    unsplit: Sequence[int] = (),
) -> float:
    """Return the average fraction of a step in which ranks wait for other stages.

    `costs`: relative computation of each stage. `owner`: its pipeline rank. `unsplit`: stages with unsplit backward.
    """
    played = min(microbatches, _SEEN * pp)
    orders = actions_of_ranks(schedule, pp, len(costs), played)
    work = [3 * sum(cost for stage, cost in enumerate(costs) if owner[stage] == rank) for rank in range(pp)]
    length = _play(orders, costs, unsplit) + (microbatches - played) * max(work)
    return 1.0 - sum(work) * microbatches / (pp * length) if length else 0.0


def actions_of_ranks(schedule: Schedule, pp: int, count: int, microbatches: int) -> list[list[Action]]:
    """Return for each pipeline rank the forward and backward actions that torch's schedule runs, in order."""
    forward, backward = ([(kind, m) for m in range(microbatches)] for kind in "FB")
    orders: list[list[Action]] = []
    if schedule in SINGLE:
        for rank in range(pp):
            ahead = microbatches if schedule == "gpipe" else min(microbatches, pp - rank)
            order = [*forward[:ahead]]
            for done in range(microbatches):
                order += [backward[done], *forward[ahead + done : ahead + done + 1]]
            orders.append([(rank, kind, m) for kind, m in order])
        return orders
    positions = placement(schedule, pp, count)
    stages = [stage for stage, position in enumerate(positions) if position == 0]
    actions = schedule_actions(schedule_class(schedule), stages, count, pp, microbatches)
    for rank in range(pp):
        matches = [_SPELLED.fullmatch(str(action)) for action in actions[rank] if action is not None]
        orders.append([(int(match[1]), match[2], int(match[3])) for match in matches if match is not None])
    return orders


def _play(orders: Sequence[Sequence[Action]], costs: Sequence[float], unsplit: Sequence[int]) -> float:
    """Simulate the actions of all ranks without communication time; return the time of the last action."""
    done: dict[Action, float] = {}
    clock, at = [0.0] * len(orders), [0] * len(orders)
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                ready = _ready(order[at[rank]], done, len(costs))
                if ready is None:
                    break
                stage, kind, _ = order[at[rank]]
                work = _WORK_UNSPLIT if stage in unsplit else _WORK
                clock[rank] = max(clock[rank], ready) + work[kind] * costs[stage]
                done[order[at[rank]]] = clock[rank]
                at[rank] += 1
                moving = True
    assert all(at[rank] == len(order) for rank, order in enumerate(orders)), "the order of actions has a deadlock"
    return max(clock)


def _ready(action: Action, done: dict[Action, float], count: int) -> float | None:
    """Return the time at which an action's input is ready; None if no action in `done` computes it."""
    stage, kind, microbatch = action
    if kind == "F":
        return 0.0 if stage == 0 else done.get((stage - 1, "F", microbatch))
    if kind == "W":
        return done.get((stage, "I", microbatch))
    if stage == count - 1:
        return done.get((stage, "F", microbatch))
    behind = done.get((stage + 1, "B", microbatch))
    return behind if behind is not None else done.get((stage + 1, "I", microbatch))
