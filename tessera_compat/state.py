"""Hold the global state that functions of Megatron's API read: one object per run, which `destroy` removes.

Only `tessera_compat` reads it. The library passes such objects as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError


@dataclass
class RunState:
    """Store the global state of a run. A field is None until the function that sets it is called."""

    args: Any = None  # the parsed arguments that `get_args` returns
    parallel: Any = None  # process groups that `parallel_state` returns
    rng: Any = None  # the named random streams that `get_cuda_rng_tracker` returns
    rank_callbacks: Any = None  # callbacks that bind this rank to CPU cores
    timers: Any = None  # the timers that `get_timers` returns
    session: Any = None  # the trainer behind `pretrain`, with model and data
    # Modules whose `_fully_shard` is running, innermost last, with their settings and arguments of fully_shard.
    sharding: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)


class StateHolder:
    """Store the state of the current run of this process, if there is one."""

    def __init__(self) -> None:
        self.state: RunState | None = None


HOLDER = StateHolder()


def current() -> RunState:
    """Return the state of the current run. The first call creates it."""
    if HOLDER.state is None:
        HOLDER.state = RunState()
    return HOLDER.state


def destroy() -> None:
    """Remove the state. The next call of `current` creates a new state."""
    HOLDER.state = None


def get_args() -> Any:
    """Return the arguments of this run."""
    args = current().args
    if args is None:
        raise TesseraError(
            "the arguments of the run are not parsed yet",
            where="get_args",
            fix="call pretrain(...) or initialize_megatron(...) before get_args()",
            code="job.arguments-not-parsed",
        )
    return args


def set_args(args: Any) -> None:
    """Set the arguments that `get_args` returns."""
    current().args = args
