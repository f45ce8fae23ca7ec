"""Define the interface of data sets for the loader: rows by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from tessera.core.batch import Batch
from tessera.core.sample import BadSample
from tessera.errors import TesseraError

ENDLESS = 1 << 40  # number of rows of an epoch if the length of the data is unknown


class RowSource(ABC):
    """Base class of data sets for the loader. A row depends on nothing but its index.

    The index counts rows since the start of training, so index // len(source) is the epoch. A source is pickled
    to worker processes and called there: it holds no open file and no device tensor. Only `__len__` and `batch` must be
    written; the other members are optional.
    """

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        """Return samples that were left out before training began; the list may be truncated (see `bad_count`)."""
        return ()

    @property
    def bad_count(self) -> int:
        """Return how many samples were left out before training began. `bad_samples` may list fewer."""
        return len(self.bad_samples)

    @property
    def identity(self) -> str:
        """Return a hash of the assignment of samples to rows; "": unknown. A resume compares it with the checkpoint's.

        It may be several hashes, joined by slashes, such as one with file paths and one of the content. Rows are
        unchanged if any of them is equal.
        """
        return ""

    @property
    def rows_per_step(self) -> int | None:
        """Return the rows per step if the source sets them (train.samples_per_step); None: the recipe sets them."""
        return None

    @property
    def sequential(self) -> bool:
        """Return whether rows can only be read one after another, by one process."""
        return False

    @property
    def decodes_media(self) -> bool:
        """Return whether a batch needs media decoders. They may crash, so they run in worker processes."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows in one epoch."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Return one micro-batch of these rows. It must set `sample_ids`, `rows`, `counts`, `seeds` and `problems`."""

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
        """Return the cost of each row in FLOPs, to balance ranks; None: unknown, so all rows have equal cost."""
        return None

    def without(self, samples: Mapping[str, str]) -> RowSource | None:
        """Return a source with the same rows in which these samples are masked; None if it cannot mask samples.

        `samples`: id -> reason.
        """
        return None

    def check_ranks(self, position: int, count: int) -> None:  # noqa: B027
        """Raise if the source was made for another data-parallel rank than `position` of `count`."""
