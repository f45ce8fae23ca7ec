"""Positions without a label cost nothing, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.core.types import IGNORE, Batch, LanguageOutput, Segments, trained_positions
from tessera.tasks.answers import answer_log_probs
from tessera.tasks.language import LanguageTask
from tests.task_parts import sum_and_count


def given(share: float) -> tuple[Batch, Tensor, nn.Linear]:
    torch.manual_seed(0)
    labels = torch.randint(0, 50, (40,)).where(torch.rand(40) < share, IGNORE)
    batch = Batch({"tokens": torch.zeros(40, dtype=torch.int64), "labels": labels}, {"text": Segments.of([40])})
    return batch, torch.randn(40, 8, requires_grad=True), nn.Linear(8, 50, bias=False)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_of_trained_positions_is_the_loss(share: float) -> None:
    batch, hidden, head = given(share)
    found = []
    for one in (batch, batch.with_tensors(trained=trained_positions(batch["labels"]))):
        total, count = sum_and_count(LanguageTask(), LanguageOutput(hidden, head), one)
        found.append((total, count, *torch.autograd.grad(total, (hidden, head.weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_so_it_is_for_pairs_of_answers() -> None:
    batch, hidden, head = given(0.5)
    pair = torch.cat([torch.full((5,), -1), torch.arange(4).repeat_interleave(8), torch.full((3,), -1)])
    batch = batch.with_tensors(pair=pair, pair_ids=torch.arange(2))
    found = []
    for one in (batch, batch.with_tensors(trained=trained_positions(batch["labels"]))):
        logs = answer_log_probs(LanguageOutput(hidden, head), one)
        found.append((logs, *torch.autograd.grad((logs * torch.arange(4)).sum(), (hidden, head.weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
