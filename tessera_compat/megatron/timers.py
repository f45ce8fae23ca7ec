"""Measure parts of a script by name, as the timers of `megatron.training`: `get_timers()("batch-generator").start()`.

They measure time on the host. They do not wait for work on the device, so that measuring slows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from tessera.errors import TesseraError
from tessera_compat import state


class Timer:
    """Sum up the time between calls of `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seconds = 0.0
        self._since: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start the timer. With `barrier`, wait for all ranks first."""
        if self._since is not None:
            raise TesseraError(
                f"timer {self.name!r} is running already",
                where="timers",
                fix="stop it first",
                code="megatron.timer-state",
            )
        if barrier and dist.is_initialized():
            dist.barrier()
        self._since = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Add the time since `start`."""
        if self._since is None:
            raise TesseraError(
                f"timer {self.name!r} is not running", where="timers", fix="start it first", code="megatron.timer-state"
            )
        if barrier and dist.is_initialized():
            dist.barrier()
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def reset(self) -> None:
        """Set the measured time to zero."""
        self._seconds = 0.0

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds measured so far, also while the timer runs."""
        running = self._since is not None
        if running:
            self.stop(barrier)
        seconds = self._seconds
        if reset:
            self.reset()
        if running:
            self.start()
        return seconds


class Timers:
    """Store the timers of a run by name."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of this name. `log_level` has no effect."""
        return self._timers.setdefault(name, Timer(name))

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the milliseconds of timers (None: all timers), on a single rank, by default the last."""
        if barrier and dist.is_initialized():
            dist.barrier()
        here, last = (dist.get_rank(), dist.get_world_size() - 1) if dist.is_initialized() else (0, 0)
        chosen = [self._timers[name] for name in names or self._timers if name in self._timers]
        parts = [f"{timer.name}: {timer.elapsed(reset) * 1000 / normalizer:.2f}" for timer in chosen]
        if here == (last if rank is None else rank) and parts:
            print("time (ms) | " + " | ".join(parts), flush=True)


def get_timers() -> Timers:
    """Return the timers of this run."""
    current = state.current()
    if current.timers is None:
        current.timers = Timers()
    assert isinstance(current.timers, Timers)
    return current.timers
