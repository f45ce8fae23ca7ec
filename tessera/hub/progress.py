"""Show how far a download is, by the growth of the folder that it goes to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.runtime.progress import WorkProgress

_EVERY_S = 0.5


def say(text: str) -> None:
    """Write a line for the user: the logger of a run is not set up while its model is fetched."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def report_progress(folder: Path, total: int, what: str) -> Iterator[None]:
    """Show how much of `total` bytes is downloaded, until the end of the block."""
    if total <= 0:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(folder, total, what, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report(folder: Path, total: int, what: str, ended: threading.Event) -> None:
    before = _bytes_below(folder)
    done = 0
    with WorkProgress(what, total) as progress:
        while not ended.wait(_EVERY_S):
            now = min(max(done, _bytes_below(folder) - before), total)
            progress.count(now - done)
            done = now


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; links are not followed."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except OSError:  # it was renamed just now
                continue
    return total
