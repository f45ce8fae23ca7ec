"""The user's cache folder: indexes of data sets, spilled row groups of Parquet files, downloaded images.

The name of every file is a hash of its inputs. Index files that were not used for 60 days are deleted. The folder may
be deleted at any time: run folders have copies or hard links of their indexes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera.runtime.files import replacing

log = logging.getLogger("tessera")

CACHE_VARIABLE = "TESSERA_CACHE"
_UNUSED_S = 60 * 24 * 3600.0  # seconds: a file that was not used for 60 days is deleted
_TRIM_EVERY_S = 24 * 3600.0


def user_cache(kind: str) -> Path:
    """Return the cache folder of one kind of files: below TESSERA_CACHE, or below XDG_CACHE_HOME or ~/.cache.

    If the user has no home folder, the path cannot be written, and `share` warns.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get(CACHE_VARIABLE) or os.path.join(home, "tessera"))
    return Path(os.devnull if folder.startswith("~") else folder).absolute() / kind


def digest_of(facts: Any) -> str:
    """Return a hash of JSON values. A file that depends on these values is named after it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def share(file: Path) -> None:
    """Put an index file into the cache, for other runs over the same data. If that fails, only log it."""
    shared = user_cache("index") / file.name
    if shared == file:
        return
    try:
        shared.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(file, shared)
    except OSError as error:
        warn_once(
            f"other runs cannot reuse the index of the data, because the cache {shared.parent} is not writable: "
            f"{error.strerror}; fix: set {CACHE_VARIABLE} to a writable folder"
        )
        return
    _trim(shared.parent)


def adopt(file: Path) -> bool:
    """Link or copy an index file from the cache to `file` in a run folder. Return False if it is not in the cache."""
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
    """Make `target` a hard link to `source`, or a copy on another file system. The change is atomic."""
    with replacing(target) as fresh:
        try:
            os.link(source, fresh)
        except OSError:
            shutil.copyfile(source, fresh)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning; do nothing if this process has logged the same text before."""
    log.warning("%s", text)


def _trim(folder: Path) -> None:
    """Delete files that were not used for 60 days. This is done at most once a day, because it lists the folder."""
    stamp = folder / ".trimmed"
    with suppress(OSError):
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _TRIM_EVERY_S:
            return
        stamp.touch()
        for entry in folder.iterdir():
            if entry != stamp and time.time() - entry.lstat().st_mtime > _UNUSED_S:
                entry.unlink(missing_ok=True)
