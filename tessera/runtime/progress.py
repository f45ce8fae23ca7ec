"""Show the progress of long work: a live line on a terminal, otherwise a log line every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Literal, Self

from tessera.runtime import log

_AFTER = 1.0  # seconds of work before a terminal shows the line
_REFRESH = 0.2  # seconds between updates of the line
_EVERY = 10.0  # seconds between log lines


def human_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class WorkProgress:
    """Count finished work and show the progress on rank 0. `unit`: "bytes", or a noun such as "samples".

    `note`: text for the end of the line, which the caller may change.
    """

    def __init__(self, what: str, total: int, unit: str = "bytes") -> None:
        self._what, self._total, self._unit, self._done = what, total, unit, 0
        self.note = ""
        self._began = self._printed_at = time.monotonic()
        self._width = 0  # characters of the live line; 0: no line is shown
        self._silent = os.environ.get("RANK", "0") != "0"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if self._width:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0
        return False

    def count(self, done: int = 1) -> None:
        """Add finished work and update the display. 0 only updates the display."""
        self._done += done
        if self._silent:
            return
        now = time.monotonic()
        # If another stream replaces stderr, as in a notebook, write log lines instead of a live line.
        live = log.is_terminal(sys.stderr) and sys.stderr is sys.__stderr__
        if live and now - self._began >= _AFTER and now - self._printed_at >= _REFRESH:
            self._printed_at = now
            line = self.line(now)[:99]
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = max(self._width, len(line))
        elif not live and now - self._printed_at >= _EVERY:
            self._printed_at = now
            log.logger().info("%s", self.line(now))

    def line(self, now: float) -> str:
        """Return the text: finished and total work, rate, and remaining time."""
        if not self._done:
            total = human_bytes(self._total) if self._unit == "bytes" else f"{self._total:,} {self._unit}"
            return f"{self._what}: 0 of {total} so far, {now - self._began:.0f} s"
        rate = self._done / max(now - self._began, 1e-9)
        seconds_left = max(0, self._total - self._done) / rate
        if self._unit == "bytes":
            done = f"{human_bytes(self._done)} of {human_bytes(self._total)}, {human_bytes(rate)}/s"
        else:
            done = f"{self._done:,} of {self._total:,} {self._unit}, {rate:.3g}/s"
        return f"{self._what}: {done}, {seconds_left:.0f} s left{self.note and f', {self.note}'}"


class TokenProgress(WorkProgress):
    """Count finished answers, and show the number of tokens per second."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        super().__init__(what, total, unit)
        self._tokens = 0

    def count_tokens(self, count: int) -> None:
        """Add new tokens and update the display."""
        self._tokens += count
        self.note = f"{self._tokens / max(time.monotonic() - self._began, 1e-9):,.0f} tokens/s"
        self.count(0)
