"""Let one of several processes do what all of them need, and the others wait for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold a lock file for the time of the block; without a file nobody waits. The lock goes with its process."""
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: then the work is done more than once
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
