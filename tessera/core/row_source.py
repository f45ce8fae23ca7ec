"""Define a data set for the loader: rows by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from tessera.core.batch import Batch
from tessera.errors import TesseraError

ENDLESS = 1 << 40  # rows of one epoch of data without a known length


class RowSource(ABC):
    """Base class of data sets for the loader: rows by number, each a pure function of its number.

    Row numbers count draws since the start of training, so that number // len(source) is the epoch. A source is pickled
    to worker processes and called there: it holds no open file and no device tensor. Only `__len__` and `batch` must be
    written; the other members are optional.
    """

    @property
    def bad_samples(self) -> Sequence[tuple[str, str]]:
        """Return (id, reason) of samples that were left out before training began; a long list may be shortened."""
        return ()

    @property
    def bad_count(self) -> int:
        """Return how many samples were left out before training began, also those that are not listed."""
        return len(self.bad_samples)

    @property
    def identity(self) -> str:
        """Return a hash that changes whenever a row would contain other samples; "": unknown.

        Several hashes may be joined by slashes: rows are the same if one of them is unchanged.
        """
        return ""

    @property
    def rows_per_step(self) -> int | None:
        """Return the rows of a step if the source decides it (train.samples_per_step); None: as in the recipe."""
        return None

    @property
    def sequential(self) -> bool:
        """Return whether rows can only be read one after another, by one process."""
        return False

    @property
    def decodes_media(self) -> bool:
        """Return whether a batch needs media decoders, which may crash and so run in worker processes."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows in one epoch."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return one micro-batch of these rows, with `sample_ids`, `rows`, `counts`, `seeds` and `problems` filled."""

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        """Return `batch(rows)` in a worker process, which a sample may crash.

        `note(n)` is called before sample n is read, so that a crash can be attributed; samples in `lost` (with the
        reason) crashed a process before and are left out. A source that does not call `note` cannot leave samples out.
        """
        if lost:
            raise TesseraError(
                f"making a batch of rows {list(rows)} failed: {next(iter(lost.values()))}",
                where="data.kind",
                fix="set data.workers=0 to see where",
                code="data.batch-failed",
            )
        return self.batch(rows)

    def work(self, rows: Sequence[int]) -> Sequence[float] | None:
        """Return the cost of each row, to balance ranks; None: unknown, and all rows count alike."""
        return None

    def without(self, samples: Mapping[str, str]) -> RowSource | None:
        """Return the same rows with these samples (with the reason) masked; None: the source cannot leave any out."""
        return None

    def check_ranks(self, position: int, count: int) -> None:  # noqa: B027
        """Raise if the source splits its rows over other ranks than rank `position` of `count` data-parallel ones."""
