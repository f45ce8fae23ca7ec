"""Publish folders by one rename: files are written in a staging folder beside the target.

A conversion of many gigabytes is not lost when it is killed. Its staging folder has a journal beside it, which says
what job it is and which groups of tensors are written; the same job goes on from there. The journal is locked for as
long as the job runs, so two cannot write to one target.

    .staging-NAME~convert/          the files, most of them not complete
    .staging-NAME~convert.journal   a line that describes the job, then one for each group that is written
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.files import (
    Fault,
    free_bytes,
    no_fault,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.checkpoint.planned_folder import PlannedFolder
from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping
from tessera.runtime.progress import human_bytes
from tessera.weights.file_plan import FolderPlan

MARK = "tessera_export.json"  # marks an export, which a later one of the same source may replace
_MAX_RECORD_BYTES = 256 << 20
_MAX_JOURNAL_BYTES = 1 << 30
_log = logging.getLogger("tessera")


Origin = Mapping[str, str]  # see `made_from`


def made_from(form: str, source: str | Path) -> Origin:
    """Return what the record of an export says of it, so that the same one may replace it: its form, and a hash of
    where its source lies. The place itself is nobody else's business."""
    return {"form": form, "source": hashlib.sha256(os.path.realpath(source).encode()).hexdigest()}


@dataclass(frozen=True)
class Staging:
    """Name the folder in which an export is written, and the folders that were made for it to lie in.

    It is locked for as long as it is written, so that another export to the same target does not remove it.
    """

    path: Path
    parents: tuple[Path, ...]
    lock: int

    def discard(self) -> None:
        """Leave nothing behind."""
        remove_folder(self.path)
        remove_empty(self.parents)
        os.close(self.lock)


def publish(
    folder: Path,
    write: Callable[[Path], None],
    *,
    origin: Origin | None = None,
    overwrite: bool = False,
    fault: Fault = no_fault,
) -> None:
    """Publish a folder of the files that `write` makes on rank 0, by one rename."""

    def work() -> None:
        staging = begin(folder, overwrite, origin)
        try:
            write(staging.path)
            show(staging.path, folder, fault, origin, overwrite)
        except BaseException:
            staging.discard()
            raise
        os.close(staging.lock)

    Ranks.current().on_rank0(work)


def begin(folder: Path, overwrite: bool, origin: Origin | None = None) -> Staging:
    """Return a new staging folder for a target that may be written."""
    parents = check_target(folder, overwrite, origin)
    path = folder.parent / f".staging-{folder.name}~{uuid.uuid4().hex[:8]}"
    with written_in(folder):
        path.mkdir()
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Staging(path, parents, lock)


@contextmanager
def written_in(folder: Path) -> Iterator[None]:
    """Raise errors of the system, such as a name that is too long, as a `TesseraError` about a target."""
    try:
        yield
    except OSError as error:
        reason = str(error.args[0][0][-1]) if isinstance(error, shutil.Error) else error.strerror  # of the first file
        raise TesseraError(f"nothing can be written there: {reason}", where=str(folder)) from error


def check_target(folder: Path, overwrite: bool, origin: Origin | None = None) -> tuple[Path, ...]:
    """Refuse a target with something else in it, and make the folders that it will lie in: those made are returned.

    An export of the same source in the same form is replaced.
    """
    with written_in(folder):
        if folder.is_symlink():  # it would be replaced, and not what it leads to
            raise TesseraError("the target is a link", where=str(folder), fix=f"name {os.path.realpath(folder)}")
        here = Path.cwd()
        if Path(os.path.realpath(folder)) in (here, *here.parents):
            raise TesseraError(
                "the target is the working folder, or holds it", where=str(folder), fix="name a new folder in it"
            )
        if folder.exists() and not folder.is_dir():
            raise TesseraError(f"there is a file in the way: {folder}")
        if folder.is_dir() and any(folder.iterdir()) and not overwrite and not _is_export(folder, origin):
            raise TesseraError(
                "the folder is not empty and not an earlier export of the same source in the same form",
                where=str(folder),
                fix="name another folder, or --overwrite (overwrite=True in Python): everything in it is replaced",
            )
        missing = tuple(path for path in folder.parents if not path.exists())
        folder.parent.mkdir(parents=True, exist_ok=True)
        return missing


def _is_export(folder: Path, origin: Origin | None) -> bool:
    """Return whether the record in a folder, which may be anything, says that it is of this origin."""
    try:
        return origin is not None and read_json_mapping(folder / MARK, _MAX_RECORD_BYTES).get("origin") == origin
    except TesseraError:
        return False


def remove_empty(parents: Sequence[Path]) -> None:
    """Remove folders that were made for a target, the innermost first, as far as nothing else has come into them."""
    for path in parents:
        with suppress(OSError):
            path.rmdir()


