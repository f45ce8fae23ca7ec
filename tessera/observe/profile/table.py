"""Add up the time of the profiled steps by module and by kind of work.

On an accelerator time is that of its kernels; kernels that run at the same time both count. When no kernel runs, the
device is idle. On a CPU time is that of the thread which runs the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import profile

from tessera.observe.profile.marks import FORWARD, MODEL, PHASE, RECOMPUTE
from tessera.runtime.device import COLLECTIVE_BACKENDS

LOADING, OPTIMIZER, LOSS, IDLE = "data wait", "optimizer", "loss and head", "device idle"
_PHASES = {
    "loading data": LOADING,
    "running the model": LOSS,  # outside of modules: the task's inputs and the loss, with the product of a fused head
    "clipping gradients": "clipping",
    "updating weights": OPTIMIZER,
}
_BACKWARD = "autograd::engine::evaluate_function"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LEAST = 0.0005  # of the window: smaller rows are left out of the text

PRODUCTS, ATTENTION, POINTWISE, REDUCTIONS = "matrix products", "attention", "norm and pointwise", "reductions"
COPIES, TRANSFERS, COLLECTIVES, OTHER = "copies", "host-device copies", "collectives", "other kernels"
PYTHON = "host alone (Python)"
_COLLECTIVE = "|".join((*COLLECTIVE_BACKENDS, "c10d", "allreduce", "all_gather", "reduce_scatter"))
# The first match counts. Names of kernels and of host operations do not conflict, so one table serves both.
_RULES = tuple(
    (kind, re.compile(words, re.IGNORECASE))
    for kind, words in (
        (TRANSFERS, r"memcpy (?:htod|dtoh)|memcpy \w+ -> \w+ \((?:pinned|pageable)"),
        (COPIES, r"^memcpy|^memset"),
        (COLLECTIVES, _COLLECTIVE),
        (ATTENTION, r"flash|fmha|attention|sdpa|mha_|attn"),
        (
            PRODUCTS,
            r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|conv(?:olution|[123]d|_depthwise)|splitk|"
            r"^aten::(?:_scaled_|_grouped_)?(?:mm|addmm|bmm|baddbmm|linear|dot|mv|addmv|_addmm_activation|outer)$",
        ),
        (POINTWISE, r"triton_(?:poi|per|red|mix)|norm|gammabeta|softmax|gelu|silu|swiglu|sigmoid|rope"),
        (COPIES, r"copy|::cat$|catarray|index_select|gather|scatter|clone|contiguous|_to_copy|pin_memory"),
        (REDUCTIONS, r"reduce|^aten::(?:sum|mean|amax|amin|max|min|any|all|argmax|logsumexp|cumsum|sort|topk)$"),
        (POINTWISE, r"elementwise|vectorized|multi_tensor|foreach|fused_adam|adamw|fill|functor|^aten::\w+_?$"),
    )
)

Row = tuple[str, str]  # name; forward, backward, recompute or nothing
_BESIDE: Row = ("beside the step", "")


@dataclass
class WorkTime:
    """Hold the time of one row."""

    us: float = 0.0
    count: int = 0  # kernels on an accelerator, operations on a CPU
    flops: int = 0  # of operations whose FLOPs torch's profiler knows
    flops_us: float = 0.0  # that those took

    def add(self, us: float, count: int, flops: int = 0) -> None:
        self.us, self.count, self.flops = self.us + us, self.count + count, self.flops + flops
        self.flops_us += us if flops else 0.0

    @property
    def tflops(self) -> float | None:
        return self.flops / self.flops_us / 1e6 if self.flops_us else None


@dataclass
class TimeTable:
    """Hold the time of the recorded steps by module and by kind of work."""

    steps: int
    accelerated: bool
    window_us: float = 0.0
    modules: dict[Row, WorkTime] = field(default_factory=lambda: defaultdict(WorkTime))
    kinds: dict[str, WorkTime] = field(default_factory=lambda: defaultdict(WorkTime))

    def as_json(self) -> dict[str, Any]:
        return {
            "step_ms": self.window_us / self.steps / 1e3,
            "modules": [
                {"name": name, "direction": direction, **self._numbers(time)}
                for (name, direction), time in _sorted(self.modules)
            ],
            "kinds": [{"name": kind, **self._numbers(time)} for kind, time in _sorted(self.kinds)],
        }

    def as_text(self, title: str) -> str:
        owner = "the device" if self.accelerated else "the step's thread"
        step = f"milliseconds of one step ({self.window_us / self.steps / 1e3:.2f} in all), time of {owner}"
        return "\n".join([title, "", step, "", *self._lines("modules"), "", *self._lines("kinds")]) + "\n"

    def _lines(self, part: str) -> list[str]:
        rows = [row for row in self.as_json()[part] if row["share"] >= _LEAST]
        title = "by module" if part == "modules" else "by kind of work"
        width = max([len(title), *(len(row["name"]) for row in rows)])
        count = "kernels" if self.accelerated else "calls"
        lines = [f"{title:<{width}}  {'':<9}  {'ms':>10}  {'share':>6}  {count:>8}  {'TFLOP/s':>8}"]
        for row in rows:
            rate = "" if row["tflops"] is None else f"{row['tflops']:.3g}"
            line = f"{row['name']:<{width}}  {row.get('direction', ''):<9}  {row['ms']:>10.2f}  {row['share']:>6.1%}"
            lines.append(f"{line}  {row['count']:>8,.0f}  {rate:>8}".rstrip())
        return lines

    def _numbers(self, time: WorkTime) -> dict[str, Any]:
        ms, share = time.us / self.steps / 1e3, time.us / max(self.window_us, 1e-9)
        return {"ms": ms, "share": share, "count": time.count / self.steps, "tflops": time.tflops}


def make_table(recorder: profile, steps: int, accelerated: bool) -> TimeTable:
    """Return the table of a recording with the ranges of `marks.Marks`."""
    table = TimeTable(steps, accelerated)
    recorded: list[Any] = recorder.events() or []  # type: ignore[no-untyped-call]
    events = [event for event in recorded if not event.is_async and not _is_range_on_device(event)]
    host = [event for event in events if event.device_type.name == "CPU"]
    phases = [event for event in host if event.name.startswith(PHASE)]
    if not phases:
        return table
    start = min(event.time_range.start for event in phases)
    end = max(event.time_range.end for event in (events if accelerated else phases))
    table.window_us = end - start
    owners = _owners(host, phases[0].thread)
    for event in host:
        if not accelerated and event.thread != phases[0].thread:
            continue  # a thread beside the step
        kernels = [
            (kernel.name, kernel.duration) for kernel in event.kernels if not kernel.name.startswith("tessera::")
        ]
        work = kernels if accelerated else [(event.name, event.self_cpu_time_total)]
        for name, us in work:
            is_operation = accelerated or not name.startswith(("tessera::", _BACKWARD))
            kind = kind_of(name) if is_operation else PYTHON
            for row in (table.modules[owners[event.id]], table.kinds[kind]):
                row.add(us, int(is_operation), event.flops if kind in (PRODUCTS, ATTENTION) and event.flops else 0)
    if accelerated:
        busy = _union((e.time_range.start, e.time_range.end) for e in events if e.device_type.name != "CPU")
        table.modules[IDLE, ""].add(max(0.0, table.window_us - busy), 0)
        waited = sum(e.time_range.elapsed_us() for e in phases if e.name.removeprefix(PHASE) == "loading data")
        table.modules[LOADING, ""].add(waited, 0)  # time of the host: the device may be busy meanwhile
    return table


def _is_range_on_device(event: Any) -> bool:
    return bool(event.device_type.name != "CPU" and event.name.startswith("tessera::"))


def _owners(host: list[Any], main: int) -> dict[int, Row]:
    """Return the module or the phase that each host event belongs to.

    A forward operation belongs to the innermost range around it. A backward function belongs to the module whose
    forward operation created its node: both have the node's number.
    """
    owners: dict[int, Row] = {}
    creators: dict[tuple[int, int], Row] = {}  # by thread and number of a node
    # The step's thread first: other threads run backward functions of nodes that it created.
    for event in sorted(host, key=lambda event: (event.thread != main, event.time_range.start, -event.time_range.end)):
        above = (
            owners.get(event.cpu_parent.id, ("beside the step", "")) if event.cpu_parent else ("beside the step", "")
        )
        row = _marked(event.name) or above
        if event.fwd_thread and event.sequence_nr >= 0:
            creator = creators.get((event.fwd_thread, event.sequence_nr))
            row = row if creator is None else (creator[0], "backward")
        elif event.name.startswith(_BACKWARD):
            row = ("adding up gradients", "backward")
        elif event.sequence_nr >= 0:  # an operation without a node has the number of the next one: the last one counts
            creators[event.thread, event.sequence_nr] = row
        owners[event.id] = row
    return owners


def _marked(name: str) -> Row | None:
    for prefix, direction in ((FORWARD, "forward"), (RECOMPUTE, "recompute")):
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            return (path if path == MODEL else _NUMBER.sub("*", path)), direction  # layers of one list share a row
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE)
        return _PHASES.get(phase, "callbacks"), "forward" if phase == "running the model" else ""
    return None


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel or of a host operation."""
    return next((kind for kind, words in _RULES if words.search(name)), OTHER)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _sorted(rows: Mapping[Any, WorkTime]) -> list[tuple[Any, WorkTime]]:
    return sorted(rows.items(), key=lambda row: -row[1].us)
