"""Callbacks of a small job in Megatron's style: model, data, forward step and three forms of loss function."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tessera_compat.mindspeed_mm.data import move_to_device
from tessera_compat.state import get_args

WIDTH, LENGTH = 4, 6


class Points(Dataset[dict[str, Any]]):
    """Sequences with a mask; each sample also has a name, which is no tensor."""

    def __init__(self, count: int = 32, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, LENGTH, WIDTH, generator=chance)
        lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=chance)
        self.mask = (torch.arange(LENGTH)[None] < lengths).float()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": self.x[number], "loss_mask": self.mask[number], "name": f"sample-{number}"}


class Net(nn.Module):
    """Return a squared error for each element of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.outer(torch.tanh(self.inner(x))).squeeze(-1)
        return (output - x.sum(-1)).square()


def model_provider(pre_process: bool = True, post_process: bool = True) -> Net:
    assert pre_process
    assert post_process
    torch.manual_seed(7)
    return Net()


def datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    return Points(), Points(16, seed=1), Points(16, seed=2)


def loaders_provider() -> tuple[Any, Any, Any]:
    """Build train, valid and test loaders, as the migration guide prints it: without an argument."""
    size = get_args().micro_batch_size
    return tuple(DataLoader(Points(count, seed), batch_size=size) for seed, count in enumerate((32, 16, 16)))  # type: ignore[return-value]


def get_batch(data_iterator: Iterator[Any]) -> dict[str, Any]:
    batch: dict[str, Any] = next(data_iterator)
    move_to_device(batch, get_args().params_dtype)
    return batch


def mean_loss(mask: Tensor, errors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (errors * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach()}


def sum_loss(mask: Tensor, errors: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    total, tokens = (errors * mask).sum(), mask.sum()
    return total, tokens, {"lm loss": (total.detach(), tokens)}


def bare_loss(errors: Tensor) -> Tensor:
    return errors.mean()


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    batch = get_batch(data_iterator)
    return model(batch["x"]), partial(mean_loss, batch["loss_mask"])


def forward_step_sum(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    batch = get_batch(data_iterator)
    return model(batch["x"]), partial(sum_loss, batch["loss_mask"])


def forward_step_bare(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    return model(get_batch(data_iterator)["x"]), bare_loss


def flags(save: Path | None, *more: str, iterations: int = 4, micro: int = 2, batch: int = 8) -> list[str]:
    words = f"--train-iters {iterations} --micro-batch-size {micro} --global-batch-size {batch} --lr 0.01 --seed 3"
    words += " --lr-decay-style constant --log-interval 1 --eval-interval 2 --eval-iters 1 --num-workers 0"
    saved = [] if save is None else ["--save", str(save), "--save-interval", "2"]
    return [*words.split(), *saved, *more]


@contextlib.contextmanager
def command_line(*words: str) -> Iterator[None]:
    before, sys.argv = sys.argv, ["pretrain_toy.py", *words]
    try:
        yield
    finally:
        sys.argv = before
