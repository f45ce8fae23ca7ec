"""Data sets and loaders as a user would write them, with nothing of this house in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tests.toys.digits import load_digits


class Digits(Dataset[dict[str, Any]]):
    """Scans of digits with a little noise, drawn from the common stream."""

    def __init__(self, count: int = 48, noise: float = 0.0) -> None:
        pixels, labels = load_digits()
        self.pixels, self.labels = pixels[:count].clone(), labels[:count]  # `Spoiled` writes into its own
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        noise = self.noise * torch.randn(64) * random.random()
        return {"pixels": self.pixels[number] + noise, "labels": self.labels[number], "id": f"digit-{number}"}


class Pairs(Digits):
    def __getitem__(self, number: int) -> Any:
        return self.pixels[number], int(self.labels[number])


class DigitStream(IterableDataset[dict[str, Any]]):
    def __init__(self, count: int = 20) -> None:
        self.digits = Digits(count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.digits[number] for number in range(len(self.digits)))


DIGITS = Digits(10)
WIDTH = 64


def keyed(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"pixels": torch.stack([item["pixels"] for item in items]), "count": torch.tensor([len(items)])}


def digit_loader(batch_size: int = 4, shuffle: bool = True, count: int = 48, workers: int = 0) -> DataLoader[Any]:
    # A test process has threads: a worker that is forked from it may crash. One of a fork server would outlive it.
    context = "spawn" if workers else None
    return DataLoader(
        Digits(count), batch_size=batch_size, shuffle=shuffle, num_workers=workers, multiprocessing_context=context
    )


def ranked_loader(rank: int, ranks: int, batch_size: int = 4) -> DataLoader[Any]:
    digits = Digits(48)
    sampler: Any = DistributedSampler(digits, ranks, rank, shuffle=True)
    return DataLoader(digits, batch_size=batch_size, sampler=sampler)


class Chats(Dataset[Any]):
    """Conversations as a list of any kind of item."""

    def __init__(self, items: list[Any] | None = None, pictures: int = 0) -> None:
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Red."}]
        visible = [{"messages": turns, "images": [Image.new("RGB", (20, 20))]} for _ in range(pictures)]
        self.items = items if items is not None else visible

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def rows_of_no_source(request: Any) -> Any:
    """Answer as a data kind does, with something that is no `RowSource`."""
    return [1, 2, 3]


class Spoiled(Digits):
    """Digits of which some are no numbers."""

    def __init__(self, bad: list[int], count: int = 48) -> None:
        super().__init__(count)
        self.pixels[bad] = float("nan")


def spoiled_loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Spoiled([11]), batch_size=batch_size)
