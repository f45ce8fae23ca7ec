"""Lock a run folder for one run. Two runs in one folder would remove each other's checkpoints and records.

    RUN/.lock           locked by the main rank's process for as long as the run lasts
    RUN/.owner.json     who that is: host, process, and a number that rises with every heartbeat

The lock is one of POSIX record locks: the system drops it when its process ends, however it ends, and no child inherits
it. So a run that was killed can be resumed at once, on its own machine and in any container there. Some file systems
have no locks, or only such that other machines do not see. There the heartbeat decides: an owner on another machine is
alive if its number rises within a few heartbeats, and dead otherwise. A dead owner's folder is always taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping
from tessera.runtime.process import Process

LOCK = ".lock"
OWNER = ".owner.json"
_STALE_HEARTBEATS = 12  # an owner whose last heartbeat is older than so many intervals is dead
_WATCHED_HEARTBEATS = 3
ENDING_S = 40.0  # torch's launcher kills ranks 30 s after the signal that ends them
_RECORD_BYTES = 1024  # written in place with one call, always of one length: no reader sees a part of it

log = logging.getLogger("tessera")


@dataclass(frozen=True)
class FolderOwner:
    """Describe the process that a folder belongs to, as `.owner.json` does."""

    process: Process
    nonce: str
    heartbeat: int

    def dump(self) -> bytes:
        text = json.dumps({"process": self.process.dump(), "nonce": self.nonce, "heartbeat": self.heartbeat})
        return text.encode().ljust(_RECORD_BYTES - 1) + b"\n"

    @staticmethod
    def read(path: Path) -> FolderOwner | None:
        try:
            fields = read_json_mapping(path)
            return FolderOwner(Process.load(fields["process"]), str(fields["nonce"]), int(fields["heartbeat"]))
        except (TesseraError, ValueError, KeyError, TypeError, OverflowError):
            return None


class FolderInUse(TesseraError):
    """Say that another run uses a folder. It may end soon, so the exit code is the one that means: try again later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


def wait_for_owner(folder: Path, seconds: float = ENDING_S) -> None:
    """Wait until the run of this machine that uses a folder has ended, for so long at most.

    It may be about to end: it saves after a signal, or has lost its launcher. Owners elsewhere are not waited for:
    `FolderLock.acquire` finds out about them.
    """
    owner = FolderOwner.read(folder / OWNER)
    if owner is None or not owner.process.visible() or not owner.process.alive():
        return
    log.warning("%s is in use by process %d: waiting %.0f s for its end", folder, owner.process.pid, seconds)
    deadline = time.monotonic() + seconds
    while owner.process.alive() and FolderOwner.read(folder / OWNER) is not None and time.monotonic() < deadline:
        time.sleep(0.1)


