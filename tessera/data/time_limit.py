"""An end to work on one sample that takes too long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tessera.core.errors import TesseraError

_AGAIN_S = 1.0  # an exception raised inside a callback or a destructor is swallowed: it is raised once more


class TooSlow(TesseraError):
    """Work on one sample went past its time."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `TooSlow` inside the block when the time is over, as soon as the interpreter has its turn.

    A decoder that never comes back from C is not reached by this; in a worker process the pool ends the process.
    Only the main thread of a process can be interrupted (where workers do all of their work): elsewhere nothing is
    limited. Inside another limit, the inner one rules until it ends; then the outer one goes on.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def over(number: int, frame: FrameType | None) -> None:
        if inside:
            raise TooSlow(f"took longer than {seconds:g} s", fix="raise data.sample_timeout_s if the file is sound")

    before = signal.signal(signal.SIGALRM, over)
    began = time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        try:
            inside = False
        finally:  # also if the time was over just now
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - began)), again)
