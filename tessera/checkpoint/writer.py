"""Write weights in another format. Conversions and exports use this writer.

A group of native tensors (tensors of Tessera's model) is read from the source, translated to the target format, and
written to planned positions. Each chunk is read back after its write and compared bit for bit. The first group of each
kind (such as a layer) is also read by the reader of the target format, and must give the source tensors again. The
folder is published by one rename: a killed process publishes nothing.

Source files are memory-mapped, and reordered rows are views, so most bytes are copied only once, by the write.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tessera.checkpoint.files import Fault, free_bytes, no_fault, safetensors_header, storage_order, sync_folder
from tessera.checkpoint.forms import NativeTensors, TensorGroup
from tessera.checkpoint.publish import Origin, space_report, staged
from tessera.errors import TesseraError
from tessera.runtime.collective import Failure, Ranks, raise_together
from tessera.runtime.crc32 import crc32
from tessera.runtime.libc import begin_write_back, same_bytes
from tessera.runtime.process import open_files, usable_cpus
from tessera.runtime.progress import WorkProgress, human_bytes
from tessera.weights.file_plan import FilePlan, FolderPlan, Place, PlannedTensor
from tessera.weights.map import WeightMap
from tessera.weights.rows import Bytes, TensorRows

_IN_FLIGHT = 512 << 20  # bytes of tensors that are converted at a time; memory use is about three times this
_MAX_JOBS = 8
_EXTRA_JOBS = 2  # more threads than processors, because some wait for the disk
_WORTH_A_REQUEST = 1 << 20  # bytes; after each write of at least this size, ask the kernel to start flushing to disk
_log = logging.getLogger("tessera")


class Interrupted(TesseraError):
    """Report that the user stopped a conversion (Ctrl-C)."""

    exit_code = 130


@dataclass(frozen=True)
class WriteJob:
    """Describe a folder of weights to write.

    `weight_map`: map from native names to those of the target format. `reopen`: opens the written folder, to compare it
    with the source. `finish`: adds all other files and checks the folder. `rounded`: native tensors that are quantized,
    and therefore not compared. `jobs`: number of threads; None: two more than processors, at most 8.
    """

    native: NativeTensors
    weight_map: WeightMap
    plan: FolderPlan
    reopen: Callable[[Path], AbstractContextManager[NativeTensors]]
    finish: Callable[[Path], object] | None = None
    origin: Origin | None = None
    overwrite: bool = False
    rounded: Collection[str] = ()
    jobs: int | None = None
    fault: Fault = no_fault


def write_weights(target: Path, job: WriteJob) -> None:
    """Write a folder on rank 0 and publish it by one rename. Every rank calls this."""
    ranks, failures = Ranks.current(), list[Failure]()
    groups = job.native.groups(job.weight_map)
    with job.native.gathering([name for group in groups for name in group.names]):  # rank 0 writes; others send shards
        if ranks.rank == 0:
            try:
                _write(target, job, groups)
            except Exception as error:
                failures.append(Failure.of(error, 0))
    raise_together(ranks.on_rank0(lambda: failures))
    if ranks.rank == 0:
        _log.info("wrote %s to %s, read again and compared", human_bytes(job.plan.nbytes), target)


def _write(target: Path, job: WriteJob, groups: Sequence[TensorGroup]) -> None:
    jobs = min(_MAX_JOBS, round(usable_cpus()) + _EXTRA_JOBS) if job.jobs is None else job.jobs
    try:
        with open_files(len(job.plan.files)), staged(target, job.origin, job.overwrite, job.fault) as staging:
            if job.plan.nbytes > free_bytes(target):
                fix = space_report(target, job.plan.nbytes)
                raise TesseraError("the disk is too full", where=str(target), fix=fix, code="output.disk-full")
            with _one_thread_each():
                _Writer(job, groups, staging).run(jobs)
    except KeyboardInterrupt:
        raise Interrupted("stopped: nothing was published", where=str(target), code="output.interrupted") from None
    except OSError as error:
        failed = Path(str(error.filename))
        # the target may be inside the source folder
        of_target = any(part.startswith(".staging-") for part in failed.parts)
        if failed.is_relative_to(job.native.where) and not of_target:
            raise TesseraError(
                f"the source could not be read: {error.strerror}", where=str(failed), code="weights.unreadable-file"
            ) from error
        limits = {
            errno.EMFILE: f"allow {len(job.plan.files)} open files: ulimit -n",
            errno.EFBIG: "allow larger files: ulimit -f, or use another file system",
        }
        raise TesseraError(
            f"the target could not be written: {error.strerror or error}",
            where=str(target),
            fix=limits.get(error.errno or 0) or space_report(target, job.plan.nbytes),
            code="output.write-failed",
        ) from error


class _Writer:
    """Write the tensor groups of a `WriteJob` to its staging folder."""

    def __init__(self, job: WriteJob, groups: Sequence[TensorGroup], staging: Path) -> None:
        self._job, self._groups, self._staging = job, groups, staging
        self._files = PlannedFolder(staging, job.plan)
        self._proved: set[Any] = set()  # kinds of tensor groups of which one was read back and was equal
        self._sizes = [sum(job.native.plans[name].nbytes for name in group.names) for group in groups]

    def run(self, jobs: int) -> None:
        fault = self._job.fault
        with self._files:
            with self._job.reopen(self._staging) as written:
                self._write_groups(jobs, written)
            fault("sync")
            self._files.sync()
        if self._job.finish is not None:
            fault("finish")
            self._job.finish(self._staging)
        for folder in {(self._staging / name).parent for name in self._job.plan.files}:
            sync_folder(folder, fault)
        with self._job.reopen(self._staging):  # check that the complete folder can be opened
            pass

    def _write_groups(self, jobs: int, written: NativeTensors) -> None:
        native, running = self._job.native, dict[Future[None], int]()
        with WorkProgress("writing weights", sum(self._sizes)) as progress, ThreadPoolExecutor(jobs) as pool:
            try:
                for number, size in [*enumerate(self._sizes), (-1, 0)]:
                    while running and (number < 0 or len(running) >= jobs or sum(running.values()) + size > _IN_FLIGHT):
                        for done in wait(running, return_when=FIRST_COMPLETED).done:
                            progress.count(running.pop(done))
                            done.result()
                    if number >= 0:
                        group = self._groups[number]
                        tensors = native.read_group(group.names) if native.in_order else None
                        running[pool.submit(self._write_group, group, tensors, written)] = size
            finally:
                for waiting in running:
                    waiting.cancel()

    def _write_group(self, group: TensorGroup, native: Mapping[str, TensorRows] | None, written: NativeTensors) -> None:
        native = self._job.native.read_group(group.names) if native is None else native
        tensors = self._job.weight_map.to_foreign_rows(native)
        self._job.fault(f"write {group.names[0]}")
        for name, rows in tensors.items():
            if (rows.dtype, rows.shape) != (group.foreign[name].dtype, group.foreign[name].shape):
                raise TesseraError(
                    f"{name} would be concatenated from tensors of different dtypes",
                    where=self._job.native.where,
                    code="weights.mixed-dtypes",
                )
            self._files.put(name, rows)
        self._prove(group, native, written)

    def _prove(self, group: TensorGroup, native: Mapping[str, TensorRows], written: NativeTensors) -> None:
        """Read a group back and raise if it differs from the source. Only the first group of each kind is checked."""
        table, plans = self._job.weight_map, self._job.native.plans
        kind = tuple((rule[0], plans[name]) for name in group.names if (rule := table.rule_for(name)))
        if kind in self._proved or any(name in self._job.rounded for name in group.names):
            return
        again = written.read_group(group.names)
        for name, rows in native.items():
            if not rows.same_bits(again[name].whole()):
                raise TesseraError(
                    f"{name} was read back with other bytes than were written",
                    where=str(self._staging),
                    fix="report this fault of Tessera; nothing was published",
                    code="output.bytes-differ",
                )
        self._proved.add(kind)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit torch to one thread per operation inside of the `with` block, since several threads call torch at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- files


def plan_safetensors(files: Mapping[str, Mapping[str, PlannedTensor]]) -> FolderPlan:
    """Plan safetensors files. `files`: file name -> its tensors in order."""
    plans, places = dict[str, FilePlan](), dict[str, list[Place]]()
    for name, tensors in files.items():
        ordered = storage_order(tensors)
        header = safetensors_header(ordered)
        at = len(header)
        for key, plan in ordered.items():
            places[key] = [Place(name, at)]
            at += plan.nbytes
        plans[name] = FilePlan(at, ((0, header),))
    return FolderPlan(plans, places)


class PlannedFolder:
    """Write the files of a plan. Several threads can write tensors, in any order. It is a context manager."""

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self._folder, self._plan = folder, plan
        self._handles: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Create the files and write all bytes that are not tensors."""
        try:
            for name, file in self._plan.files.items():
                path = self._folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                self._handles[name] = handle
                os.ftruncate(handle, file.size)
                for position, data in file.pieces:
                    _write_at(handle, data, position)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def put(self, name: str, tensor: TensorRows) -> None:
        """Write a tensor to its planned positions, and in zip archives also its CRC-32. Several threads can call this.

        Each chunk is read back after its write and compared.
        """
        slices, checksums = self._plan.divide(name, tensor), dict[int, int]()
        for planned in self._plan.places[name]:
            handle, position, checksum = self._handles[planned.file], planned.offset, 0
            for chunk in slices[planned.slice].chunks():
                if planned.checksums and planned.slice not in checksums:
                    checksum = crc32(chunk, checksum)
                _write_at(handle, chunk.data, position)
                again = np.empty_like(chunk)
                if not _read_at(handle, again, position) or not same_bytes(chunk, again):
                    raise TesseraError(
                        f"{name} was read back with other bytes than were written",
                        where=str(self._folder / planned.file),
                        fix="try again, and check the disk if it happens again; nothing was published",
                        code="output.bytes-differ",
                    )
                position += len(chunk)
            if position - planned.offset >= _WORTH_A_REQUEST:
                begin_write_back(handle, planned.offset, position - planned.offset)
            checksum = checksums.setdefault(planned.slice, checksum)
            for at in planned.checksums:
                _write_at(handle, checksum.to_bytes(4, "little"), at)

    def sync(self) -> None:
        for handle in self._handles.values():
            os.fsync(handle)


def _write_at(handle: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(handle, view, position)
        view, position = view[count:], position + count


def _read_at(handle: int, target: Bytes, position: int) -> bool:
    """Fill an array with bytes of a file; return False if the file is too short."""
    view = target.data
    while view:
        count = os.preadv(handle, [view], position)
        if not count:
            return False
        view, position = view[count:], position + count
    return True
