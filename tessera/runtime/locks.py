"""Lock files between processes of a machine by `flock`.

The kernel releases a lock when its process ends; the file then remains until the next process takes the lock. A process
that has a lock checks that its path still leads to the same file: another process may have removed and recreated it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on a file during the `with` block, then remove the file. If `file` is None, do nothing."""
    if file is None:
        yield
        return
    handle = _taken(file, fcntl.LOCK_EX)
    assert handle is not None, "a blocking lock is always taken"
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def shared(file: Path) -> Iterator[None]:
    """Hold a shared lock on a file during the `with` block, and set the file's modification time."""
    handle = _taken(file, fcntl.LOCK_SH)
    assert handle is not None, "a blocking lock is always taken"
    try:
        with suppress(OSError):
            os.utime(file)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(file: Path) -> Iterator[bool]:
    """Try to lock a file exclusively during the `with` block, without waiting. Yield whether it is locked."""
    handle = _taken(file, fcntl.LOCK_EX | fcntl.LOCK_NB, make=False)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _taken(file: Path, how: int, make: bool = True) -> int | None:
    """Lock a file and return its descriptor; None if another process holds the lock, or the file is missing.

    `make`: create a missing file. If the file system has no locks, return the descriptor without a lock, or None if
    `how` does not wait.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    while True:
        if make:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, flags, 0o600)
        except FileNotFoundError:
            if make and file.parent.is_dir() and file.is_symlink():  # opening a dangling link would be retried forever
                raise
            if not make:
                return None
            continue
        try:
            fcntl.flock(handle, how)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # the file system has no locks: continue without one, even if processes repeat the same work
            if how & fcntl.LOCK_NB:
                os.close(handle)
                return None
            return handle
        if _lies_there(file, handle):
            return handle
        os.close(handle)


def _lies_there(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except OSError:
        return False