def show(staging: Path, folder: Path, fault: Fault, origin: Origin | None, overwrite: bool) -> None:
    """Rename a complete staging folder to its target, and remove what earlier ones have left."""
    check_target(folder, overwrite, origin)  # again: another process may have been faster
    mark = staging / MARK
    # A Hugging Face folder has a record of its own there, with one tensor a line: it stays as it is.
    record = mark.read_bytes() if mark.exists() else pretty_json({"format": "tessera-export", "version": 1})
    mark.unlink(missing_ok=True)
    if origin is not None:
        record = b"{\n" + f' "origin": {json.dumps(origin)},'.encode() + record.removeprefix(b"{")
    write_file(mark, record, fault)
    sync_folder(staging, fault)
    trash = folder.parent / f".trash-{folder.name}~{uuid.uuid4().hex[:8]}"
    if folder.is_dir():
        rename(folder, trash, fault)
    rename(staging, folder, fault)
    # Only now: until the new one stood, what an interrupted export had left might have been the last copy.
    for path in folder.parent.iterdir():
        begun = path.name.startswith(f".staging-{folder.name}~")
        if path.name.startswith(f".trash-{folder.name}~") or (begun and not _in_use(path)):
            remove_folder(path)  # or a journal


def _in_use(path: Path) -> bool:
    """Return whether a process is writing to a staging folder. One that can go on is locked by its journal."""
    journal = path.with_name(f"{path.name}.journal")
    try:
        handle = os.open(journal if journal.is_file() else path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(handle)
    return False


def pretty_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


# ---------------------------------------------------------------------------------------------- what can go on


def staging_of(folder: Path) -> Path:
    """Return the staging folder of a conversion that can go on."""
    return folder.parent / f".staging-{folder.name}~convert"


class Journal:
    """Keep the staging folder of one job, and what is written in it. Use it as a context: it is locked inside.

    `written`: what an earlier process had written, by number of the group, with the checksums of each tensor.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], plan: FolderPlan) -> None:
        self.staging = staging_of(folder)
        self._path = self.staging.with_name(f"{self.staging.name}.journal")
        self._target, self._plan = folder, plan
        self._job = {"version": 1, "plan": plan.fingerprint(), **job}
        self._mutex = threading.Lock()
        self.written: dict[int, dict[str, list[int]]] = {}

    def __enter__(self) -> Self:
        self._handle = _locked(self._path, self._target)
        try:
            self._resume()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.staging.exists():
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def note(self, group: int, checksums: Mapping[str, list[int]]) -> None:
        """Note that a group is written and was read again."""
        with self._mutex:
            os.write(self._handle, _line({"group": group, "checksums": checksums}))

    def _resume(self) -> None:
        lines, length = _lines(os.pread(self._handle, _MAX_JOURNAL_BYTES, 0))
        misfit = self._misfit(lines)
        if misfit is None:
            os.ftruncate(self._handle, length)  # without a line that was being written
            self.written = {line["group"]: line["checksums"] for line in lines[1:] if self._is_note(line)}
            self._check_space(sum((self.staging / name).stat().st_blocks * 512 for name in self._plan.files))
            return
        if lines or self.staging.exists():
            _log.info("an earlier conversion to %s is not continued: %s", self._target, misfit)
        remove_folder(self.staging)
        os.ftruncate(self._handle, 0)
        self._check_space(0)
        try:
            self.staging.mkdir()
            with PlannedFolder(self.staging, self._plan):
                pass
            os.write(self._handle, _line(self._job))
        except OSError:
            remove_folder(self.staging)  # without the first line of its journal nothing goes on from there
            raise

    def _is_note(self, line: Mapping[str, Any]) -> bool:
        """Return whether a line is one that `note` writes for this plan. Others have no say: their group is written."""
        checksums, places = line.get("checksums"), self._plan.places
        return (
            type(line.get("group")) is int
            and isinstance(checksums, dict)
            and all(
                isinstance(of, list)
                and len(of) == len(places.get(name, ()))
                and all(type(one) is int and 0 <= one < 1 << 32 for one in of)
                for name, of in checksums.items()
            )
        )

    def _misfit(self, lines: list[dict[str, Any]]) -> str | None:
        """Return why what lies there cannot be continued, in words. Contents of files are compared later."""
        if not lines:
            return "it had only begun"
        differing = sorted(key for key in {*lines[0], *self._job} if lines[0].get(key) != self._job.get(key))
        if differing:
            return "the source has changed since" if differing == ["source"] else "it was another job"
        home = self.staging.parent.resolve() / self.staging.name
        for name, file in self._plan.files.items():
            path = self.staging / name
            if path.resolve() != home / name or not path.is_file() or path.stat().st_size != file.size:
                return f"{name} is not what it had written"
        return None

    def _check_space(self, taken: int) -> None:
        needed, free = self._plan.nbytes - taken, free_bytes(self._target)
        if needed > free:
            raise TesseraError(
                f"the disk is too full: {human_bytes(needed)} ({needed} bytes) are needed, {human_bytes(free)} "
                f"({free} bytes) are free",
                where=str(self._target),
                fix="free some space, or name a target on another disk",
            )


def _locked(path: Path, target: Path) -> int:
    """Open a journal and lock it for this process; refuse if another one has it."""
    while True:
        with written_in(target):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                raise TesseraError(
                    "another process is writing to this target",
                    where=str(target),
                    fix="wait until it has ended, or name another folder",
                ) from None
            # A file system without locks: what is written is compared in any case.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
            return handle
        os.close(handle)  # its owner has just ended and removed it


def _line(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a journal up to the first that is torn or damaged, and where they end."""
    found: list[dict[str, Any]] = []
    length = 0
    for line in data.split(b"\n")[:-1]:
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            break
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(content, dict):
            break
        found.append(content)
        length += len(line) + 1
    return found, length
