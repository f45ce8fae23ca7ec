"""Reading files that somebody else wrote: regular files only, and only so many bytes of them."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError

MAX_JSON_BYTES = 64 << 20


def check_regular(path: Path) -> os.stat_result:
    """What the system knows of a regular file. A pipe, a device, a socket or a folder in its place is refused: opening
    one may wait for ever. Links are followed, since caches of downloads are made of them."""
    try:
        found = path.stat()
    except OSError as error:
        raise TesseraError(f"cannot be opened: {error.strerror}", where=str(path)) from None
    if not stat.S_ISREG(found.st_mode):
        raise TesseraError(f"this is {_kind(found.st_mode)}, not a regular file", where=str(path))
    return found


def keep_inside(path: Path) -> None:
    """Before a file of a run is written to: what is written there must not reach a file elsewhere. A link, which a
    folder of somebody else may hold, becomes a file with what it led to; a pipe or a device is refused."""
    if path.is_symlink():
        if not path.exists():
            path.unlink()
            return
        check_regular(path)
        fresh = path.with_name(f"{path.name}.unlinked")
        fresh.unlink(missing_ok=True)
        shutil.copyfile(path, fresh)
        os.replace(fresh, path)
    elif path.exists():
        check_regular(path)


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    check_regular(path)
    try:
        # Without waiting: what lies there may have been exchanged since it was looked at.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise TesseraError(f"this is {_kind(found.st_mode)}, not a regular file", where=str(path))
            if found.st_size > limit:
                raise TesseraError(f"far too large ({found.st_size} bytes)", where=str(path))
            return file.read(limit)
    except OSError as error:
        raise TesseraError(f"cannot be opened: {error.strerror}", where=str(path)) from None


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TesseraError(f"not text in UTF-8: {error}", where=str(path)) from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    try:
        return json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise TesseraError(f"not readable as JSON: {error}", where=str(path)) from None


def read_json_mapping(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    data = read_json(path, limit)
    if not isinstance(data, dict):
        raise TesseraError(f"a mapping is needed here, this is a {type(data).__name__}", where=str(path))
    return data


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return name
    return "something else"
