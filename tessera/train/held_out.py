"""Held-out rows, dealt over the ranks, as evaluation reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tessera.core.run_config import RunConfig
from tessera.core.types import Batch, RowSource
from tessera.data.loader.loader import ReadApart, decodes_media
from tessera.data.loader.tune import usable_cpus
from tessera.parallel.axes import DATA
from tessera.parallel.mesh import Mesh
from tessera.train.callbacks import Callback

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

_WORKERS = 4  # at most, where a recipe leaves the number of processes to us


class HeldOut(Callback):
    """All ranks have equally many batches of one row; a rank with no row left repeats one, which does not count.

    Media are decoded in processes of their own: a decoder that crashes costs its sample, never the run. Text is read in
    the training process, which is sooner done, and so is everything with `data.workers: 0`.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, source: RowSource, ranks_here: int) -> None:
        self._total = min(config.train.eval_rows, len(source))
        self._rows = [first + mesh.position(DATA) for first in range(0, self._total, mesh.size(DATA))]
        wanted = config.data.workers
        workers = min(usable_cpus(ranks_here), _WORKERS) if wanted == "auto" else wanted
        workers = min(workers, len(self._rows)) if decodes_media(source) else 0
        self._reader = ReadApart(source, workers, config.data.sample_timeout_s)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """Each with whether it counts."""
        made = self._reader.batches([min(row, self._total - 1)] for row in self._rows)
        for row, batch in zip(self._rows, made, strict=True):
            yield batch, row < self._total

    def on_end(self, trainer: Trainer) -> None:
        self._reader.close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._reader.close()
