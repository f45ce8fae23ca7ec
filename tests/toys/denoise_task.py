"""Predict the noise that was added to a picture. Noise is a function of the row: any split of a batch sees the same."""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTerm, Metric, Task
from tessera.runtime.rng import generator


class DenoiseTask(Task):
    def counts(self, batch: Batch) -> dict[str, int]:
        return {"points": len(batch["clean"])}

    def inputs(self, batch: Batch) -> Batch:
        clean = batch["clean"]
        rows = clean.split(len(clean) // len(batch.seeds))
        draws = [self._draw(rows[i], seed) for i, seed in enumerate(batch.seeds)]
        noise, time = (torch.cat(parts) for parts in zip(*draws, strict=True))
        return batch.with_tensors(noise=noise, time=time, noisy=(1 - time) * clean + time * noise)

    def _draw(self, row: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        stream = generator(row.device, seed)
        return torch.randn(row.shape, generator=stream), torch.rand(len(row), 1, generator=stream)

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        error = (outputs - (batch["noise"] - batch["clean"])).square().mean(1)
        late = error[batch["time"][:, 0] > 0.5].sum().detach()
        return Losses([LossTerm("error", error.sum(), "points")], {"late": Metric(late, "points")})


TASK = DenoiseTask
