"""Convert weights from one form to another: in one pass, by several threads, with little memory, and so that a killed
conversion can go on.

A group of tensors is read from the source, made into what the target form stores, and written to its places. Each chunk
is read again behind its write, while it is in a processor's cache, and must be the same bit for bit. The reader of the
target form must find the tensors at these places, and for one group of each kind (the layers of a model are of one
kind) make the source of them again. Then the journal notes the group. Sources are mapped, and rows in another order are
views of them, so most bytes are copied once: by the write. The disk reads ahead, and begins to write at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.export_record import TensorNotes
from tessera.checkpoint.files import CODES, Fault, free_bytes, no_fault, remove_folder, sync_folder
from tessera.checkpoint.forms import NativeTensors, TensorGroup
from tessera.checkpoint.planned_folder import PlannedFolder, Watch
from tessera.checkpoint.publish import Journal, Origin, check_target, remove_empty, show
from tessera.errors import TesseraError
from tessera.runtime.process import open_files, usable_cpus
from tessera.runtime.progress import WorkProgress, human_bytes
from tessera.weights.file_plan import Extent, FolderPlan, PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows

_IN_FLIGHT = 512 << 20  # bytes of tensors that are worked on at a time; each is in memory about three times
_AHEAD = 256 << 20  # bytes of tensors that are not worked on yet, and that the disk is asked to read
MOST_JOBS = 8
_WAITING = 2  # threads beside one for each processor: some wait for the disk
_WEIGHTS = (".safetensors", ".pt", ".distcp")
_log = logging.getLogger("tessera")
T = TypeVar("T")


class Interrupted(TesseraError):
    """Say that the user has stopped a conversion, which can go on."""

    exit_code = 130


@dataclass(frozen=True)
class Conversion:
    """Describe a conversion between folders.

    `weight_map`: that of the target form. `reopen` reads what lies in a staging folder. `extras` adds the files beside
    the weights, last. `source`: what the source is, in terms of JSON; where it differs, nothing is continued.
    `origin`: see `made_from`. `notes` takes the tensors of a folder of safetensors, for its record.
    `rounded`: native tensors that are written in fewer bits, so that they cannot be made again.
    """

    native: NativeTensors
    weight_map: WeightMap
    groups: Sequence[TensorGroup]
    plan: FolderPlan
    reopen: Callable[[Path], AbstractContextManager[NativeTensors]]
    source: Mapping[str, Any]
    extras: Callable[[Path], object] | None = None
    origin: Origin | None = None
    notes: TensorNotes | None = None
    rounded: Collection[str] = ()
    jobs: int | None = None
    overwrite: bool = False
    fault: Fault = field(default=no_fault)


def stream(target: Path, conversion: Conversion) -> None:
    """Carry out a conversion on rank 0: the target appears by one rename, or not at all."""
    Ranks.current().on_rank0(lambda: _stream(target, conversion))


def _stream(target: Path, conversion: Conversion) -> None:
    jobs = min(MOST_JOBS, round(usable_cpus()) + _WAITING) if conversion.jobs is None else conversion.jobs
    parents = check_target(target, conversion.overwrite, conversion.origin)
    journal = Journal(target, {"source": conversion.source}, conversion.plan)
    try:
        with open_files(len(conversion.plan.files)), journal:
            try:
                with _one_thread_each():
                    _Work(conversion, journal).run(jobs)
                _check_unchanged(conversion.source)
                show(journal.staging, target, conversion.fault, conversion.origin, conversion.overwrite)
            except TesseraError:
                remove_folder(journal.staging)
                raise
    except TesseraError:
        remove_empty(parents)
        raise
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; what is written is kept in {journal.staging}",
            where=str(target),
            fix="the same command goes on from there; to give it up, remove that folder",
        ) from None
    except OSError as error:
        failed = Path(str(error.filename))
        if failed.is_relative_to(conversion.native.where) and not failed.is_relative_to(journal.staging):
            raise TesseraError(f"the source could not be read: {error.strerror}", where=str(failed)) from error
        needed, free = conversion.plan.nbytes, free_bytes(target)
        many = f"; {len(conversion.plan.files)} files are open at a time: see ulimit -n"
        limit = many if error.errno == errno.EMFILE else ""
        remove_empty(parents)  # if nothing is kept
        kept = f"; the same command goes on with what is kept in {journal.staging}" if journal.staging.exists() else ""
        raise TesseraError(
            f"the target could not be written: {error.strerror or error}",
            where=str(target),
            fix=f"it needs {human_bytes(needed)} ({needed} bytes) in all, {human_bytes(free)} ({free} bytes) are free "
            f"there{kept}{limit}",
        ) from error
    _log.info("%s written, read again and compared", human_bytes(conversion.plan.nbytes))


class _Work:
    """Write the groups of a conversion into its staging folder."""

    def __init__(self, conversion: Conversion, journal: Journal) -> None:
        self._conversion, self._journal = conversion, journal
        self._files = PlannedFolder(journal.staging, conversion.plan)
        self._proved: set[Any] = set()  # kinds of groups that were made into the source again
        self._sizes = [sum(conversion.native.plans[name].nbytes for name in group.names) for group in conversion.groups]

    def run(self, jobs: int) -> None:
        staging, fault = self._journal.staging, self._conversion.fault
        if self._journal.written:
            before = sum(size for number, size in enumerate(self._sizes) if number in self._journal.written)
            _log.info("going on: %s of %s were written before", human_bytes(before), human_bytes(sum(self._sizes)))
        with self._files:
            with self._conversion.reopen(staging) as written:
                self._run_groups(jobs, written)
            fault("sync")
            self._files.sync()
        _remove_others(staging, self._conversion.plan.files)
        if self._conversion.extras is not None:
            fault("extras")
            self._conversion.extras(staging)
        for folder in {(staging / name).parent for name in self._conversion.plan.files}:
            sync_folder(folder, fault)
        with self._conversion.reopen(staging):  # with all files complete, and others beside
            pass

    def _run_groups(self, jobs: int, written: NativeTensors) -> None:
        running: dict[Future[None], int] = {}
        ahead, asked = 0, 0  # the next group that the disk was not asked for, and the bytes before it
        with WorkProgress("converting", sum(self._sizes)) as progress, ThreadPoolExecutor(jobs) as pool:
            try:
                begun = 0
                for number, size in [*enumerate(self._sizes), (-1, 0)]:
                    while running and (number < 0 or len(running) >= jobs or sum(running.values()) + size > _IN_FLIGHT):
                        for done in wait(running, return_when=FIRST_COMPLETED).done:
                            progress.count(running.pop(done))
                            done.result()
                    begun += size
                    while ahead < len(self._sizes) and asked < begun + _AHEAD:
                        self._conversion.native.read_ahead(self._conversion.groups[ahead].names)
                        ahead, asked = ahead + 1, asked + self._sizes[ahead]
                    if number >= 0:
                        running[pool.submit(self._convert, number, written)] = size
            finally:
                for left in running:  # those that have begun are completed, and noted
                    left.cancel()

    def _convert(self, number: int, written: NativeTensors) -> None:
        """Convert one group, or compare it if it was written before."""
        group, known = self._conversion.groups[number], self._journal.written.get(number)
        native = self._conversion.native.read_group(group.names)
        made = self._conversion.weight_map.to_foreign_rows(native)
        for name, rows in made.items():
            self._check_places(name, rows, group, written)
        if known is not None:
            if known.keys() == group.made.keys() and all(self._noted(self._files.holds, name, made) for name in made):
                for name, of in known.items():
                    self._files.put_checksums(name, of)
                self._prove(group, native, written)
                return
            _log.warning("%s is damaged in what was written before: it is written again", group.names[0])
        self._conversion.fault(f"write {group.names[0]}")
        checksums = {name: self._noted(self._files.put, name, made) for name in made}
        self._prove(group, native, written)
        self._conversion.fault(f"note {group.names[0]}")
        self._journal.note(number, checksums)

    def _noted(
        self, work: Callable[[str, TensorRows, Watch | None], T], name: str, made: Mapping[str, TensorRows]
    ) -> T:
        """Write or compare a tensor, and note it for the record."""
        rows, notes = made[name], self._conversion.notes
        if notes is None or rows.dtype is None:
            return work(name, rows, None)
        note = notes.begin(name, CODES[rows.dtype], rows.shape)
        done = work(name, rows, note)
        note.close()
        return done

    def _check_places(self, name: str, rows: TensorRows, group: TensorGroup, written: NativeTensors) -> None:
        """Raise unless the reader of the target form looks for a tensor where it is written."""
        if (rows.dtype, rows.shape) != (group.made[name].dtype, group.made[name].shape):
            raise TesseraError(
                f"what {name} is made of is stored in different types", where=self._conversion.native.where
            )
        assert rows.dtype is not None
        plan, staging = self._conversion.plan, self._journal.staging
        parts = [PlannedTensor(rows.dtype, part.shape) for part in plan.divide(name, rows)]
        planned = {
            (place.slice, Extent(staging / place.file, place.offset, parts[place.slice])) for place in plan.places[name]
        }
        found = written.extents(name)
        if not found or not planned.issuperset(enumerate(found)):
            raise TesseraError(
                f"{name} is not looked for where it is written", where=str(staging), fix="report this: it is a fault"
            )

    def _prove(self, group: TensorGroup, native: Mapping[str, TensorRows], written: NativeTensors) -> None:
        """Make the source of the first group of each kind again from what is written, and raise if it differs."""
        table, plans = self._conversion.weight_map, self._conversion.native.plans
        kind = tuple((rule[0], plans[name]) for name in group.names if (rule := table.rule_for(name)))
        if kind in self._proved or any(name in self._conversion.rounded for name in group.names):
            return
        found = written.read_group(group.names)
        for name, rows in native.items():
            if not rows.same_bits(found[name].whole()):
                raise TesseraError(
                    f"{name} was read back with other bytes than were written",
                    where=str(self._journal.staging),
                    fix="nothing was published: report this: it is a fault",
                )
        self._proved.add(kind)


def _remove_others(staging: Path, planned: Mapping[str, Any]) -> None:
    """Remove files that an interrupted conversion had begun to write beside the weights."""
    for path in sorted(staging.rglob("*"), reverse=True):
        if path.is_symlink() or (path.is_file() and str(path.relative_to(staging)) not in planned):
            path.unlink()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let operations of torch use one thread each: several of them run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_unchanged(source: Mapping[str, Any]) -> None:
    """Refuse weights that were written to while they were read. Those that were removed meanwhile were read before."""
    for path in map(Path, source):
        if path.suffix in _WEIGHTS and path.is_file() and _status(path) != source[str(path)]:
            raise TesseraError("this file was changed while it was read", where=str(path), fix="convert it again")


def _status(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def identity_of(*folders: Path) -> dict[str, Any]:
    """Return what tells a source from another one, or from itself after a change: names, sizes and times of files.

    Folders that are being written, maybe inside of the source, are left out.
    """
    found: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder).parts
            if path.is_file() and not any(part.startswith((".staging-", ".trash-")) for part in inside):
                found[str(path.absolute())] = _status(path)
    return found
