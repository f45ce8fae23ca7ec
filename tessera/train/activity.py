"""What a rank is doing right now, found out from beside its main thread and without stopping it.

The watchdog must not end a run that would have gone on. So before it judges a rank that stands still, it asks here:
is the rank reading data, compiling, computing, waiting in a collective or for its device? Only a rank of which nothing
of this is true is one that cannot be explained.
"""

from __future__ import annotations

import collections
import sys
from types import FrameType
from typing import Final

from tessera.core.dist import wait_for

# What a rank can be at when it is at work on something that others have to wait for.
READING: Final = "reading data"
COMPILING: Final = "compiling"
OUTSIDE: Final = "outside of a step"  # starting, evaluating, saving, callbacks: they take the time they need
COMPUTING: Final = "computing"
AT_WORK = frozenset({READING, COMPILING, OUTSIDE, COMPUTING})
# Its device has unfinished work. That may be a collective: this cannot be told apart from waiting for another rank.
ON_DEVICE: Final = "waiting for its device"
UNEXPLAINED: Final = ""

_BUSY_SHARE = 0.05  # of one core; a process that only waits needs far less, with its threads that look around

# Places in Python code that a thread stands in only while something is being compiled: (file, part of the function).
_COMPILERS = (
    ("torch/_dynamo/convert_frame.py", ""),
    ("torch/_inductor/compile_fx.py", "compile"),
    ("torch/_inductor/runtime/triton_heuristics.py", "bench"),
    ("torch/utils/cpp_extension.py", ""),
    ("triton/compiler/", ""),
    ("triton/runtime/autotuner.py", "bench"),
    ("triton/runtime/build.py", ""),
)
# Code that stands between a caller of a collective and the call into C++: it is looked through.
_WRAPPERS = (
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/_library/",
    "torch/autograd/function.py",
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
    "contextlib.py",
)
# Where a thread that stands inside of torch.distributed computes rather than waits: a module or an operation on sharded
# tensors is called from there, and nothing of Python may be in between.
_COMPUTES = (
    "torch/distributed/algorithms/",
    "torch/distributed/tensor/_dispatch.py",
    "torch/distributed/tensor/_api.py",
    "torch/distributed/tensor/_ops/",
    "torch/distributed/pipelining/_backward.py",
    "torch/distributed/pipelining/stage.py",
    "torch/distributed/pipelining/microbatch.py",
)


class Effort:
    """How much of one core a process has used, or wanted to, lately: see `Process.effort_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: collections.deque[tuple[float, float]] = collections.deque()

    def note(self, now: float, spent_s: float) -> None:
        self._seen.append((now, spent_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    @property
    def busy(self) -> bool:
        """True also as long as too little was seen to say no."""
        (began, spent_s), (now, spent_now_s) = self._seen[0], self._seen[-1]
        if now - began < self._window_s:
            return True
        return (spent_now_s - spent_s) / (now - began) > _BUSY_SHARE


def compiles() -> bool:
    """Whether a thread of this process is compiling. Backward of an accelerator runs in threads of its own."""
    return any(_compiles(frame) for frame in sys._current_frames().values())


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if any(file in code.co_filename and name in code.co_name for file, name in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def collective_of(thread: int) -> str:
    """The function of torch.distributed that a thread waits in, read from its stack; empty if it does not."""
    frame = sys._current_frames().get(thread)
    while frame is not None and any(file in frame.f_code.co_filename for file in _WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return ""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if "torch/distributed/" in file:
        return "" if any(other in file for other in _COMPUTES) else name
    return name if frame.f_code is wait_for.__code__ else ""
