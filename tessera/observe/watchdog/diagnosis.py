"""Find out what each rank is doing, and which rank stops the others.

`collective_of`, `is_compiling` and `CpuUsage` describe the own process from another thread, without stopping it.
`diagnose` reads the heartbeats of all ranks and returns a `Verdict`; it uses no clock, process or network. The watchdog
must not end a run that would have gone on: a rank that reads data, compiles, computes or waits for its device is
waited for, and only a rank that does none of this is called stalled.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Final

from tessera.errors import first_line
from tessera.runtime.distributed import wait_for
from tessera.runtime.rendezvous import name_ranks

# Activities of a rank that the other ranks have to wait for.
READING: Final = "reading data"
COMPILING: Final = "compiling"
OUTSIDE: Final = "outside of a step"  # starting, evaluating, saving, callbacks: they take the time they need
COMPUTING: Final = "computing"
AT_WORK = frozenset({READING, COMPILING, OUTSIDE, COMPUTING})
# The device has unfinished work. That may be a collective, so the rank may also be waiting for another one.
ON_DEVICE: Final = "waiting for its device"
UNEXPLAINED: Final = ""

_BUSY_SHARE = 0.05  # of one core; a process that only waits needs far less, its watching threads included

# Code that is only on the stack while something is being compiled: (part of the file name, part of the function name).
_COMPILERS = (
    ("torch/_dynamo/convert_frame.py", ""),
    ("torch/_inductor/compile_fx.py", "compile"),
    ("torch/_inductor/runtime/triton_heuristics.py", "bench"),
    ("torch/utils/cpp_extension.py", ""),
    ("triton/compiler/", ""),
    ("triton/runtime/autotuner.py", "bench"),
    ("triton/runtime/build.py", ""),
)
# Frames between the caller of a collective and the call into C++. They are skipped.
_WRAPPERS = (
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/_library/",
    "torch/autograd/function.py",
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "contextlib.py",
)
# Files of torch.distributed that call modules and operations on sharded tensors, possibly without a Python frame in
# between: a thread in there computes and does not wait.
_COMPUTES = (
    "torch/distributed/algorithms/",
    "torch/distributed/tensor/_dispatch.py",
    "torch/distributed/tensor/_api.py",
    "torch/distributed/tensor/_ops/",
    "torch/distributed/pipelining/_backward.py",
    "torch/distributed/pipelining/stage.py",
    "torch/distributed/pipelining/microbatch.py",
)
DISAGREE_S = 20.0  # all ranks wait, but in different collectives: no network is slow for so long
# The phases of a step in their order; the first one belongs to the step before.
STEP_PHASES = (
    "reporting",
    "loading data",
    "agreeing to go on",
    "running the model",
    "clipping gradients",
    "updating weights",
)


class CpuUsage:
    """Measure how much of one core a process used, or wanted to use, within a window. See `Process.effort_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: collections.deque[tuple[float, float]] = collections.deque()

    def note(self, now: float, spent_s: float) -> None:
        self._seen.append((now, spent_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    @property
    def busy(self) -> bool:
        """Return whether the process computes; True until a full window was observed."""
        (began, spent_s), (now, spent_now_s) = self._seen[0], self._seen[-1]
        if now - began < self._window_s:
            return True
        return (spent_now_s - spent_s) / (now - began) > _BUSY_SHARE


def is_compiling() -> bool:
    """Return whether a thread of this process is compiling. Autograd runs backward of accelerators in other threads."""
    return any(_is_compiling(frame) for frame in sys._current_frames().values())


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if any(file in code.co_filename and name in code.co_name for file, name in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def collective_of(thread: int) -> str:
    """Return the function of torch.distributed that a thread waits in, read from its stack; empty if there is none."""
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
    """Describe the activity of a rank, which it sends twice a second."""

    rank: int
    count: int  # rises with every heartbeat
    step: int  # steps done
    phase: str  # of the trainer
    module: str  # the block it is in, with the direction; empty outside of the model
    still_s: float  # how long its main thread has been at this position
    collective: str  # the collective its main thread waits in, if it does
    host: str
    activity: str  # the reason for which it stands still; empty: none is known
    busy_silent: tuple[int, ...] = ()  # ranks of its machine that are silent, and use the CPU

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Heartbeat:
        fields = json.loads(text)
        return Heartbeat(**{**fields, "busy_silent": tuple(fields["busy_silent"])})

    @property
    def at_work(self) -> bool:
        """Return whether the rank will go on by itself, however long others wait for it."""
        return not self.collective and self.activity in AT_WORK

    @property
    def position(self) -> tuple[int, str, str, bool]:
        """Return a key that is equal for ranks at the same place: either all of them wait, or none."""
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
    """Hold a diagnosis and the ranks that cause it."""

    kind: str  # lost, stalled, disagree, failed
    ranks: tuple[int, ...]  # the ranks that cause it
    text: str

    def dump(self) -> str:
        return json.dumps({"kind": self.kind, "ranks": list(self.ranks), "text": self.text})

    @staticmethod
    def load(text: str) -> Verdict:
        fields = json.loads(text)
        return Verdict(fields["kind"], tuple(fields["ranks"]), fields["text"])


@dataclass(frozen=True)
class Timeouts:
    """State limits in seconds; see the keys of the same names in `ParallelSection`."""

    silence_s: float
    stall_s: float
    timeout_s: float


def lost(heartbeat: Heartbeat, how: str, witness: Heartbeat) -> Verdict:
    """Return the verdict about a rank that is gone.

    Its last heartbeat may be older than its end. Ranks go in step, so its position was that of the witness.
    """
    text = f"rank {heartbeat.rank} on {heartbeat.host} {how}; its last heartbeat came from {heartbeat.where()}"
    return Verdict("lost", (heartbeat.rank,), f"{text}; rank {witness.rank} is now in {witness.where()}")


def failed(heartbeat: Heartbeat, error: BaseException) -> Verdict:
    text = f"rank {heartbeat.rank} on {heartbeat.host} failed in {heartbeat.where()}"
    return Verdict("failed", (heartbeat.rank,), f"{text}: {type(error).__name__}: {first_line(error)}")


def diagnose(
    heartbeats: Mapping[int, Heartbeat],
    silent_s: Mapping[int, float],
    timeouts: Timeouts,
    witness: Heartbeat,
    busy_silent: Collection[int] = (),
) -> Verdict | None:
    """Return a diagnosis of the ranks, or None if nothing is wrong.

    `silent_s`: seconds since the last new heartbeat of each rank, by the clock of the witness. `busy_silent`: silent
    ranks whose process is seen to compute: a long call into C keeps their other threads from running.
    """
    for heartbeat in (heartbeats[rank] for rank in sorted(heartbeats)):
        quiet = silent_s[heartbeat.rank]
        if quiet > (timeouts.timeout_s if heartbeat.rank in busy_silent else timeouts.silence_s):
            return lost(heartbeat, f"gave no sign of life for {quiet:.0f} s (dead, stopped or disconnected)", witness)
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
        if still > timeouts.timeout_s and not working:  # no rank waits for one that works at the same position
            text = f"all ranks have stood still for {still:.0f} s in {present[0].where()}"
            return Verdict("stalled", tuple(sorted(heartbeats)), text)
        return None
    if all(heartbeat.collective for heartbeat in present):
        if still > min(DISAGREE_S, timeouts.stall_s):
            return _disagreement(present)
        return None
    # While one rank works, the others may be waiting for it, whether that can be seen or not. Ranks that wait for their
    # devices may wait for each other there; the backend of the collectives has its own timeout for that.
    unexplained = any(not heartbeat.collective and heartbeat.activity == UNEXPLAINED for heartbeat in present)
    if still > (timeouts.stall_s if unexplained and not working else timeouts.timeout_s):
        return _holds_up(present, still)
    return None


def _disagreement(present: Sequence[Heartbeat]) -> Verdict:
    """Return the verdict about ranks that wait in different collectives."""
    positions = [heartbeat.position for heartbeat in present]
    # The largest group is taken to be right; among equal ones, that of the lowest rank.
    right = max(dict.fromkeys(positions), key=positions.count)
    wrong = [heartbeat for heartbeat in present if heartbeat.position != right]
    others = [heartbeat for heartbeat in present if heartbeat.position == right]
    text = f"{_name(wrong)} out of step: {wrong[0].where()}; while {_name(others)} in {others[0].where()}"
    return Verdict("disagree", tuple(heartbeat.rank for heartbeat in wrong), text)


def _holds_up(present: Sequence[Heartbeat], still: float) -> Verdict:
    """Return the verdict about the ranks that the others wait for."""
    # The culprit is a rank outside of any collective, first one with no known activity. If no rank is in a collective
    # on the host (the queue of an accelerator waits), it is the rank furthest behind.
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
