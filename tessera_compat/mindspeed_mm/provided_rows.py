"""Assign indices to the micro-batches of a `train_valid_test_datasets_provider`: the trainer requests them by index.

| returned | which batches a rank gets | where a resumed run goes on |
|---|---|---|
| a Dataset; a DataLoader with a plain sampler of torch | every dp-th batch, in turn | at the batch where it stopped |
| a DataLoader with a `DistributedSampler` | its own | at the batch where it stopped |
| a DataLoader with another sampler, any other iterable | its own | where the loader begins, as in Megatron |
| an iterator | its own, until it ends | where the iterator stands, as in Megatron |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from tessera.core.batch import Batch
from tessera.data.custom.items import PassedObject
from tessera.data.custom.rows import LoaderBatches, distributed_sampler, starts_anywhere
from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.forward_step import MicroBatch

PROVIDER = "train_valid_test_datasets_provider"


class RestartingIterator(Iterator[Any]):
    """Yield the batches of a loader without end. The trainer uses `loader` instead, to request batches by index."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def __next__(self) -> Any:
        return next(self._batches)


class ProvidedRows(LoaderBatches):
    """Read the user's data as rows. Row r is a micro-batch of a rank; the data is set after the trainer is built.

    `cp` consecutive ranks read the same batches: context parallelism splits their sequences.
    """

    def __init__(self, name: str, *, seed: int, samples: int, cp: int = 1) -> None:
        super().__init__(PassedObject.of(()), (), seed=seed)
        self.name, self.samples, self.cp = name, samples, cp
        self.bound = False
        self._position, self._ranks = 0, 1
        self._in_turn = self._positioned = False
        self._first: int | None = None  # index of the micro-batch that an iterator returned first

    def check_ranks(self, position: int, count: int) -> None:
        self._position, self._ranks = position, count

    @property
    def rank_position(self) -> tuple[int, int]:
        """Return the index of this rank among the ranks that read data, and the number of these ranks."""
        return self._position, self._ranks

    def bind(self, data: Any) -> None:
        """Set the data: a loader, an iterable or an iterator."""
        if isinstance(data, RestartingIterator):
            data = data.loader
        if not hasattr(data, "__iter__"):
            raise TesseraError(
                f"{PROVIDER} returned a {type(data).__name__} as {self.name} data",
                where=PROVIDER,
                allowed=[
                    "a DataLoader",
                    "a Dataset with __getitem__ and __len__",
                    "an iterable",
                    "an iterator",
                    "None",
                ],
                fix="return train, valid and test data of an allowed type",
                code="job.provided-data",
            )
        sampler = distributed_sampler(data)
        self._positioned = starts_anywhere(data)
        self._in_turn = self._positioned and sampler is None
        replicas = self._ranks // self.cp
        if sampler is not None and (sampler.num_replicas, sampler.rank) != (replicas, self._position // self.cp):
            raise TesseraError(
                f"the DistributedSampler of the {self.name} data has rank={sampler.rank} and "
                f"num_replicas={sampler.num_replicas}, but this data-parallel rank is {self._position // self.cp} of "
                f"{replicas}",
                where=PROVIDER,
                fix="make it with num_replicas=mpu.get_data_parallel_world_size(), rank=mpu.get_data_parallel_rank()",
                code="job.sampler-ranks",
            )
        super().__init__(PassedObject.of(data), data, seed=self.seed)
        self.bound, self._first = True, None

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        self.check_none(lost)
        (row,) = rows
        if not self.bound:
            raise TesseraError(
                f"the run has no {self.name} data",
                where=PROVIDER,
                fix="return it from the data provider",
                code="job.provided-data-missing",
            )
        number = row // self._ranks  # index of the micro-batch among those of this rank
        if self._in_turn:
            replicas = self._ranks // self.cp
            number = number * replicas + self._position // self.cp
        elif not self._positioned:
            self._first = number - self._next if self._first is None else self._first
            number -= self._first
        return MicroBatch.of(self.take(number, note), row, self.samples)

    def evaluation(self, count: int) -> Iterator[MicroBatch]:
        """Yield `count` micro-batches of this rank, from the beginning of the data; an iterator continues instead."""
        self._first = None
        for number in range(count):
            batch = self.batch([number * self._ranks + self._position])
            assert isinstance(batch, MicroBatch)
            yield batch

    @property
    def _only_forward(self) -> bool:
        return isinstance(self._data, Iterator)

    def _begin(self, number: int) -> None:
        if self._only_forward and self._next:
            raise TesseraError(
                f"the {self.name} data is an iterator, which cannot go back to batch {number}",
                where=PROVIDER,
                fix="return the DataLoader instead of its iterator",
                code="job.data-iterator",
            )
        super()._begin(number)

    def _new_pass(self) -> Iterator[Any]:
        if self._only_forward and self._pass:
            raise TesseraError(
                f"the {self.name} data ended after {self._next} micro-batches of this rank",
                where=PROVIDER,
                fix="return the DataLoader instead of its iterator, or an endless iterator (`build_iterations`)",
                code="job.data-ended",
            )
        return super()._new_pass()


def loader_of(dataset: Any, args: Any) -> Any:
    """Return the loader of a Dataset by `--dataloader-type`; return a loader, an iterable or an iterator unchanged."""
    if isinstance(dataset, DataLoader) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return dataset
    return DataLoader(
        dataset,
        batch_size=args.micro_batch_size,
        shuffle=args.dataloader_type == "cyclic",
        num_workers=args.num_workers,
        drop_last=True,
        pin_memory=False,
    )