class FolderLock:
    """Lock an existing folder for this process.

    `acquire` raises `OSError` where nothing can be written, and `FolderInUse` where another run uses the folder.
    """

    def __init__(self, folder: Path, *, heartbeat_s: float = 5.0) -> None:
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._owner = FolderOwner(Process.this(), secrets.token_hex(8), 0)
        self._lock_file: int | None = None
        self._record_file: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def refuse_running(self) -> None:
        """Raise if another process is running in the folder, and lock nothing. For the main rank alone."""
        present = FolderOwner.read(self._folder / OWNER)
        if present is None or present.process == self._owner.process:
            return
        if present.process.alive() if present.process.visible() else self._is_alive(present):
            raise self._in_use(present)

    def acquire(self) -> None:
        present = FolderOwner.read(self._folder / OWNER)
        if present is not None and present.process == self._owner.process and self._is_alive(present):
            # Not even opened: when a process closes a file, it loses every lock that it has on it.
            raise self._in_use(present)
        self._lock_file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = _try_lock(self._lock_file)
            present = FolderOwner.read(self._folder / OWNER)
            if self._is_used(present, locked):
                raise self._in_use(present)
            if locked is False:
                self._replace_lock()
            self._write_record()
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._heartbeat, name="tessera-folder-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(self._heartbeat_s)
        self._thread = None
        with contextlib.suppress(OSError):
            now = FolderOwner.read(self._folder / OWNER)
            if now is not None and now.nonce == self._owner.nonce:
                (self._folder / OWNER).unlink()
        self._close()

    # ------------------------------------------------------------------------------------------ other owners

    def _is_used(self, present: FolderOwner | None, locked: bool | None) -> bool:
        """Return whether another run is at work here. `locked`: see `_try_lock`."""
        if present is None:
            return locked is False  # it has locked the folder and not signed yet
        here = _same_system(present.process)
        if locked is False and here:
            return True
        if present.process.visible() and not present.process.alive():
            return False
        if locked and here and not present.process.visible():
            return False  # of another container on this system, which would have kept the lock
        return self._is_alive(present)

    def _is_alive(self, present: FolderOwner) -> bool:
        """Return whether an owner shows that it is alive. Waits for a few heartbeats unless the last one is old."""
        path = self._folder / OWNER
        probe = self._folder / f".clock-{self._owner.nonce}"
        try:  # both times are those of the file system: clocks of machines differ
            probe.touch()
            age = probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return False  # it has just ended
        finally:
            probe.unlink(missing_ok=True)
        if age > _STALE_HEARTBEATS * self._heartbeat_s:
            return False
        deadline = time.monotonic() + _WATCHED_HEARTBEATS * self._heartbeat_s
        while time.monotonic() < deadline:
            now = FolderOwner.read(path)
            if now != present:
                return now is not None
            time.sleep(self._heartbeat_s / 20)
        return False

    def _in_use(self, present: FolderOwner | None) -> FolderInUse:
        if present is None:
            return FolderInUse(
                f"{self._folder} is in use: another process has just begun to write to it",
                where=str(self._folder),
                fix="wait until it has ended, or choose another name",
            )
        host, pid = present.process.host, present.process.pid
        return FolderInUse(
            f"{self._folder} is in use: process {pid} on {host} is running in it",
            where=str(self._folder / OWNER),
            fix=f"wait until it has ended, or stop it there (kill {pid}: it saves and ends); name=NEW starts another "
            "run",
        )

    # ------------------------------------------------------------------------------------------ owning

    def _replace_lock(self) -> None:
        """Replace the lock file of a machine that is gone: its lock cannot be acquired any more."""
        fresh = self._folder / f"{LOCK}-{self._owner.nonce}"
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _try_lock(handle)
        os.replace(fresh, self._folder / LOCK)
        assert self._lock_file is not None
        os.close(self._lock_file)
        self._lock_file = handle

    def _write_record(self) -> None:
        fresh = self._folder / f"{OWNER}-{self._owner.nonce}"
        self._record_file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(self._record_file, self._owner.dump(), 0)
            os.replace(fresh, self._folder / OWNER)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _heartbeat(self) -> None:
        count = 0
        while not self._stop.wait(self._heartbeat_s):
            count += 1
            owner = FolderOwner(self._owner.process, self._owner.nonce, count)
            with contextlib.suppress(OSError):  # a full disk or a lost network must not end a run from here
                assert self._record_file is not None
                os.pwrite(self._record_file, owner.dump(), 0)

    def _close(self) -> None:
        for handle in (self._record_file, self._lock_file):
            if handle is not None:
                with contextlib.suppress(OSError):
                    os.close(handle)
        self._record_file = self._lock_file = None


def _try_lock(handle: int) -> bool | None:
    """Return True if this process has the lock now, False if another has it, None where there are no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _same_system(process: Process) -> bool:
    """Return whether a process belongs to this running system, also in another container: then locks work."""
    mine = Process.this()
    if mine.realm and process.realm:
        return mine.realm.split("/")[0] == process.realm.split("/")[0]
    return mine.host == process.host
