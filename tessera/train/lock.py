"""One owner at a time for a run folder. Two runs in one folder would remove each other's checkpoints and records.

    RUN/.lock           held by the main rank's process for as long as the run lasts
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
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tessera.core.errors import TesseraError
from tessera.core.files import read_json_mapping
from tessera.core.process import Process

LOCK = ".lock"
OWNER = ".owner.json"
_LATEST_SIGN_BEATS = 12  # a heartbeat older than so many is no sign of life, and nothing has to be waited for
_WATCH_BEATS = 3
_RECORD_BYTES = 1024  # written in place with one call, always as long: no reader sees a part of it


@dataclass(frozen=True)
class Owner:
    process: Process
    nonce: str
    beat: int

    def dump(self) -> bytes:
        text = json.dumps({"process": self.process.dump(), "nonce": self.nonce, "beat": self.beat})
        return text.encode().ljust(_RECORD_BYTES - 1) + b"\n"

    @staticmethod
    def read(path: Path) -> Owner | None:
        try:
            fields = read_json_mapping(path)
            return Owner(Process.load(fields["process"]), str(fields["nonce"]), int(fields["beat"]))
        except (TesseraError, ValueError, KeyError, TypeError, OverflowError):
            return None


class FolderLock:
    """Of an existing folder. `OSError` where nothing can be written, `TesseraError` where another run is at work."""

    def __init__(self, folder: Path, *, heartbeat_s: float = 5.0) -> None:
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._owner = Owner(Process.this(), secrets.token_hex(8), 0)
        self._lock_file: int | None = None
        self._record_file: int | None = None
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> None:
        present = Owner.read(self._folder / OWNER)
        if present is not None and present.process == self._owner.process and self._beating(present):
            # Not even opened: when a process closes a file, it loses every lock that it has on it.
            raise self._in_use(present)
        self._lock_file = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            held = _try_lock(self._lock_file)
            present = Owner.read(self._folder / OWNER)
            if self._lives(present, held):
                raise self._in_use(present)
            if held is False:
                self._replace_lock()
            self._sign()
        except BaseException:
            self._close()
            raise
        self._beats = threading.Thread(target=self._beat, name="tessera-folder-lock", daemon=True)
        self._beats.start()

    def release(self) -> None:
        if self._beats is None:
            return
        self._stop.set()
        self._beats.join(self._heartbeat_s)
        self._beats = None
        with contextlib.suppress(OSError):
            now = Owner.read(self._folder / OWNER)
            if now is not None and now.nonce == self._owner.nonce:
                (self._folder / OWNER).unlink()
        self._close()

    # ------------------------------------------------------------------------------------------ who is there

    def _lives(self, present: Owner | None, held: bool | None) -> bool:
        """Return whether another run is at work here. `held`: whether we have the lock now; None: there are no locks
        on this file system."""
        if present is None:
            return held is False  # it has locked the folder and not signed yet
        here = _same_system(present.process)
        if held is False and here:
            return True
        if present.process.visible() and not present.process.alive():
            return False
        if held and here and not present.process.visible():
            return False  # of another container on this system, which would have kept the lock
        return self._beating(present)

    def _beating(self, present: Owner) -> bool:
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
        if age > _LATEST_SIGN_BEATS * self._heartbeat_s:
            return False
        deadline = time.monotonic() + _WATCH_BEATS * self._heartbeat_s
        while time.monotonic() < deadline:
            now = Owner.read(path)
            if now != present:
                return now is not None
            time.sleep(self._heartbeat_s / 20)
        return False

    def _in_use(self, present: Owner | None) -> TesseraError:
        if present is None:
            return TesseraError(
                f"{self._folder} is in use: another process has just begun to write to it",
                where=str(self._folder),
                fix="wait until it has ended, or choose another name",
            )
        host, pid = present.process.host, present.process.pid
        return TesseraError(
            f"{self._folder} is in use: process {pid} on {host} is running in it",
            where=str(self._folder / OWNER),
            fix=f"wait until it has ended, or stop it there (kill {pid}: it saves and ends); name=NEW starts another "
            "run",
        )

    # ------------------------------------------------------------------------------------------ being there

    def _replace_lock(self) -> None:
        """Take a lock that a machine kept which is gone: under a new file, since the old one cannot be had."""
        fresh = self._folder / f"{LOCK}-{self._owner.nonce}"
        handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _try_lock(handle)
        os.replace(fresh, self._folder / LOCK)
        assert self._lock_file is not None
        os.close(self._lock_file)
        self._lock_file = handle

    def _sign(self) -> None:
        fresh = self._folder / f"{OWNER}-{self._owner.nonce}"
        self._record_file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.pwrite(self._record_file, self._owner.dump(), 0)
            os.replace(fresh, self._folder / OWNER)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._heartbeat_s):
            count += 1
            owner = Owner(self._owner.process, self._owner.nonce, count)
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
    """Return True if the lock is ours now, False if another has it, None where there are no locks."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _same_system(process: Process) -> bool:
    """Return whether a process belongs to this running system, also if it is in another container: locks tell then."""
    mine = Process.this()
    if mine.realm and process.realm:
        return mine.realm.split("/")[0] == process.realm.split("/")[0]
    return mine.host == process.host
