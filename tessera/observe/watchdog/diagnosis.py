"""Find out what each rank is doing, and which rank blocks the others.

`collective_of`, `is_compiling` and `CpuUsage` describe this process from another thread, without stopping it.
`diagnose` reads the heartbeats of all ranks and returns a `Verdict`; it uses no clock, process or network. The watchdog
must not end a run that would have gone on: a rank that reads data, compiles, computes or waits for its device is
waited for. Only a rank that does none of this counts as stalled.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Final

from tessera.config.run_config import ParallelSection
from tessera.errors import first_line
from tessera.runtime.distributed import wait_for
from tessera.runtime.rendezvous import name_ranks

# Activities during which a rank makes progress by itself: the other ranks wait for it.
READING: Final = "reading data"
COMPILING: Final = "compiling"
OUTSIDE: Final = "outside of a step"  # starting, evaluating, saving, callbacks: no time limit applies
COMPUTING: Final = "computing"
AT_WORK = frozenset({READING, COMPILING, OUTSIDE, COMPUTING})
# The device has unfinished work, which may be a collective that waits for another rank.
ON_DEVICE: Final = "waiting for its device"
UNEXPLAINED: Final = ""

_BUSY_SHARE = 0.05  # a process that uses more than this share of a CPU core is busy

# Functions that are on the stack only during compilation: (part of the file name, part of the function name).
_COMPILERS = (
    ("torch/_dynamo/convert_frame.py", ""),
    ("torch/_inductor/compile_fx.py", "compile"),
    ("torch/_inductor/runtime/triton_heuristics.py", "bench"),
    ("torch/utils/cpp_extension.py", ""),
    ("triton/compiler/", ""),
    ("triton/runtime/autotuner.py", "bench"),
    ("triton/runtime/build.py", ""),
)
# Files of wrappers around collectives. Their stack frames are skipped.
_WRAPPERS = (
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/_library/",
    "torch/autograd/function.py",
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "contextlib.py",
)
# Files of torch.distributed that call modules and operations on sharded tensors. A thread in one of them computes, and
# does not wait in a collective.
_COMPUTES = (
    "torch/distributed/algorithms/",
    "torch/distributed/tensor/_dispatch.py",
    "torch/distributed/tensor/_api.py",
    "torch/distributed/tensor/_ops/",
    "torch/distributed/pipelining/_backward.py",
    "torch/distributed/pipelining/stage.py",
    "torch/distributed/pipelining/microbatch.py",
)
DISAGREE_S = 20.0  # after so many seconds, or `stall_s` if less, ranks in different collectives are out of step
# The phases of a step in order. The phase "reporting" belongs to the previous step.
STEP_PHASES = (
    "reporting",
    "loading data",
    "agreeing to go on",
    "running the model",
    "clipping gradients",
    "updating weights",
)


class CpuUsage:
    """Measure the share of one CPU core that a process used, or waited for, within a time window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: collections.deque[tuple[float, float]] = collections.deque()

    def note(self, now: float, spent_s: float) -> None:
        self._samples.append((now, spent_s))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window_s:
            self._samples.popleft()

    @property
    def busy(self) -> bool:
        """Return whether the process used more than `_BUSY_SHARE` of a core; True during the first window."""
        (began, spent_s), (now, spent_now_s) = self._samples[0], self._samples[-1]
        if now - began < self._window_s:
            return True
        return (spent_now_s - spent_s) / (now - began) > _BUSY_SHARE


