"""Lock a run folder for one run. Two runs in one folder would remove each other's checkpoints and records.

The main rank's process locks `RUN/.lock` with `flock` while the run lasts, and writes its process id into the file. The
system drops the lock when the process ends, however it ends: a run that was killed can be resumed at once. Where the
file system passes locks on to other machines, as NFS does, a run on another machine is refused as well.

Some file systems have no locks (Lustre without `flock`, some FUSE mounts). There a second run on this machine is
refused if the process in the file is alive. A second run on another machine is not noticed, and a warning is logged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tessera.errors import TesseraError, first_line
from tessera.runtime.files import read_json_mapping
from tessera.runtime.process import Process

LOCK = ".lock"
ENDING_S = 40.0  # longer than torchrun waits (30 s) between SIGTERM and SIGKILL
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

log = logging.getLogger("tessera")


class FolderInUse(TesseraError):
    """Report that another run uses the folder. The exit code lets schedulers retry, since that run may end soon."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


def wait_for_owner(folder: Path, seconds: float = ENDING_S) -> None:
    """Wait until the run that uses a folder has ended, for `seconds` at most.

    After a signal or the loss of its launcher, a run needs some seconds to save and end.
    """
    deadline, warned = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        try:
            FolderLock(folder).refuse_running()
            return
        except FolderInUse as error:
            if not warned:
                log.warning("%s: waiting %.0f s for its end", error.what, seconds)
            warned = True
        time.sleep(0.1)


class FolderLock:
    """Lock an existing folder for this process.

    `acquire` raises `OSError` if the folder cannot be written to, and `FolderInUse` if another run uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: int | None = None

    def refuse_running(self) -> None:
        """Raise if another run uses the folder. Do not lock it. Only the main rank calls this."""
        if self._path.exists():
            with contextlib.suppress(OSError):  # a folder that cannot be written to is reported later
                self.acquire()
                self.release()

    def acquire(self) -> None:
        """Lock the folder, and write the id of this process into the lock file."""
        # The lock file may have been replaced by a pipe or a link: never block on it, never follow it.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o666)
        try:
            locked = _try_lock(self._file)
            owner = owner_of(self._path.parent)
            if locked is False or (locked is None and _is_running(owner)):
                raise self._in_use(owner)
            if locked is None and owner is not None and not owner.visible():
                log.warning(
                    "%s: this file system has no locks. The run of process %d on %s is assumed to have ended",
                    self._path.parent,
                    owner.pid,
                    owner.host,
                )
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"process": Process.this().dump()}).encode(), 0)
        except BaseException:
            self._close()
            raise
        os.register_at_fork(after_in_child=self._close)  # a child process that outlives this one must not keep the lock

    def remove_if_alone(self) -> None:
        """Remove the locked folder if it contains only the lock file."""
        with contextlib.suppress(OSError):
            if [*self._path.parent.iterdir()] == [self._path]:
                self._path.unlink()
                self._path.parent.rmdir()

    def release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        self._close()

    def _in_use(self, owner: Process | None) -> FolderInUse:
        folder = self._path.parent
        if owner is None:
            return FolderInUse(
                f"{folder} is in use: another process is just starting a run in it",
                where=str(folder),
                fix="wait until it has ended, or choose another name",
                code="run.folder-in-use",
            )
        return FolderInUse(
            f"{folder} is in use: process {owner.pid} on {owner.host} is running in it",
            where=str(self._path),
            fix=f"wait until it has ended, or stop it there (kill {owner.pid}: it saves and ends); name=NEW starts "
            f"another run. If that machine is gone and its file server keeps the lock, remove {self._path}",
            code="run.folder-in-use",
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


@contextlib.contextmanager
def claimed(folder: Path, output: Path) -> Iterator[None]:
    """Create and lock the folder that a command writes to. `output`: the command's option `--out`, for error messages.

    At the end, remove the folder if nothing was written.
    """
    lock = FolderLock(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise TesseraError(
            f"{output} cannot be written: {first_line(error)}",
            where="--out",
            fix="name another: --out PATH",
            code="output.not-writable",
        ) from None
    except FolderInUse as error:
        raise FolderInUse(
            f"another process is writing {output}",
            where=str(error.where),
            fix="wait until it has ended, or name another: --out PATH",
            code="output.in-use",
        ) from None
    try:
        yield
    finally:
        lock.remove_if_alone()
        lock.release()


def _try_lock(file: int) -> bool | None:
    """Return True if this process got the lock, False if another has it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def owner_of(folder: Path) -> Process | None:
    """Return the process that the lock of a folder names; None if the lock is missing, empty or damaged."""
    try:
        return Process.load(read_json_mapping(folder / LOCK)["process"])
    except (TesseraError, KeyError, TypeError):
        return None


def _is_running(owner: Process | None) -> bool:
    """Return whether a process is alive on this machine."""
    return owner is not None and owner.visible() and owner.alive()
