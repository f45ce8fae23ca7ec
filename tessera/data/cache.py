"""The cache folder of the user: indexes of data sets that all runs share, spilled row groups, fetched images.

Every file in it is named by a hash of what it depends on. A file that was not used for a long time is removed when
another one is written. All of it may be removed by hand at any time: runs have their own copies, or links.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("tessera")

CACHE_VARIABLE = "TESSERA_CACHE"
_UNUSED_S = 60 * 24 * 3600.0  # an entry is removed if it was not used for so long
_TRIM_EVERY_S = 24 * 3600.0


def user_cache(kind: str) -> Path:
    """Return the folder for one kind of files below `TESSERA_CACHE`, or below `tessera` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or os.path.join(home, "tessera")).expanduser().absolute() / kind


def share(file: Path) -> None:
    """Put a finished file into the cache, where runs over the same data look for it. A failure costs only that."""
    shared = user_cache("index") / file.name
    if shared == file:
        return
    try:
        shared.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(file, shared)
    except OSError as error:
        warn_once(
            f"the index of the data is in the run alone, because the cache {shared.parent} cannot be written: "
            f"{error.strerror}; fix: set {CACHE_VARIABLE} to a folder that can be written"
        )
        return
    _trim(shared.parent)


def adopt(file: Path) -> bool:
    """Put the file of this name from the cache in its place in a run. Return whether there was one."""
    shared = user_cache("index") / file.name
    try:
        if not shared.is_file():
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(shared, file)
    except OSError:
        return False
    with suppress(OSError):
        os.utime(shared)
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy on another file system. A reader sees all of it or nothing."""
    fresh = unique_name(target)
    try:
        try:
            os.link(source, fresh)
        except OSError:
            shutil.copyfile(source, fresh)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)  # a link that replaces another name of the same file is left behind


def unique_name(file: Path) -> Path:
    """Return a name beside a file that no other process chooses, also none on another machine."""
    return file.with_name(f"{file.name}.{os.getpid()}-{os.urandom(4).hex()}.part")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    log.warning("%s", text)


def _trim(folder: Path) -> None:
    """Remove files that were not used for 60 days; at most once a day, because every entry is looked at."""
    stamp = folder / ".trimmed"
    with suppress(OSError):
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _TRIM_EVERY_S:
            return
        stamp.touch()
        for entry in folder.iterdir():
            if entry != stamp and time.time() - entry.lstat().st_mtime > _UNUSED_S:
                entry.unlink(missing_ok=True)
