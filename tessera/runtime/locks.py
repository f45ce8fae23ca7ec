"""Locks between processes of a machine, by files that are removed when nobody needs them.

A lock goes with its process, however that ends; then its file stays until the next one who takes it. Whoever gets a
lock looks whether its file still lies there: somebody else may have removed it in between, and a third one made
another, which would be another lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold a lock file alone for the time of the block, then remove it; without a file nobody waits."""
    if file is None:
        yield
        return
    handle = _taken(file, fcntl.LOCK_EX)
    assert handle is not None, "who waits gets it"
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def shared(file: Path) -> Iterator[None]:
    """Hold a lock file beside others who share it. It stays, with its time set to now: `alone` removes it."""
    handle = _taken(file, fcntl.LOCK_SH)
    assert handle is not None, "who waits gets it"
    try:
        with suppress(OSError):
            os.utime(file)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(file: Path) -> Iterator[bool]:
    """Tell whether nobody holds a lock file, and hold it for the time of the block if so."""
    handle = _taken(file, fcntl.LOCK_EX | fcntl.LOCK_NB, make=False)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _taken(file: Path, how: int, make: bool = True) -> int | None:
    """Return a handle that holds a lock on the file that lies there; None if somebody else holds it, or if it is not
    there and is not to be made."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    while True:
        if make:
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, flags, 0o600)
        except FileNotFoundError:
            if make and file.parent.is_dir() and file.is_symlink():  # leads nowhere: it would be so for ever
                raise
            if not make:
                return None
            continue
        try:
            fcntl.flock(handle, how)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # a file system without locks: then the work is done more than once, and nothing is removed
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
