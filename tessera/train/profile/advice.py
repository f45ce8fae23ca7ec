"""What bounds the step, in plain sentences: one rule each, with a threshold and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.core.run_config import RunConfig
from tessera.train.profile import classes, owners
from tessera.train.profile.account import COMMUNICATION, MOVING, NOTHING, Account, Row, add_up

MANY_LAUNCHES = 1000  # in a step
FIRST_STEPS = 2  # in which compiled blocks are compiled, and memory is asked for


@dataclass(frozen=True)
class Case:
    account: Account
    config: RunConfig
    first_step: int
    peak_flops: float | None

    def owner(self, name: str) -> float:
        return self.account.share(self.account.owned_by(name))

    def kind(self, *names: str) -> float:
        return self.account.share(*(self.account.kinds.get(name, Row()) for name in names))

    @property
    def launches(self) -> int:
        """In one step."""
        return self.account.launches // max(1, self.account.steps)


def advise(case: Case) -> list[str]:
    """The heaviest first; the last sentence says where most of the time went."""
    found = [said for rule in RULES if (said := rule(case)) is not None]
    sentences = [text for _, text in sorted(found, key=lambda one: -one[0])]
    if not sentences:
        sentences = ["nothing stands out: no part of the step passes its limit"]
    return [*sentences, _largest(case)]


_Said = tuple[float, str] | None


def _window(case: Case) -> _Said:
    share = case.owner(owners.PAUSED)
    if share < 0.02 and case.first_step > FIRST_STEPS:
        return None
    if share >= 0.02:
        return 2.0, f"{share:.0%} of the window is evaluation or saving: choose other steps for profile.steps"
    return 2.0, (
        f"the window begins with step {case.first_step}: first steps compile, ask for memory and make optimizer state; "
        f"a window from step {FIRST_STEPS + 3} on tells more"
    )


def _data(case: Case) -> _Said:
    share = case.owner(owners.LOADING)
    if share < 0.05:
        return None
    workers = case.config.data.workers
    if workers == 0:
        todo = "the training process reads its own data: set data.workers=auto"
    elif workers == "auto":
        todo = "set data.workers to a number above what the loader chose (see the log), or make samples cheaper to read"
    else:
        todo = f"raise data.workers (now {workers})"
    return share, f"waiting for data {share:.0%}: {todo}; `tessera data doctor` tells which samples are slow"


def _idle(case: Case) -> _Said:
    share = case.account.share(case.account.owners.get(NOTHING, Row()))
    if not case.account.accelerated or share < 0.10:
        return None
    said = f"the device was idle {share:.0%} of the time"
    held = max(case.account.idle_while, key=lambda one: case.account.idle_while[one], default=None)
    where = "" if held is None else f", most of it while the host was in {held}"
    waits = case.account.waits / max(1, case.account.steps)
    if waits > 20:
        return share, (
            f"{said}{where}: the host waits for the device {waits:.0f} times a step, and then has nothing queued; look "
            "in the trace for Synchronize, and for .item() or shapes that depend on data"
        )
    if case.launches > MANY_LAUNCHES and case.config.parallel.compile is False:
        todo = "compile the blocks (parallel.compile=true)"
    else:
        todo = "give each launch more to do: raise train.micro_batch or data.length, recompute less"
    return share, f"{said}{where}: the host launches too slowly ({case.launches:,} kernels a step); {todo}"


def _python(case: Case) -> _Said:
    share = case.account.between_ns / max(1, case.account.window_ns)
    if case.account.accelerated or share < 0.25:
        return None
    return share, (
        f"{share:.0%} of the time went between operations, in Python ({case.launches:,} operations a step): they are "
        "small; raise train.micro_batch or data.length"
    )


def _communication(case: Case) -> _Said:
    share = case.account.share(case.account.owners.get(COMMUNICATION, Row()))
    if share < 0.05:
        return None
    parallel, advice = case.config.parallel, []
    if parallel.tp > 1:
        advice.append("fewer ranks in parallel.tp")
    if parallel.prefetch_forward == 0:
        advice.append("gather blocks ahead (parallel.prefetch_forward=1)")
    if parallel.reshard_after_forward is not False:
        advice.append("keep gathered weights where memory allows (parallel.reshard_after_forward=false)")
    if case.config.train.global_batch > case.config.train.micro_batch and parallel.accumulate != "local":
        advice.append("sum gradients once a step (parallel.accumulate=local)")
    advice.append("more tokens for each rank")
    return share, (
        f"communication not hidden {share:.0%}: {'; '.join(advice)}. A rank that waits for a slower one shows here "
        "too: see balance in the step line"
    )


def _moving(case: Case) -> _Said:
    share = case.account.share(case.account.owners.get(MOVING, Row()))
    if share < 0.05:
        return None
    cause = [
        name for name, on in (("offload", case.config.parallel.offload), ("swap", case.config.parallel.swap)) if on
    ]
    todo = f"parallel.{' and parallel.'.join(cause)} cost this" if cause else "look in the trace for who copies"
    return share, f"copies between host and device, not hidden, {share:.0%}: {todo}"


def _optimizer(case: Case) -> _Said:
    share = case.owner(owners.OPTIMIZER)
    if share < 0.10:
        return None
    todo = "rows are few for so many weights: raise train.global_batch, so that one update serves more of them"
    if case.config.parallel.offload:
        todo = "parallel.offload computes it on the host; without it the device does"
    return (
        share,
        f"optimizer {share:.0%}: {todo}, train fewer weights (model.freeze, model.lora), or share them on more ranks",
    )


def _clipping(case: Case) -> _Said:
    share = case.owner(owners.CLIPPING)
    if share < 0.05:
        return None
    return share, f"clipping {share:.0%}: raise train.global_batch, so that one norm serves more rows"


def _recompute(case: Case) -> _Said:
    share = case.account.share(case.account.going("recompute"))
    if share < 0.10:
        return None
    return share, (
        f"recomputing {share:.0%}: where memory.html shows room, recompute fewer modules or keep what is dear "
        "({modules: ..., keep: matmul})"
    )


def _pointwise(case: Case) -> _Said:
    share = case.kind(classes.POINTWISE, classes.REDUCTIONS, classes.COPIES)
    share -= case.owner(owners.OPTIMIZER) + case.owner(owners.CLIPPING)  # those are pointwise by nature
    if not case.account.accelerated or share < 0.30:
        return None
    if case.config.parallel.compile is False:
        todo = "compile the blocks (parallel.compile=true): neighbours become one kernel"
    else:
        todo = "the table by module tells where; what is not in a compiled block is not fused"
    return share, f"norms, pointwise work and copies {share:.0%}, which is memory traffic: {todo}"


def _loss(case: Case) -> _Said:
    share = case.owner(owners.LOSS)
    if share < 0.30:
        return None
    return (
        share,
        f"loss and head {share:.0%}: the vocabulary is large for so small a model; train on fewer tokens of a row",
    )


def _products(case: Case) -> _Said:
    share = case.kind(classes.PRODUCTS, classes.ATTENTION)
    row = case.account.kinds.get(classes.PRODUCTS, Row())
    if share < 0.5:
        return None
    said = f"matrix products and attention {share:.0%}"
    if row.rate is None:
        return share, f"{said}: the model itself bounds the step"
    said += f", products at {row.rate / 1e12:.3g} TFLOP/s"
    if case.peak_flops is None:
        return share, f"{said}: the model itself bounds the step"
    part = row.rate / case.peak_flops
    said += f", {part:.2f} of the stated peak"
    if part >= 0.5:
        return share, f"{said}: this is near what the device can do"
    if case.config.parallel.param_dtype != "bfloat16" and case.config.model.dtype != "bfloat16":
        return share, f"{said}: they are computed in float32; set parallel.param_dtype=bfloat16"
    return share, f"{said}: they are too small for the device; raise train.micro_batch or data.length"


def _largest(case: Case) -> str:
    names = {owner.name for owner in case.account.owners} - {NOTHING.name, owners.LOADING}
    if not names:
        return "nothing was recorded"
    name = max(names, key=case.owner)
    rows = {d: case.account.share(r) for (n, d), r in _directions(case).items() if n == name and d}
    parts = ", ".join(f"{direction} {share:.0%}" for direction, share in sorted(rows.items()) if share >= 0.005)
    return f"of what was computed, most time went to {name}: {case.owner(name):.0%}" + (f" ({parts})" if parts else "")


def _directions(case: Case) -> dict[tuple[str, str], Row]:
    return {(owner.name, owner.direction): add_up([row]) for owner, row in case.account.owners.items()}


RULES: tuple[Callable[[Case], _Said], ...] = (
    _window,
    _data,
    _idle,
    _python,
    _communication,
    _moving,
    _optimizer,
    _clipping,
    _recompute,
    _pointwise,
    _loss,
    _products,
)
