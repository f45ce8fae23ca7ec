"""Rows of a streamed data set: files are downloaded as the run reaches them, one file ahead of use.

Without streaming, a run measures all samples before its first step. Here each file is measured and packed by itself. An
epoch shuffles the files, and the rows within each file. Row r is still a function of the seed, the data and r, on any
number of ranks and workers. The file of a row follows from the numbers of rows in the files before it. The number of
rows of a file is stored when it is first packed, so a resume downloads only the files that it needs.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tessera.config.run_config import DataSection
from tessera.core.batch import Batch
from tessera.core.row_source import ENDLESS
from tessera.core.sample import BadSample
from tessera.data.bad_share import check_measured
from tessera.data.cache import digest_of
from tessera.data.order.mixture import Shuffle, mix
from tessera.data.order.packed_rows import GuardedRows, PackedRows
from tessera.data.sources.container import NothingUsable
from tessera.data.stream.files import StreamFile, stream_files
from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping, replace_file
from tessera.runtime.locks import locked

log = logging.getLogger("tessera")

_FILES = 0x46494C45  # random key of the order of files
_SHARD = 0x53485244  # random key of the seed of a file
_OPEN = 3  # maximum number of open files: the previous, the current and the next
_SHARD_BITS = 40  # the index of a sample is (index of its file << 40) + its index in the file


Pack = Callable[[DataSection, int], PackedRows]  # (data section with one file, seed) -> rows of the file


class _RowLocation(NamedTuple):
    epoch: int
    position: int  # index of the file in the order of the epoch
    shard: int
    row: int  # index of the row in the file, counted over epochs


class _FileCounts(NamedTuple):
    rows: int
    samples: int  # number of samples, usable or not
    unusable: int


class StreamedRows(GuardedRows):
    """Read the rows of one file after another. Each process opens the files that it needs; one of them downloads each.

    `pack` packs the samples of one file into rows. `fingerprint`: hash of the processor's settings. `folder`: where the
    number of rows of each file is stored.
    """

    def __init__(self, section: DataSection, seed: int, pack: Pack, fingerprint: str, folder: Path | None) -> None:
        self.section, self.seed, self.pack = section, seed, pack
        self.shards = stream_files(section)
        self._facts = [[shard.name, shard.facts] for shard in self.shards]
        packing = [fingerprint, section.length, section.truncate, section.pack, section.balance]
        self._key = digest_of([self._facts, seed, section.shuffle, packing])
        self._folder = None if folder is None else folder.absolute() / f"stream-{self._key[:32]}"
        self.left_out: dict[str, str] = {}
        self._counts: dict[int, _FileCounts] = {}
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[int, PackedRows] = OrderedDict()
        self._held: dict[int, ExitStack] = {}  # {index of an open file: its lock, which keeps the file in the cache}
        self._lock = threading.RLock()
        self._ahead: threading.Thread | None = None
        self._tried = -1
        self._logged = False
        self._orders: dict[int, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        local = ("_open", "_held", "_lock", "_ahead", "_tried", "_logged", "_orders")  # not pickled
        return {name: value for name, value in vars(self).items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return ENDLESS

    @property
    def identity(self) -> str:
        return self._key[:16]

    @property
    def decodes_media(self) -> bool:
        return True  # whether samples have media is unknown before the files are opened

    def without(self, samples: Mapping[str, str]) -> StreamedRows:
        copied = copy.copy(self)  # `__getstate__` excludes open files: the copy opens them again
        copied.left_out = {**self.left_out, **samples}
        return copied

    def work(self, rows: Sequence[int]) -> list[float] | None:
        costs = [self._rows_at(at).work([at.row]) for at in map(self._at, rows)]
        return None if any(cost is None for cost in costs) else [cost[0] for cost in costs if cost is not None]

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        problems: list[BadSample] = []
        encoded, seeds, part = [], [], None
        for row in rows:
            location = self._at(row)
            part = self._rows_at(location)
            if location.row == 0:  # report the unusable samples of a file with its first row
                problems += part.bad_samples
            base = location.shard << _SHARD_BITS
            of_file = {_local(n, base): why for n, why in lost.items() if max(n, ~n) >> _SHARD_BITS == location.shard}
            encoded.append(part.encode(location.row, of_file, lambda n, base=base: note(_shared(n, base)), problems))  # type: ignore[misc]
            seeds.append(part.order.row_seed(location.row))
        assert part is not None, "a batch has rows"
        return part.collate(rows, encoded, seeds, problems)

    # ------------------------------------------------------------------------------------------ places of rows

    def _at(self, row: int) -> _RowLocation:
        """Return the epoch and the file of a row, and its index in this file, counted over all epochs.

        Files that are read before this one are opened to count their rows, unless the counts are known.
        """
        epoch, offset = 0, row
        if len(self._counts) == len(self.shards) and (length := sum(counts.rows for counts in self._counts.values())):
            epoch, offset = divmod(row, length)
        while True:
            passed = 0
            for position in range(len(self.shards)):
                shard = self._order(epoch)[position]
                count = self._count(shard)
                if offset < count:
                    return _RowLocation(epoch, position, shard, epoch * count + offset)
                offset, passed = offset - count, passed + count
            if not passed:
                raise TesseraError(
                    "no file of the data has a usable sample", where="data.train", code="data.no-usable-sample"
                )
            epoch += 1

    def _order(self, epoch: int) -> list[int]:
        """Return the files of an epoch in the order in which they are read."""
        if epoch not in self._orders:
            count = len(self.shards)
            shuffle = Shuffle.of(count, self.seed, _FILES, epoch)
            self._orders = {epoch: [shuffle(at) if self.section.shuffle else at for at in range(count)]}
        return self._orders[epoch]

    def _count(self, shard: int) -> int:
        if shard not in self._counts:
            self._counts[shard] = self._stored_counts(shard) or self._counted(shard)
            self._check_share(shard)
        return self._counts[shard].rows

    def _check_share(self, shard: int) -> None:
        """Raise if too large a share of the samples of all files so far is unusable."""
        samples = sum(counts.samples for counts in self._counts.values())
        unusable = sum(counts.unusable for counts in self._counts.values())
        check_measured(unusable, samples, self.section.max_bad_share, [self.shards[shard].section])

    def _counted(self, shard: int) -> _FileCounts:
        """Open a file and count its rows. A file without a usable sample has 0 rows and is skipped."""
        try:
            return _counts_of(self._rows(shard))
        except NothingUsable as error:
            log.warning("%s is skipped: %s", self.shards[shard].name, error.what)
            counts = _FileCounts(0, error.samples, error.unusable)
            self._store_counts(shard, counts)
            return counts

    def _store_counts(self, shard: int, counts: _FileCounts) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            record = {"file": self.shards[shard].name, **counts._asdict()}
            replace_file(self._count_file(shard), json.dumps(record).encode())

    def _stored_counts(self, shard: int) -> _FileCounts | None:
        if self._folder is None or not (file := self._count_file(shard)).is_file():
            return None
        try:
            record = read_json_mapping(file)
            counts = _FileCounts(record["rows"], record.get("samples", 0), record.get("unusable", 0))
        except (TesseraError, KeyError):
            return None
        return counts if all(isinstance(count, int) and count >= 0 for count in counts) else None

    def _count_file(self, shard: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{shard:06d}.json"

    # ------------------------------------------------------------------------------------------ files

    def _rows(self, shard: int) -> PackedRows:
        """Return the rows of a file. A file that is not open is downloaded and packed first."""
        rows = self._open.get(shard)
        if rows is None:
            with self._lock:
                rows = self._open.get(shard)
                if rows is None:
                    while len(self._open) >= _OPEN:  # close old files first: the download can need their disk space
                        closed, _ = self._open.popitem(last=False)
                        self._held.pop(closed).close()
                    rows = self._open[shard] = self._opened(shard)
        return rows.without(self.left_out) if self.left_out else rows

    def _rows_at(self, location: _RowLocation) -> PackedRows:
        rows = self._rows(location.shard)
        self._look_ahead(location.epoch, location.position)
        return rows

    def _opened(self, shard: int) -> PackedRows:
        file = self.shards[shard]
        with ExitStack() as stack:
            stack.enter_context(file.held())
            rows = self._packed(shard, file, file.fetch())
            self._held[shard] = stack.pop_all()
        return rows

    def _packed(self, shard: int, file: StreamFile, path: Path) -> PackedRows:
        with locked(None if self._folder is None else self._folder / f"{shard:06d}.lock"):
            source = file.section.model_copy(update={"path": path, "hub_id": None})
            # A share of 1.0 sets no limit for a single file: `_check_share` checks bad samples over all files.
            of_file = {"train": [source], "workers": 0, "stream": False, "max_bad_share": 1.0}
            # The first process makes the index of the file and packs it; the others read the index.
            rows = self.pack(self.section.model_copy(update=of_file), mix(self.seed, _SHARD, shard) >> 1)
            if [file.name, file.facts] != self._facts[shard]:  # checked last: the file can change while it is packed
                raise TesseraError(
                    f"{file.name} has changed since the run started: a resumed run would read other rows",
                    where=str(path),
                    fix="restore the file and resume, or start another run",
                    code="data.file-changed",
                )
            counts = self._stored_counts(shard)
            if counts is not None and counts.rows != len(rows):
                raise TesseraError(
                    f"{file.name} had {counts.rows} rows and has {len(rows)} now: a resumed run would read other rows",
                    where=str(self._folder),
                    fix="restore the data and the settings, or start another run",
                    code="data.file-changed",
                )
            if counts is None:
                self._store_counts(shard, _counts_of(rows))
        if not self._logged:
            log.info("rows: %s, in the first of %d files", rows.order.stats.summary(), len(self.shards))
            self._logged = True
        return rows

    def _look_ahead(self, epoch: int, position: int) -> None:
        """Download and pack the next file in a background thread, at most one file at a time."""
        if self._ahead is not None and self._ahead.is_alive():
            return
        epoch, position = divmod(epoch * len(self.shards) + position + 1, len(self.shards))
        following = self._order(epoch)[position]
        if following in self._open or following == self._tried:
            return
        self._tried = following  # the background thread tries each file only once
        self._ahead = threading.Thread(target=self._fetch_ahead, args=(following,), name="tessera-shard", daemon=True)
        self._ahead.start()

    def _fetch_ahead(self, shard: int) -> None:
        try:
            self._rows(shard)
        except NothingUsable:  # no sample of the file is usable: `_counted` reports it when the run reaches the file
            return
        except TesseraError as error:  # a lasting error is raised when the run reaches the file
            log.warning("%s could not be prepared in the background: %s", self.shards[shard].name, error.what)


def _counts_of(rows: PackedRows) -> _FileCounts:
    unusable = sum(part.unusable_count for part in rows.index.parts)
    return _FileCounts(len(rows), len(rows.index) + rows.bad_count, unusable)


def _shared(number: int, base: int) -> int:
    """Return the index of a sample over all files. For the complement ~number, return the complement of that index."""
    return number + base if number >= 0 else number - base


def _local(number: int, base: int) -> int:
    return number - base if number >= 0 else number + base
