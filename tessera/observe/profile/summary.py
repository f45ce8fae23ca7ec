"""Write the account of a profile as sentences about what bounds the step, as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tessera.config.run_config import RunConfig
from tessera.observe.profile import account as accounts
from tessera.observe.profile.account import COMMUNICATION, MOVING, NOTHING, Account, WorkTime
from tessera.observe.profile.memory import Timeline

_Key = TypeVar("_Key")

MANY_LAUNCHES = 1000  # in a step
FIRST_STEPS = 2  # in which compiled blocks are compiled, and memory is allocated
_LEAST = 0.0005  # rows with a smaller share are added up in one


@dataclass(frozen=True)
class Case:
    """Hold an account with what is known about the run."""

    account: Account
    config: RunConfig
    first_step: int
    peak_flops: float | None

    def owner(self, name: str) -> float:
        return self.account.share(self.account.owned_by(name))

    def kind(self, *names: str) -> float:
        return self.account.share(*(self.account.kinds.get(name, WorkTime()) for name in names))

    @property
    def launches(self) -> int:
        """Return the kernels or operations of one step."""
        return self.account.launches // max(1, self.account.steps)


def advise(case: Case) -> list[str]:
    """Return one sentence for each rule that passes its limit, the heaviest first, then where most of the time went."""
    shares = [(share(case), limit, describe) for share, limit, describe in RULES]
    found = sorted(((share, describe) for share, limit, describe in shares if share >= limit), key=lambda one: -one[0])
    sentences = [*_about_window(case), *(describe(case, share) for share, describe in found)]
    return [*(sentences or ["nothing stands out: no part of the step passes its limit"]), _largest(case)]


def _about_window(case: Case) -> list[str]:
    share = case.owner(accounts.PAUSED)
    if share >= 0.02:
        return [f"{share:.0%} of the window is evaluation or saving: choose other steps for profile.steps"]
    if case.first_step > FIRST_STEPS:
        return []
    return [
        f"the window begins with step {case.first_step}: first steps compile, allocate memory and make optimizer "
        f"state; a window from step {FIRST_STEPS + 3} on shows more"
    ]


def _data(case: Case, share: float) -> str:
    workers = case.config.data.workers
    todo = f"raise data.workers (now {workers})"
    if workers == 0:
        todo = "the training process reads its own data: set data.workers=auto"
    elif workers == "auto":
        todo = "set data.workers to a number above what the loader chose (see the log), or make samples cheaper to read"
    return f"waiting for data {share:.0%}: {todo}; `tessera data doctor` shows which samples are slow"


def _idle(case: Case, share: float) -> str:
    while_in = max(case.account.idle_while, key=lambda one: case.account.idle_while[one], default=None)
    sentence = f"the device was idle {share:.0%} of the time"
    sentence += "" if while_in is None else f", most of it while the host was in {while_in}"
    waits = case.account.waits / max(1, case.account.steps)
    if waits > 20:
        return (
            f"{sentence}: the host waits for the device {waits:.0f} times a step, and then has nothing queued; look in "
            "the trace for Synchronize, and for .item() or shapes that depend on data"
        )
    todo = "give each launch more to do: raise train.micro_batch or data.length, recompute less"
    if case.launches > MANY_LAUNCHES and case.config.parallel.compile is False:
        todo = "compile the blocks (parallel.compile=true)"
    return f"{sentence}: the host launches too slowly ({case.launches:,} kernels a step); {todo}"


def _communication(case: Case, share: float) -> str:
    parallel, train = case.config.parallel, case.config.train
    advice = {
        "fewer ranks in parallel.tp": parallel.tp > 1,
        "gather blocks ahead (parallel.prefetch_forward=1)": parallel.prefetch_forward == 0,
        "keep gathered weights where memory allows (parallel.reshard_after_forward=false)": (
            parallel.reshard_after_forward is not False
        ),
        "sum gradients once a step (parallel.accumulate=local)": (
            train.global_batch > train.micro_batch and parallel.accumulate != "local"
        ),
        "more tokens for each rank": True,
    }
    todo = "; ".join(text for text, applies in advice.items() if applies)
    slower = "A rank that waits for a slower one shows here too: see balance in the step line"
    return f"communication not hidden {share:.0%}: {todo}. {slower}"


def _moving(case: Case, share: float) -> str:
    parallel = case.config.parallel
    causes = {"parallel.offload": parallel.offload, "parallel.activation_offload": parallel.activation_offload}
    named = " and ".join(name for name, on in causes.items() if on)
    todo = f"{named} cost this" if named else "look in the trace for who copies"
    return f"copies between host and device, not hidden, {share:.0%}: {todo}"


def _optimizer(case: Case, share: float) -> str:
    todo = "rows are few for so many weights: raise train.global_batch, so that one update serves more of them"
    if case.config.parallel.offload:
        todo = "parallel.offload computes it on the host; without it the device does"
    others = "train fewer weights (model.freeze, model.lora), or shard them over more ranks"
    return f"optimizer {share:.0%}: {todo}, {others}"


def _pointwise_share(case: Case) -> float:
    share = case.kind(accounts.POINTWISE, accounts.REDUCTIONS, accounts.COPIES)
    # Optimizer and clipping are pointwise by nature.
    return share - case.owner(accounts.OPTIMIZER) - case.owner(accounts.CLIPPING) if case.account.accelerated else 0.0


def _pointwise(case: Case, share: float) -> str:
    todo = "the table by module shows where; what is not in a compiled block is not fused"
    if case.config.parallel.compile is False:
        todo = "compile the blocks (parallel.compile=true): neighbours become one kernel"
    return f"norms, pointwise work and copies {share:.0%}, which is bound by memory bandwidth: {todo}"


def _products(case: Case, share: float) -> str:
    rate = case.account.kinds.get(accounts.PRODUCTS, WorkTime()).rate
    at_rate = f", products at {rate / 1e12:.3g} TFLOP/s" if rate else ""
    sentence = f"matrix products and attention {share:.0%}{at_rate}"
    if rate is None or case.peak_flops is None:
        return f"{sentence}: the model itself bounds the step"
    part = rate / case.peak_flops
    sentence += f", {part:.2f} of the stated peak"
    if part >= 0.5:
        return f"{sentence}: this is near what the device can do"
    if case.config.precision.compute == "float32":
        return f"{sentence}: they are computed in float32; set precision.compute=bfloat16"
    return f"{sentence}: they are too small for the device; raise train.micro_batch or data.length"


# (share of the time, limit, sentence)
RULES: tuple[tuple[Callable[[Case], float], float, Callable[[Case, float], str]], ...] = (
    (lambda case: case.owner(accounts.LOADING), 0.05, _data),
    (lambda case: case.account.accelerated * case.owner(NOTHING.name), 0.10, _idle),
    (
        lambda case: 0.0 if case.account.accelerated else case.account.between_ns / max(1, case.account.window_ns),
        0.25,
        lambda case, share: (
            f"{share:.0%} of the time went between operations, in Python ({case.launches:,} operations a step): they "
            "are small; raise train.micro_batch or data.length"
        ),
    ),
    (lambda case: case.owner(COMMUNICATION.name), 0.05, _communication),
    (lambda case: case.owner(MOVING.name), 0.05, _moving),
    (lambda case: case.owner(accounts.OPTIMIZER), 0.10, _optimizer),
    (
        lambda case: case.owner(accounts.CLIPPING),
        0.05,
        lambda case, share: f"clipping {share:.0%}: raise train.global_batch, so that one norm serves more rows",
    ),
    (
        lambda case: case.account.share(case.account.in_direction("recompute")),
        0.10,
        lambda case, share: (
            f"recomputing {share:.0%}: where memory.html shows room, recompute fewer modules or keep expensive results "
            "({modules: ..., keep: matmul})"
        ),
    ),
    (_pointwise_share, 0.30, _pointwise),
    (
        lambda case: case.owner(accounts.LOSS),
        0.30,
        lambda case, share: (
            f"loss and head {share:.0%}: the vocabulary is large for so small a model; train on fewer tokens of a row"
        ),
    ),
    (lambda case: case.kind(accounts.PRODUCTS, accounts.ATTENTION), 0.50, _products),
)


def _largest(case: Case) -> str:
    names = {owner.name for owner in case.account.owners} - {NOTHING.name, accounts.LOADING}
    if not names:
        return "nothing was recorded"
    name = max(names, key=case.owner)
    rows = {o.direction: case.account.share(row) for o, row in case.account.owners.items() if o.name == name}
    shown = [(direction, share) for direction, share in sorted(rows.items()) if direction and share >= 0.005]
    parts = ", ".join(f"{direction} {share:.0%}" for direction, share in shown)
    return f"of what was computed, most time went to {name}: {case.owner(name):.0%}" + (f" ({parts})" if parts else "")


# ------------------------------------------------------------------------------------------ table and JSON


def as_text(account: Account, sentences: list[str], timeline: Timeline | None, title: str) -> str:
    whose = "the device" if account.accelerated else "the step's thread"
    in_all = f"{account.window_ns / account.steps / 1e6:.2f} in all"
    lines = [title, "", *(f"- {sentence}" for sentence in sentences), ""]
    lines += [f"milliseconds of one step ({in_all}), time of {whose}", ""]
    lines += _rows("by module", [(owner.name, owner.direction, row) for owner, row in _sorted(account.owners)], account)
    lines += ["", *_rows("by kind of work", [(kind, "", row) for kind, row in _sorted(account.kinds)], account)]
    if account.idle_while:
        lines += ["", "the device was idle while the host was in"]
        idle = sorted(account.idle_while.items(), key=lambda one: -one[1])[:8]
        lines += [f"  {_ms(account, ns):>10.2f}  {ns / account.window_ns:>6.1%}  {owner}" for owner, ns in idle]
    if timeline is not None:
        lines += ["", f"memory: {_size(timeline.peak)} at most, in {timeline.peak_phase}; used then by"]
        lines += [f"  {_size(size):>12}  {size / timeline.peak:>6.1%}  {name}" for name, size in timeline.users[:15]]
    return "\n".join(lines) + "\n"


def _rows(title: str, rows: list[tuple[str, str, WorkTime]], account: Account) -> list[str]:
    shown = [one for one in rows if account.share(one[2]) >= _LEAST]
    width = max([len(title), *(len(name) for name, _, _ in shown)])
    count = "kernels" if account.accelerated else "calls"
    lines = [f"{title:<{width}}  {'':<9}  {'ms':>10}  {'share':>6}  {count:>8}  {'TFLOP/s':>8}"]
    for name, direction, row in shown:
        rate = "" if row.rate is None else f"{row.rate / 1e12:.3g}"
        lines.append(
            f"{name:<{width}}  {direction:<9}  {_ms(account, row.ns):>10.2f}  {account.share(row):>6.1%}  "
            f"{row.count / account.steps:>8,.0f}  {rate:>8}".rstrip()
        )
    rest = sum(row.ns for _, _, row in rows) - sum(row.ns for _, _, row in shown)
    if rest:
        small = f"{len(rows) - len(shown)} smaller"
        lines.append(f"{small:<{width}}  {'':<9}  {_ms(account, rest):>10.2f}  {rest / account.window_ns:>6.1%}")
    return lines


def as_json(account: Account, sentences: list[str], timeline: Timeline | None, about: dict[str, Any]) -> dict[str, Any]:
    idle = sorted(account.idle_while.items(), key=lambda one: -one[1])
    found: dict[str, Any] = {
        **about,
        "step_ms": _ms(account, account.window_ns),
        "verdict": sentences,
        "kernels_per_step" if account.accelerated else "operations_per_step": account.launches / account.steps,
        "device_waits_per_step": account.waits / account.steps,
        "modules": [
            {"name": owner.name, "direction": owner.direction, **_numbers(account, row)}
            for owner, row in _sorted(account.owners)
        ],
        "kinds": [{"name": kind, **_numbers(account, row)} for kind, row in _sorted(account.kinds)],
        "idle_while": [{"name": o.name, "direction": o.direction, "ms": _ms(account, ns)} for o, ns in idle],
        "hidden_communication_ms": _ms(account, account.hidden_collectives_ns),
    }
    if timeline is not None:
        found["memory"] = {
            "peak_bytes": timeline.peak,
            "peak_phase": timeline.peak_phase,
            "used_by": [{"name": name, "bytes": size} for name, size in timeline.users],
        }
    return found


def _sorted(rows: dict[_Key, WorkTime]) -> list[tuple[_Key, WorkTime]]:
    return sorted(rows.items(), key=lambda one: -one[1].ns)


def _numbers(account: Account, row: WorkTime) -> dict[str, Any]:
    return {
        "ms": _ms(account, row.ns),
        "share": account.share(row),
        "count": row.count / account.steps,
        "tflops": None if row.rate is None else row.rate / 1e12,
    }


def _ms(account: Account, ns: int) -> float:
    return ns / account.steps / 1e6


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
