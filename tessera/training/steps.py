"""Read the micro-batches of each step, and end the wait for data when a stop is requested."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.step_source import StepSource
from tessera.data.loader.loader import Loader
from tessera.errors import TesseraError

_READ_AGAIN = "left out of a probe"  # why samples are masked if the guard leaves them out of a repeated step


class LoaderSteps(StepSource):
    """Read the rows of a data set through a loader. Checkpoints store the position as a row index."""

    def __init__(self, rows: RowSource, open_loader: Callable[[RowSource, int], Loader]) -> None:
        """Take the rows of this rank. `open_loader`: returns a loader that begins at a row index."""
        self._rows, self._open_loader = rows, open_loader
        self._left_out: dict[str, str] = {}
        self._loader: Loader | None = None

    def start(self, step: int, row: int) -> None:
        self.close()
        self._loader = self._open_loader(self._without({}), row)

    def next_step(self) -> Sequence[Batch]:
        assert self._loader is not None, "`start` opens it"
        return next(self._loader)

    def close(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    @property
    def can_read_again(self) -> bool:
        return True

    @property
    def can_leave_out(self) -> bool:
        return self._rows.without({}) is not None

    def leave_out(self, samples: Mapping[str, str]) -> None:
        self._left_out |= samples

    def read_again(self, rows: Sequence[int], without: Collection[str] = ()) -> Batch:
        return self._without(dict.fromkeys(without, _READ_AGAIN)).batch(rows)

    def _without(self, samples: Mapping[str, str]) -> RowSource:
        samples = {**self._left_out, **samples}
        return (self._rows.without(samples) or self._rows) if samples else self._rows


class WaitEnded(BaseException):
    """End the wait for data after a stop request.

    It does not derive from `Exception`, which readers would report as a bad sample.
    """


class DataWait:
    """Wait for the data of a step. A stop request ends the wait.

    Reading may take minutes, for example from a slow hub, but a cluster scheduler kills a run seconds after its stop
    request. A rank may stop waiting without blocking others: a step begins only after all ranks have its data.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # total seconds spent on waiting
        self._thread: int | None = None  # id of the thread that waits

    def next_step(self, source: StepSource, is_stopping: Callable[[], bool]) -> Sequence[Batch] | None:
        """Return the micro-batches of the next step; None if a stop was requested before they were ready."""
        started = time.perf_counter()
        try:
            self._thread = threading.get_ident()
            if is_stopping():
                return None
            microbatches = source.next_step()
            self._thread = None
        except WaitEnded:
            return None
        finally:
            self._thread = None
            self.seconds += time.perf_counter() - started
        _check_step(microbatches, source)
        return microbatches

    def end(self) -> None:
        """Raise `WaitEnded` if this thread waits for data. Signal handlers, which run in that thread, call this."""
        if self._thread == threading.get_ident():
            self._thread = None
            raise WaitEnded


def unequal_steps(source: StepSource, here: int) -> TesseraError:
    """Return the error for a `next_step` that returned different numbers of micro-batches on different ranks."""
    return TesseraError(
        f"next_step of {type(source).__name__} returned {here} micro-batches here, and another number on other ranks",
        where="the step source",
        fix="return as many on every rank: all ranks run the collectives of every micro-batch together",
        code="data.unequal-batches",
    )


def _check_step(microbatches: object, source: StepSource) -> None:
    """Raise unless a step source returned one or more batches."""
    if isinstance(microbatches, Sequence) and microbatches:
        if all(isinstance(batch, Batch) for batch in microbatches):
            return
        returned = f"a sequence of {type(microbatches[0]).__name__}"
    else:
        returned = "no batch" if isinstance(microbatches, Sequence) else f"a {type(microbatches).__name__}"
    raise TesseraError(
        f"next_step of {type(source).__name__} returned {returned}",
        where="the step source",
        fix="return a list of one or more tessera.core.batch.Batch, as many on every rank",
        code="data.no-batches",
    )
