"""The data set as one rank sees it: the same rows for ranks that work on them together, each with its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tessera.core.types import Batch, RowSource
from tessera.parallel.axes import CONTEXT, DEAL, Axes
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

    @property
    def bad_samples(self) -> Sequence[tuple[str, str]]:
        return self.source.bad_samples

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, rows: Sequence[int]) -> Batch:
        batch = self.source.batch(rows)
        if not self.reports:
            batch = replace(batch, sample_ids=(), problems=(), counts=dict.fromkeys(batch.counts, 0))
        elif self.flops is not None:
            batch = replace(batch, flops=self.flops(batch))
        return batch if self.context is None else own_part(batch, self.context, self.position, self.deal)
