"""The life of one worker process: takes items from its socket, works on them, sends back what came of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessera.core.errors import first_line
from tessera.data.processes.messages import Packed, can_travel, receive

STATE_BYTES = 32
_NOTHING = -(1 << 63)


class WorkerState:
    """What a worker is at, in memory that the pool sees too: also when the worker is stuck or dead."""

    def __init__(self, fd: int) -> None:
        self._numbers = memoryview(mmap.mmap(fd, STATE_BYTES)).cast("q")

    def begin(self, item: int) -> None:
        self._numbers[1] = _NOTHING
        self._numbers[0] = item

    def note(self, number: int) -> None:
        self._numbers[2] = time.monotonic_ns()
        self._numbers[1] = number

    def end(self) -> None:
        self._numbers[0] = _NOTHING

    @property
    def item(self) -> int | None:
        return None if self._numbers[0] == _NOTHING else self._numbers[0]

    @property
    def noted(self) -> int | None:
        return None if self._numbers[1] == _NOTHING else self._numbers[1]

    @property
    def silent_seconds(self) -> float:
        """Since the last note about the item; 0 before the first. The clock is the same in all processes."""
        if self.item is None or self.noted is None:
            return 0.0
        return (time.monotonic_ns() - self._numbers[2]) / 1e9


def work_until_end(work: Callable[[Any, Callable[[int], None]], Any], fds: Sequence[int]) -> None:
    """`work` may raise; the exception is sent in place of a result."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # where memory runs out, a worker can be replaced, the trainer cannot
    pool, state = socket.socket(fileno=fds[0]), WorkerState(fds[1])
    os.close(fds[1])
    while True:
        try:
            number, item = receive(pool)
        except (EOFError, ConnectionError):
            return
        state.begin(number)
        try:
            answer = Packed((number, True, work(item, state.note)))
        except BaseException as error:
            answer = Packed((number, False, _as_it_travels(error)))
        state.end()
        del item
        try:
            answer.send(pool)
        except ConnectionError:
            return
        del answer


def _as_it_travels(error: BaseException) -> BaseException:
    """The exception itself, with what its traceback said, where it can be rebuilt on the other side."""
    said = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    error.add_note(f"(in a worker process)\n{said}")
    if can_travel(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {first_line(error)}\n(in a worker process)\n{said}")
