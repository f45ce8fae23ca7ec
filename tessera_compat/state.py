"""Hold the ambient state that the copied APIs read: one object per run, which `destroy` removes.

Only `tessera_compat` reads it. The library passes such objects as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError


@dataclass
class RunState:
    """Hold the ambient state of one run. A part is None until the call that makes it."""

    args: Any = None  # the namespace that `get_args` returns
    parallel: Any = None  # the process groups that `parallel_state` answers from
    rng: Any = None  # the named random streams that `get_cuda_rng_tracker` returns
    rank_callbacks: Any = None  # callbacks that keep this rank bound to its cores
    timers: Any = None  # what `get_timers` returns
    session: Any = None  # the trainer behind `pretrain`, with model and data
    # The modules whose `_fully_shard` runs, innermost last, each with its settings and the keywords of fully_shard.
    sharding: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)


class StateHolder:
    """Keep the state of the run in this process, if there is one."""

    def __init__(self) -> None:
        self.state: RunState | None = None


HOLDER = StateHolder()


def current() -> RunState:
    """Return the state of this run; the first call begins it."""
    if HOLDER.state is None:
        HOLDER.state = RunState()
    return HOLDER.state


def destroy() -> None:
    """Forget the run: the next call of `current` begins another one."""
    HOLDER.state = None


def get_args() -> Any:
    """Return the arguments of this run."""
    args = current().args
    if args is None:
        raise TesseraError(
            "the arguments of the run are not parsed yet",
            where="get_args",
            fix="call pretrain(...) or initialize_megatron(...) first, or get_args() inside of a callback",
            code="job.arguments-not-parsed",
        )
    return args


def set_args(args: Any) -> None:
    """Make these the arguments that `get_args` returns."""
    current().args = args
