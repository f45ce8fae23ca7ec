"""Identify processes of this machine by more than their number, which may be reused, and count its processors."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
# Fields of /proc/PID/stat after the name, counted from the state, in clock ticks.
_USED = 11  # in user mode; the next one: in system mode
_STARTED = 19  # from boot to the start
_PARENT = 1  # number of the parent process


@dataclass(frozen=True)
class Process:
    host: str
    realm: str  # boot and process namespace: numbers mean the same only within one of these
    pid: int
    started: str

    @staticmethod
    def this() -> Process:
        return Process.of(os.getpid())

    @staticmethod
    def of(pid: int) -> Process:
        """Identify the process that has a number now."""
        return Process(socket.gethostname(), _realm(), pid, _stat(pid)[_STARTED])

    @staticmethod
    def load(fields: dict[str, Any]) -> Process:
        return Process(**fields)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def visible(self) -> bool:
        """Return whether this machine can know anything about the process."""
        return bool(self.realm) and self.realm == _realm()

    def alive(self) -> bool:
        """Return whether a visible process lives. One that has ended and was not yet collected by its parent counts
        as dead."""
        stat = _stat(self.pid)
        return stat[_STARTED] == self.started and stat[0] not in ("Z", "X")

    def parent(self) -> int:
        """Return the number of a visible process's parent; 0 if it has none or has ended."""
        return int(_stat(self.pid)[_PARENT] or 0)

    def effort_s(self) -> float:
        """Return the seconds that a visible process has computed in all of its threads, plus those its main thread
        waited for a busy core. They grow for one that works, not for one that waits."""
        stat = _stat(self.pid)
        if stat[_STARTED] != self.started or not stat[_USED]:  # it is gone, or this is not Linux
            return 0.0
        used = (int(stat[_USED]) + int(stat[_USED + 1])) / os.sysconf("SC_CLK_TCK")
        try:
            held_up = int((_PROC / str(self.pid) / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, IndexError):  # not every kernel counts it
            held_up = 0.0
        return used + held_up

    def kill(self) -> None:
        """Kill the process if it is visible and alive, even one that is stopped and would not react to another
        signal."""
        if self.visible() and self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """Let this process have `count` more files open, as far as the system allows it: shells often say 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def usable_cpus() -> float:
    """Return how many processors this process may use, by its affinity and its container's quota."""
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cpus, int(quota) / int(period))
    except (OSError, ValueError):  # there is none, or "max"
        return cpus


def _realm() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:  # not Linux: then processes cannot be identified
        return ""


def _stat(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [""] * (_STARTED + 1)
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
