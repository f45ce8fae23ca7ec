"""Language training that runs out of memory in one forward pass of one rank, counted from 0."""

from __future__ import annotations

from typing import Any

import torch

from tessera.core.batch import Batch
from tessera.runtime.distributed import environment_ranks
from tessera.tasks.language import LanguageTask

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 24.00 GiB"


class GreedyTask(LanguageTask):
    def __init__(self, at: int | None = None, rank: int = 0, real: bool = False) -> None:
        super().__init__()
        self.at, self.passes, self.real = at, 0, real
        self.here = environment_ranks()[0] == rank

    def forward(self, model: Any, batch: Batch) -> Any:
        self.passes += 1
        if self.here and self.passes - 1 == self.at:
            if self.real:  # more than any device has
                torch.empty(1 << 46, dtype=torch.uint8, device=batch["tokens"].device)
            raise torch.OutOfMemoryError(SAID)
        return super().forward(model, batch)


TASK = GreedyTask
