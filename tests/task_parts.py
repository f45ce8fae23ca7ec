"""The loss of one micro-batch as a pair: the weighted sum of all terms, and the count of the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.task import Task


def sum_and_count(task: Task, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    losses = task.losses(outputs, batch)
    counts = losses.counts or task.counts(batch)
    assert counts is not None
    total = torch.stack([term.weight * term.sum for term in losses.terms]).sum()
    return total, torch.as_tensor(counts[losses.terms[0].count])
