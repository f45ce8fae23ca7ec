"""Make temporary folders for large files. Those that a killed process has left are removed by the next one."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tessera.runtime.folder_lock import FolderLock, owner_of


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield an empty temporary folder of this process, and remove it at the end.

    Folders with the same prefix are removed first if this user's process that made them has ended.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as temporary:
        folder = Path(temporary)
        lock = FolderLock(folder)
        lock.acquire()
        try:
            yield folder
        finally:
            lock.release()


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder names a process of this user and this machine as its owner, which has ended."""
    with suppress(OSError):
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
            owner = owner_of(folder)
            return owner is not None and owner.visible() and not owner.alive()
    return False
