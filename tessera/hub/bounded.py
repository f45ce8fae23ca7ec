"""Bound what a hub may send: never much more than it has announced, and never the last of a disk.

Sizes and hashes are checked when a file is there, and a server that sends without end would fill the disk before. The
library of the hub reads what it is sent by one session of its own, for all threads; a hook there counts.
"""

from __future__ import annotations

import importlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.runtime.progress import human_bytes

FLOOR = 256 << 20  # a list of many small files may be larger than any of them
_LOOK_EVERY = 64 << 20  # bytes between two looks at the disk
_LOOK_EVERY_PACKED = 1 << 18  # what is unpacked may be a thousand times as large
_LEAST_FREE = 256 << 20


@contextmanager
def bounded(session: Any, largest: int, place: Path, where: str) -> Iterator[None]:
    """Refuse answers of more than `largest` bytes that a session (of httpx) gets in the block; `place`: where they go.

    Downloads that go on at once share the session: each answer may be as large as the largest file of all of them.
    """
    try:
        hooks = session.event_hooks["response"]
    except (AttributeError, KeyError, TypeError):  # a session of an older library, which has no such hooks
        yield
        return
    hook = next((one for one in hooks if isinstance(one, _Hook)), None)
    if hook is None:
        hook = _Hook(importlib.import_module(type(session).__module__.partition(".")[0]).SyncByteStream)
        session.event_hooks = {**session.event_hooks, "response": [*hooks, hook]}
    with hook.limited(max(largest, FLOOR), place, where):
        yield


class _Hook:
    """Count the bytes of every answer of a session while downloads go on."""

    def __init__(self, stream_class: Any) -> None:
        self._counted = _counted_class(stream_class)
        self._lock = threading.Lock()
        self._limits: list[tuple[int, Path, str]] = []

    @contextmanager
    def limited(self, limit: int, place: Path, where: str) -> Iterator[None]:
        mine = (limit, place, where)
        with self._lock:
            self._limits.append(mine)
        try:
            yield
        finally:
            with self._lock:
                self._limits.remove(mine)

    def __call__(self, response: Any) -> None:
        with self._lock:
            limits = list(self._limits)
        if not limits:
            return
        limit, place, where = max(limits, key=lambda one: one[0])
        packed = response.headers.get("content-encoding", "identity") != "identity"
        check = _Check(limit, place, where, _LOOK_EVERY_PACKED if packed else _LOOK_EVERY)
        response.stream = self._counted(response.stream, check)


class _Check:
    """Raise when an answer is too long, or when it fills the disk."""

    def __init__(self, limit: int, place: Path, where: str, look_every: int) -> None:
        self._limit, self._place, self._where, self._look_every = limit, place, where, look_every
        self._next_look = look_every

    def __call__(self, count: int) -> None:
        if count > self._limit:
            raise TesseraError(
                f"the hub sends more than it has announced: {human_bytes(self._limit)} have come, and there is no end",
                where=self._where,
                fix="run the command again; if it happens again, do not trust this server (HF_ENDPOINT)",
            )
        if count < self._next_look:
            return
        self._next_look = count + self._look_every
        existing = next((folder for folder in (self._place, *self._place.absolute().parents) if folder.exists()), None)
        if existing is not None and shutil.disk_usage(existing).free < _LEAST_FREE:
            raise TesseraError(
                "the disk is nearly full, and the download is not at its end",
                where=str(self._place),
                fix="make room, or name another folder: HF_HUB_CACHE, or tessera download --to FOLDER",
            )


def _counted_class(base: Any) -> Callable[[Any, Callable[[int], None]], Any]:
    """Return the class of streams that tell how much has come. Its base is that of the library of connections."""

    class Counted(base):  # type: ignore[misc]
        def __init__(self, inner: Any, told: Callable[[int], None]) -> None:
            self._inner, self._told = inner, told

        def __iter__(self) -> Iterator[bytes]:
            count = 0
            for chunk in self._inner:
                count += len(chunk)
                self._told(count)
                yield chunk

        def close(self) -> None:
            self._inner.close()

    return Counted


def remove_oversized(place: Path, largest: int) -> None:
    """Remove what a refused answer left: the library would go on behind it the next time."""
    for part in place.rglob("*.incomplete") if place.is_dir() else ():
        try:
            if part.stat().st_size > largest:
                part.unlink()
        except OSError:  # another process has just finished it
            continue