def is_compiling() -> bool:
    """Return whether any thread of this process is compiling: backward runs in threads of autograd."""
    return any(_is_compiling(frame) for frame in sys._current_frames().values())


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if any(file in code.co_filename and name in code.co_name for file, name in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def collective_of(thread: int) -> str:
    """Read from a thread's stack in which collective it waits, and return the collective's name; "" if in none."""
    frame = sys._current_frames().get(thread)
    while frame is not None and any(file in frame.f_code.co_filename for file in _WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return ""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if "torch/distributed/" in file:
        return "" if any(other in file for other in _COMPUTES) else name
    return name if frame.f_code is wait_for.__code__ else ""


@dataclass(frozen=True)
class Heartbeat:
    """Describe what a rank is doing. Each rank sends its heartbeat at least twice a second."""

    rank: int
    count: int  # sequence number of this heartbeat
    step: int  # number of finished steps
    phase: str  # phase of the trainer, such as "loading data"
    module: str  # current block, such as "forward of layers.3"; empty outside of the model
    still_s: float  # seconds since step, phase, block or activity last changed
    collective: str  # collective that the main thread waits in; empty: none
    host: str
    activity: str  # why the rank stands still, such as "compiling"; empty: unknown
    busy_silent: tuple[int, ...] = ()  # ranks of the same machine that send no heartbeats but use the CPU

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Heartbeat:
        fields = json.loads(text)
        return Heartbeat(**{**fields, "busy_silent": tuple(fields["busy_silent"])})

    @property
    def at_work(self) -> bool:
        """Return whether the rank reads data, compiles, computes or is outside of a step, and is in no collective."""
        return not self.collective and self.activity in AT_WORK

    @property
    def position(self) -> tuple[int, str, str, bool]:
        """Return a key that is equal for ranks at the same point of a step."""
        return self.step, self.phase, self.module, bool(self.collective)

    def where(self) -> str:
        inside = f", {self.module}" if self.module and self.phase == "running the model" else ""
        waits = f", waiting in {self.collective}" if self.collective else ""
        if not self.collective and self.activity in (COMPILING, COMPUTING, ON_DEVICE):
            waits = f", {self.activity}"
        begun = self.phase in STEP_PHASES[1:]
        return f"step {self.step + 1 if begun else self.step}, {self.phase}{inside}{waits}"


@dataclass(frozen=True)
class Verdict:
    """Hold the reason for which all ranks end, and the ranks that caused it."""

    kind: str  # lost, stalled, disagree, failed
    ranks: tuple[int, ...]  # ranks that caused it
    text: str

    def dump(self) -> str:
        return json.dumps({"kind": self.kind, "ranks": list(self.ranks), "text": self.text})

    @staticmethod
    def load(text: str) -> Verdict:
        fields = json.loads(text)
        return Verdict(fields["kind"], tuple(fields["ranks"]), fields["text"])


def lost(heartbeat: Heartbeat, how: str, witness: Heartbeat) -> Verdict:
    """Return the verdict about a rank that died or sends no heartbeats.

    `witness`: heartbeat of the rank that noticed. The text also names this rank's position, because the last heartbeat
    of the lost rank may be old.
    """
    text = f"rank {heartbeat.rank} on {heartbeat.host} {how}; its last heartbeat came from {heartbeat.where()}"
    return Verdict("lost", (heartbeat.rank,), f"{text}; rank {witness.rank} is now in {witness.where()}")


def failed(heartbeat: Heartbeat, error: BaseException) -> Verdict:
    text = f"rank {heartbeat.rank} on {heartbeat.host} failed in {heartbeat.where()}"
    return Verdict("failed", (heartbeat.rank,), f"{text}: {type(error).__name__}: {first_line(error)}")


def diagnose(
    heartbeats: Mapping[int, Heartbeat],
    silent_s: Mapping[int, float],
    timeouts: ParallelSection,
    witness: Heartbeat,
    busy_silent: Collection[int] = (),
) -> Verdict | None:
    """Return a verdict about the ranks, or None if they make progress.

    `silent_s`: seconds since the last new heartbeat of each rank, by the clock of this process. `busy_silent`: silent
    ranks whose process uses the CPU: a long call into C keeps their heartbeat thread from running.
    """
    for heartbeat in (heartbeats[rank] for rank in sorted(heartbeats)):
        quiet = silent_s[heartbeat.rank]
        if quiet > (timeouts.timeout_s if heartbeat.rank in busy_silent else timeouts.silence_s):
            return lost(heartbeat, f"sent no heartbeat for {quiet:.0f} s (dead, stopped or disconnected)", witness)
    present = [
        replace(heartbeats[rank], activity=COMPUTING, collective="", still_s=silent_s[rank])
        if rank in busy_silent
        else heartbeats[rank]
        for rank in sorted(heartbeats)
    ]
    if len(present) < 2 or any(heartbeat.activity == COMPILING for heartbeat in present):
        return None
    still = min(heartbeat.still_s for heartbeat in present)
    working = any(heartbeat.at_work for heartbeat in present)
    if len({heartbeat.position for heartbeat in present}) == 1:
        if still > timeouts.timeout_s and not working:  # all ranks stopped at the same point of a step, and none works
            text = f"all ranks have stood still for {still:.0f} s in {present[0].where()}"
            return Verdict("stalled", tuple(sorted(heartbeats)), text)
        return None
    if all(heartbeat.collective for heartbeat in present):
        if still > min(DISAGREE_S, timeouts.stall_s):
            return _disagreement(present)
        return None
    # The short limit `stall_s` applies only if a rank stands still for no known reason, and no rank is at work, for
    # which the others may wait. Ranks that wait for their devices may wait in a collective there, whose backend has
    # its own timeout.
    unexplained = any(not heartbeat.collective and heartbeat.activity == UNEXPLAINED for heartbeat in present)
    if still > (timeouts.stall_s if unexplained and not working else timeouts.timeout_s):
        return _holds_up(present, still)
    return None


def _disagreement(present: Sequence[Heartbeat]) -> Verdict:
    """Return the verdict about ranks that wait in different collectives."""
    positions = [heartbeat.position for heartbeat in present]
    # The position of most ranks counts as right. In a tie, the position of the lowest rank counts.
    right = max(dict.fromkeys(positions), key=positions.count)
    wrong = [heartbeat for heartbeat in present if heartbeat.position != right]
    others = [heartbeat for heartbeat in present if heartbeat.position == right]
    text = f"{_name(wrong)} out of step: {wrong[0].where()}; while {_name(others)} in {others[0].where()}"
    return Verdict("disagree", tuple(heartbeat.rank for heartbeat in wrong), text)


def _holds_up(present: Sequence[Heartbeat], still: float) -> Verdict:
    """Return the verdict about ranks that hold up the others."""
    # Ranks in a collective wait for the ranks outside of it. Of these, blame ranks without a known activity first. If
    # no rank waits in a collective on the host (the wait is on the device), blame the ranks that are furthest behind.
    idle = [heartbeat for heartbeat in present if not heartbeat.collective]
    idle = [heartbeat for heartbeat in idle if heartbeat.activity == UNEXPLAINED] or idle
    if len(idle) == len(present):
        behind = min((heartbeat.step, _order(heartbeat.phase)) for heartbeat in present)
        idle = [heartbeat for heartbeat in present if (heartbeat.step, _order(heartbeat.phase)) == behind]
    text = f"{_name(idle)} holding up the others: no progress for {still:.0f} s in {idle[0].where()}"
    return Verdict("stalled", tuple(heartbeat.rank for heartbeat in idle), text)


def _order(phase: str) -> int:
    return STEP_PHASES.index(phase) if phase in STEP_PHASES else -1


def _name(group: Sequence[Heartbeat]) -> str:
    who = name_ranks([heartbeat.rank for heartbeat in group])
    return f"{who} on {group[0].host} is" if len(group) == 1 else f"{who} are"
