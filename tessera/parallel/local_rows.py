"""The data set as one rank sees it: the same rows for ranks that work on them together, each with its own part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tessera.core.errors import TesseraError
from tessera.core.types import Batch, GuardedRows, RowSource, SparingRows, WeighedRows
from tessera.parallel.axes import CONTEXT, DATA, DEAL, Axes
from tessera.parallel.context.local_part import own_part
from tessera.parallel.planning.context import ContextPlan


class LocalRows:
    """A `RowSource` around another. All of it happens on the host, in the loader's processes.

    Of the ranks that read the same rows one reports them; for the others they count nothing and have no names.
    """

    def __init__(
        self,
        source: RowSource,
        axes: Axes,
        rank: int,
        *,
        reports: bool = True,
        context: ContextPlan | None = None,
        flops: Callable[[Batch], float] | None = None,
    ) -> None:
        self.source = source
        self.reports = reports
        self.context = context
        self.flops = flops
        self.position = axes.position(rank, CONTEXT)
        self.deal = axes.position(rank, DEAL)
        # A source that deals rows to ranks by itself is asked whether it means the same ranks.
        check: Callable[[int, int], None] | None = getattr(source, "check_ranks", None)
        if check is not None:
            check(axes.position(rank, DATA), axes.size(DATA))

    @property
    def bad_samples(self) -> Sequence[tuple[str, str]]:
        return self.source.bad_samples

    @property
    def bad_count(self) -> int:
        """Of samples left out, also those that are not listed."""
        return int(getattr(self.source, "bad_count", len(self.bad_samples)))

    @property
    def identity(self) -> str:
        """Changes with the order of rows; empty where the source cannot tell."""
        return str(getattr(self.source, "identity", ""))

    def __len__(self) -> int:
        return len(self.source)

    @property
    def in_order(self) -> bool:
        """Whether rows can only be read one after another, by one reader."""
        return bool(getattr(self.source, "in_order", False))

    @property
    def decodes_media(self) -> bool:
        """Whether making a row runs decoders of media, which belong into a worker process."""
        return bool(getattr(self.source, "decodes_media", False))

    def work(self, rows: Sequence[int]) -> Sequence[float]:
        """Of whole rows, so that all ranks deal them alike; the same for each where the source cannot tell."""
        return self.source.work(rows) if isinstance(self.source, WeighedRows) else [1.0] * len(rows)

    def without(self, samples: Mapping[str, str]) -> LocalRows | None:
        source = self.source.without(samples) if isinstance(self.source, SparingRows) else None
        if source is None:
            return None
        found = copy.copy(self)
        found.source = source
        return found

    def batch(self, rows: Sequence[int]) -> Batch:
        return self._own(self.source.batch(rows))

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        if isinstance(self.source, GuardedRows):
            return self._own(self.source.guarded(rows, lost, note))
        if lost:
            raise TesseraError(
                f"making a batch of rows {list(rows)} failed: {next(iter(lost.values()))}",
                where="data.kind",
                fix="set data.workers=0 to see where",
            )
        return self.batch(rows)

    def _own(self, batch: Batch) -> Batch:
        if not self.reports:
            batch = replace(batch, sample_ids=(), rows=(), problems=(), counts=dict.fromkeys(batch.counts, 0))
        elif self.flops is not None:
            batch = replace(batch, flops=self.flops(batch))
        return batch if self.context is None else own_part(batch, self.context, self.position, self.deal)
