"""Processes of this machine, known for certain: a number alone may long belong to another one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_STARTED = 19  # field of /proc/PID/stat after the name, counted from the state: clock ticks from boot to the start


@dataclass(frozen=True)
class Process:
    host: str
    realm: str  # boot and process namespace: numbers mean the same only within one of these
    pid: int
    started: str

    @staticmethod
    def this() -> Process:
        return Process(socket.gethostname(), _realm(), os.getpid(), _stat(os.getpid())[_STARTED])

    @staticmethod
    def load(fields: dict[str, Any]) -> Process:
        return Process(**fields)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def visible(self) -> bool:
        """Whether this machine can tell anything about it."""
        return bool(self.realm) and self.realm == _realm()

    def alive(self) -> bool:
        """For a visible one. One that has ended and was not yet collected by its parent counts as dead."""
        stat = _stat(self.pid)
        return stat[_STARTED] == self.started and stat[0] not in ("Z", "X")

    def kill(self) -> None:
        """Ends it if it is visible and still there: also one that was stopped and would hear no other signal."""
        if self.visible() and self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _realm() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:  # not Linux: then nobody's life can be told from here
        return ""


def _stat(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [""] * (_STARTED + 1)
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
