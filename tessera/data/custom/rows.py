"""Data sets by number, data sets that only go forward, and loaders, each as a `RowSource`."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tessera.core.batch import Batch
from tessera.core.row_source import ENDLESS, RowSource
from tessera.data.custom.items import DrawnItem, ImportedObject, ItemBatcher
from tessera.data.order.mixture import Shuffle, mix
from tessera.errors import TesseraError, first_line

log = logging.getLogger("tessera")

_PASS, _ROW = 0x4F574E, 0x524F57


class ItemRows(RowSource):
    """Read rows of a data set that has a length and items by number.

    Row r of pass p holds item shuffle(seed, p)(r), so any row is found without the ones before it.
    """

    def __init__(
        self,
        imported: ImportedObject,
        data: Any,
        items: ItemBatcher,
        collate: ImportedObject | None,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.imported, self.items, self.collate = imported, items, collate
        self.seed, self.shuffle = seed, shuffle
        self.count = len(data)
        if self.count == 0:
            raise TesseraError(f"{imported.path} is empty", where=imported.where, code="data.empty-dataset")
        self._data: Any = data
        self._collate = None if collate is None else collate.function()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None, "_collate": None}

    def __len__(self) -> int:
        return self.count

    def number(self, row: int) -> int:
        epoch, offset = divmod(row, self.count)
        return Shuffle.of(self.count, self.seed, _PASS, epoch)(offset) if self.shuffle else offset

    def without(self, samples: Mapping[str, str]) -> ItemRows:
        """Return the same rows without some samples. Sequential data has no such method: it would start over."""
        copied = copy.copy(self)
        copied.items = replace(self.items, left_out={**self.items.left_out, **samples})
        copied._data, copied._collate = self._data, self._collate  # a copy for a worker has neither
        return copied

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, _unnoted)

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        if self._data is None:  # in a worker process
            self._data = self.imported.make()
            self._collate = None if self.collate is None else self.collate.function()
            if len(self._data) != self.count:
                raise TesseraError(
                    f"{self.imported.path} has {len(self._data)} items here and {self.count} elsewhere",
                    code="data.length-differs",
                )
        return self.items.batch([self._drawn(row, lost, note) for row in rows], self._collate)

    def _drawn(self, row: int, lost: Mapping[int, str], note: Callable[[int], None]) -> DrawnItem:
        number, seed = self.number(row), _seed(self.seed, row)
        if number in lost:
            raise TesseraError(
                f"item {number} of {self.imported.path} cannot be had: {lost[number]}",
                where="data.options.dataset",
                fix="mend the data set; data.sample_timeout_s is how long an item may take",
                code="data.item-ends-worker",
            )
        note(number)
        try:
            with drawing_from(seed):
                return DrawnItem(row, number, self._data[number], seed)
        except TesseraError:
            raise
        except Exception as error:  # of the user's own code, in which anything may happen
            raise TesseraError(
                f"item {number} of {self.imported.path} failed: {type(error).__name__}: {first_line(error)}",
                where="data.options.dataset",
                fix="mend the data set; with data.workers=0 a debugger can follow",
                code="data.item-fails",
            ) from error


class SequentialRows(RowSource):
    """Give numbers to data that can only be read in order. For a lower number reading begins again."""

    sequential = True  # rows are asked for in rising order by one process: others would go through all of it again

    def __init__(self, imported: ImportedObject, data: Any, *, seed: int) -> None:
        self.imported, self.seed = imported, seed
        self._data: Any = data
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # number of the next item of the iterator
        self._pass = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None, "_iterator": None, "_next": 0, "_pass": 0}

    def __len__(self) -> int:
        return _length(self.data) or ENDLESS

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, _unnoted)

    @abstractmethod
    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch: ...

    def check_none(self, lost: Mapping[int, str]) -> None:
        """Raise if anything was lost: what only goes forward cannot leave one out."""
        for number, reason in lost.items():
            raise TesseraError(
                f"{self.imported.path} failed at {number}: {reason}",
                where=self.imported.where,
                code="data.item-ends-worker",
            )

    @property
    def data(self) -> Any:
        if self._data is None:
            self._data = self.imported.make()
        return self._data

    def take(self, number: int, note: Callable[[int], None]) -> Any:
        """Return item `number`. `note` is called for all that is drawn on the way: a long way is no standstill."""
        if self._iterator is None or number < self._next:
            self._begin(number)
        if number - self._next >= 1000:
            log.info("%s: drawing %d to reach where the run stood", self.imported.path, number - self._next)
        while self._next < number:
            note(self._next)
            self._draw()
        note(number)
        return self._draw()

    def _begin(self, number: int) -> None:
        self._pass, self._next = 0, 0
        self._iterator = self._new_pass()

    def _new_pass(self) -> Iterator[Any]:
        """Begin an epoch. What shuffles by the common streams gets the same order on every rank and after a resume."""
        with drawing_from(mix(self.seed, _PASS, self._pass) >> 1):
            iterator = iter(self.data)
            return itertools.chain(list(itertools.islice(iterator, 1)), iterator)

    def _draw(self) -> Any:
        assert self._iterator is not None
        for fresh in (False, True):
            if fresh:
                self._pass += 1
                self._iterator = self._new_pass()
            try:
                item = next(self._iterator)
            except StopIteration:
                continue
            self._next += 1
            return item
        raise TesseraError(f"{self.imported.path} gives nothing", where="data.options", code="data.empty-dataset")


class StreamRows(SequentialRows):
    """Read rows of an iterable data set: row r is the r-th item. Each rank reads all of it and keeps its own rows."""

    def __init__(
        self, imported: ImportedObject, data: Any, items: ItemBatcher, collate: ImportedObject | None, *, seed: int
    ) -> None:
        super().__init__(imported, data, seed=seed)
        self.items, self.collate = items, collate

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        self.check_none(lost)
        drawn = [DrawnItem(row, row, self.take(row, note), _seed(self.seed, row)) for row in rows]
        return self.items.batch(drawn, None if self.collate is None else self.collate.function())


class LoaderBatches(SequentialRows):
    """Give the batches of a loader by number. Where an epoch needs nothing from earlier ones, it begins there."""

    def _new_pass(self) -> Iterator[Any]:
        sampler = distributed_sampler(self.data)
        if sampler is not None:
            sampler.set_epoch(self._pass)
        return super()._new_pass()

    def _begin(self, number: int) -> None:
        length = _length(self.data) if starts_anywhere(self.data) else None
        self._pass = 0 if length is None else number // length
        self._next = 0 if length is None else self._pass * length
        self._iterator = self._new_pass()


class LoaderRows(LoaderBatches):
    """Use the batches of a loader as they are: row r is its r-th batch, and a micro-batch of its own.

    With a `DistributedSampler` it has batches of this rank alone; otherwise ranks take its batches in turn.
    """

    def __init__(self, imported: ImportedObject, data: Any, items: ItemBatcher, *, seed: int) -> None:
        super().__init__(imported, data, seed=seed)
        self.items = items

    def __len__(self) -> int:
        return (_length(self.data) or ENDLESS) * self.ranks

    @property
    def ranks(self) -> int:
        sampler = distributed_sampler(self.data)
        return 1 if sampler is None else sampler.num_replicas

    def check_ranks(self, position: int, count: int) -> None:
        """Raise unless a `DistributedSampler` splits over the ranks that read different rows.

        This rank is number `position` of `count`. By default a sampler splits over all ranks, also over those that must
        see the same rows.
        """
        sampler = distributed_sampler(self.data)
        if sampler is None or (sampler.num_replicas, sampler.rank) == (count, position):
            return
        raise TesseraError(
            f"the DistributedSampler of {self.imported.path} splits over {sampler.num_replicas} ranks, and here it is "
            f"number {sampler.rank}; of this run {count} read different batches, this one is number {position}: ranks "
            "that work on the same rows (tp, cp, pp) would be given different ones",
            where=self.imported.where,
            fix="leave the sampler out: ranks then take the batches of one loader in turn; or make it with "
            f"num_replicas={count} (ranks / (tp x cp x pp)) and, on this rank, rank={position} "
            f"(rank // (cp x tp) % {count})",
            code="data.sampler-ranks-differ",
        )

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        self.check_none(lost)
        if len(rows) != 1:
            raise TesseraError(
                "a loader makes its own micro-batches, and each counts as one row",
                where="train.micro_batch",
                fix="set train.micro_batch=1, and train.global_batch to the loader's batches in one step",
                code="data.loader-makes-batches",
            )
        batch = self.take(rows[0] // self.ranks, note)
        drawn = [DrawnItem(rows[0], rows[0], batch, _seed(self.seed, rows[0]))]
        return self.items.batch(drawn, lambda one: one[0])


def _unnoted(number: int) -> None:
    pass


def _seed(seed: int, row: int) -> int:
    return mix(seed, _ROW, row) >> 1


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let the streams that people's code draws from begin at `seed`, and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # of the host alone
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _length(data: Any) -> int | None:
    try:
        return len(data) or None
    except (TypeError, NotImplementedError):
        return None


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return the sampler that gives each rank its own part, directly or inside of a batch sampler."""
    if not isinstance(loader, DataLoader):
        return None
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def starts_anywhere(loader: Any) -> bool:
    """Return whether an epoch needs nothing from those before it, such as the state of a generator."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    generators = (loader.generator, getattr(loader.sampler, "generator", None))
    plain = isinstance(loader.sampler, (DistributedSampler, RandomSampler, SequentialSampler))
    return plain and all(generator is None for generator in generators)
