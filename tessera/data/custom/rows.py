"""Adapt the user's own data to `RowSource`: data sets with random access, iterable data sets, and `DataLoader`."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tessera.core.batch import Batch
from tessera.core.row_source import ENDLESS
from tessera.data.custom.items import DrawnItem, ImportedObject, ItemBatcher
from tessera.data.order.mixture import Shuffle, mix
from tessera.data.order.packed_rows import GuardedRows
from tessera.errors import TesseraError, first_line

log = logging.getLogger("tessera")

_PASS, _ROW = 0x4F574E, 0x524F57


class ItemRows(GuardedRows):
    """Read rows of a data set with `__len__` and `__getitem__`.

    Row r of epoch e is item shuffle(seed, e)(r), or r without `shuffle`, so any row can be read without earlier rows.
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
        copied = copy.copy(self)
        copied.items = replace(self.items, left_out={**self.items.left_out, **samples})
        copied._data, copied._collate = self._data, self._collate  # `__getstate__` excludes both from a copy
        return copied

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        if self._data is None:  # true in a worker process, because the data set is not pickled
            self._data = self.imported.make()
            self._collate = None if self.collate is None else self.collate.function()
            if len(self._data) != self.count:
                raise TesseraError(
                    f"{self.imported.path} has {len(self._data)} items in a worker process, but {self.count} in the "
                    "training process",
                    fix="return the same items in every process",
                    code="data.length-differs",
                )
        return self.items.batch([self._drawn(row, lost, note) for row in rows], self._collate)

    def _drawn(self, row: int, lost: Mapping[int, str], note: Callable[[int], None]) -> DrawnItem:
        number, seed = self.number(row), _seed(self.seed, row)
        if number in lost:
            raise _lost_item(self.imported, number, lost[number])
        note(number)
        try:
            with drawing_from(seed):
                return DrawnItem(row, number, self._data[number], seed)
        except TesseraError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise TesseraError(
                f"item {number} of {self.imported.path} failed: {type(error).__name__}: {first_line(error)}",
                where="data.options.dataset",
                fix="correct the data set; with data.workers=0 a debugger can step into it",
                code="data.item-fails",
            ) from error


class SequentialRows(GuardedRows):
    """Read items by index from data that can only be iterated. An index before the next item restarts the iteration."""

    sequential = True  # one process reads all rows in order: every further process would read all of the data again

    def __init__(self, imported: ImportedObject, data: Any, *, seed: int) -> None:
        self.imported, self.seed = imported, seed
        self._data: Any = data
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # index of the item that the iterator returns next
        self._pass = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None, "_iterator": None, "_next": 0, "_pass": 0}

    def __len__(self) -> int:
        return _length(self.data) or ENDLESS

    def check_none(self, lost: Mapping[int, str]) -> None:
        """Raise if an item crashed or hung its worker process: sequential data cannot skip an item."""
        for number, reason in lost.items():
            raise _lost_item(self.imported, number, reason)

    @property
    def data(self) -> Any:
        if self._data is None:
            self._data = self.imported.make()
        return self._data

    def take(self, number: int, note: Callable[[int], None]) -> Any:
        """Return the item with index `number`. `note` restarts the time limit; it is called for skipped items, too."""
        if self._iterator is None or number < self._next:
            self._begin(number)
        if number - self._next >= 1000:
            log.info("%s: skipping %d items to reach the position of the run", self.imported.path, number - self._next)
        while self._next < number:
            note(self._next)
            self._draw()
        note(number)
        return self._draw()

    def _begin(self, number: int) -> None:
        self._pass, self._next = 0, 0
        self._iterator = self._new_pass()

    def _new_pass(self) -> Iterator[Any]:
        """Begin an epoch with seeded global random generators: all ranks and a resume get the same order."""
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
        raise TesseraError(f"{self.imported.path} yields no item", where="data.options", code="data.empty-dataset")


class StreamRows(SequentialRows):
    """Read rows of an iterable data set: row r is the r-th item. Each rank reads all items, and uses its rows."""

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
    """Read batches of a loader by index. If epochs are independent, earlier epochs are skipped and not read."""

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
    """Use the batches of a loader unchanged: every batch is one row and one micro-batch.

    Row r is batch r, and ranks take batches in turn. With a `DistributedSampler` of n ranks, each rank has its own
    batches: row r is batch r // n of rank r % n.
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
        """Raise if a `DistributedSampler` has another `num_replicas` than `count`, or another `rank` than `position`.

        `count` is the number of ranks that read different rows. The default of the sampler is all ranks, which is wrong
        with tensor, context or pipeline parallelism.
        """
        sampler = distributed_sampler(self.data)
        if sampler is None or (sampler.num_replicas, sampler.rank) == (count, position):
            return
        raise TesseraError(
            f"the DistributedSampler of {self.imported.path} has rank {sampler.rank} of {sampler.num_replicas}, but "
            f"needs rank {position} of {count}: all ranks of a tp, cp or pp group must read the same batches, so they "
            "count as one rank",
            where=self.imported.where,
            fix="remove the sampler, and the ranks take the batches in turn; or create it with "
            f"num_replicas={count} (ranks / (tp x cp x pp)) and, on this rank, rank={position} "
            f"(rank // (cp x tp) % {count})",
            code="data.sampler-ranks-differ",
        )

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        self.check_none(lost)
        if len(rows) != 1:
            raise TesseraError(
                "every batch of a loader is one micro-batch and counts as one row",
                where="train.micro_batch",
                fix="set train.micro_batch=1, and train.global_batch to the number of the loader's batches per step",
                code="data.loader-makes-batches",
            )
        batch = self.take(rows[0] // self.ranks, note)
        drawn = [DrawnItem(rows[0], rows[0], batch, _seed(self.seed, rows[0]))]
        return self.items.batch(drawn, lambda items: items[0])


def _lost_item(imported: ImportedObject, number: int, reason: str) -> TesseraError:
    return TesseraError(
        f"reading item {number} of {imported.path} ended its worker process: {reason}",
        where=imported.where,
        fix="correct the data set, or raise data.sample_timeout_s if the item takes long",
        code="data.item-ends-worker",
    )


def _seed(seed: int, row: int) -> int:
    return mix(seed, _ROW, row) >> 1


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed the global generators of random, numpy and torch inside the block, and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # the generator of the CPU; generators of devices are not seeded
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
    """Return the `DistributedSampler` of a loader, which may be inside of a batch sampler; None if it has none."""
    if not isinstance(loader, DataLoader):
        return None
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def starts_anywhere(loader: Any) -> bool:
    """Return whether any epoch of a loader can be read without the epochs before it.

    This needs a sampler of torch without a `torch.Generator`, whose state would depend on the epochs before.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    generators = (loader.generator, getattr(loader.sampler, "generator", None))
    plain = isinstance(loader.sampler, (DistributedSampler, RandomSampler, SequentialSampler))
    return plain and all(generator is None for generator in generators)
