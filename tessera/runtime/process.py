"""Identify processes by process id and start time, since ids are reused, and count usable processors."""

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
# Indices of fields in /proc/PID/stat, counted from the state, which follows the name. Times are in clock ticks.
_USED = 11  # CPU time in user mode; the next field: in system mode
_STARTED = 19  # start time after boot
_PARENT = 1  # index of the parent's process id


@dataclass(frozen=True)
class Process:
    """Identify a process, also after it has ended."""

    host: str
    realm: str  # boot id and process namespace: process ids are unique within both
    pid: int
    started: str

    @staticmethod
    def this() -> Process:
        return Process.of(os.getpid())

    @staticmethod
    def of(pid: int) -> Process:
        """Return the running process with this process id."""
        return Process(socket.gethostname(), _realm(), pid, _stat(pid)[_STARTED])

    @staticmethod
    def load(fields: dict[str, Any]) -> Process:
        return Process(**fields)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def visible(self) -> bool:
        """Return whether the process is in the process namespace of this one."""
        return bool(self.realm) and self.realm == _realm()

    def alive(self) -> bool:
        """Return whether a visible process is running. A zombie is not."""
        stat = _stat(self.pid)
        return stat[_STARTED] == self.started and stat[0] not in ("Z", "X")

    def parent(self) -> int:
        """Return the process id of the parent of a visible process; 0 if there is none."""
        return int(_stat(self.pid)[_PARENT] or 0)

    def effort_s(self) -> float:
        """Return the CPU seconds of a visible process, plus the seconds that its main thread waited for a busy core.

        The sum grows while a process computes, and stays constant while it waits.
        """
        stat = _stat(self.pid)
        if stat[_STARTED] != self.started or not stat[_USED]:  # the process has ended, or this is not Linux
            return 0.0
        used = (int(stat[_USED]) + int(stat[_USED + 1])) / os.sysconf("SC_CLK_TCK")
        try:
            held_up = int((_PROC / str(self.pid) / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, IndexError):  # missing in some kernels
            held_up = 0.0
        return used + held_up

    def kill(self) -> None:
        """Send SIGKILL to a visible, running process. It also ends a stopped process."""
        if self.visible() and self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """Raise the limit of open files by `count` during the `with` block, up to the hard limit. Shells often set 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def usable_cpus() -> float:
    """Return the number of processors that this process may use, by its CPU affinity and the quota of its container."""
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cpus, int(quota) / int(period))
    except (OSError, ValueError):  # no quota: the file is missing, or its first word is `max`
        return cpus


def _realm() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:  # only Linux has these files
        return ""


def _stat(pid: int) -> list[str]:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [""] * (_STARTED + 1)
    return text[text.rindex(")") + 2 :].split()  # the process name may contain spaces and parentheses
