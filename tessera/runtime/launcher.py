"""End a rank after its launcher has ended. Otherwise the rank would go on and lock the run folder of a restarted job.

The launcher is the process that started the ranks of this machine: `tessera train --nproc`, or torchrun. Ranks that
Slurm, MPI or a shell started have no launcher. A shell between launcher and rank may end without effect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NoReturn

from tessera.runtime import log
from tessera.runtime.process import Process

EXIT_CODE = 3  # exit code of every rank that ends because another process has ended
_LAUNCHER = "TESSERA_LAUNCHER"  # variable in which our launcher stores its process id and start time
# Variables that torchrun sets for each rank. A parent process with the same values belongs to the rank, too.
_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK", "LOCAL_RANK")
_INTERVAL_S = 0.5


def read_msrun(environment: MutableMapping[str, str]) -> None:
    """Set the variables of torchrun for a rank that msrun started, unless they are set.

    Torch's store uses MASTER_PORT if it is set to another port than MindSpore's scheduler, otherwise the scheduler's
    port + 1.
    """
    rank, size = environment.get("RANK_ID"), environment.get("RANK_SIZE")
    port = environment.get("MS_SCHED_PORT", "")
    if environment.get("MS_ROLE") != "MS_WORKER" or not rank or not size or not port.isdecimal():
        return
    environment.setdefault("RANK", rank)
    environment.setdefault("WORLD_SIZE", size)
    environment.setdefault("LOCAL_RANK", environment.get("DEVICE_ID", "0"))
    environment.setdefault("MASTER_ADDR", environment.get("MS_SCHED_HOST", "127.0.0.1"))
    if environment.get("MASTER_PORT", port) == port:
        environment["MASTER_PORT"] = str(int(port) + 1)


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Return whether msrun started this process as its scheduler, with the same command as the ranks."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def announce_launcher() -> None:
    """Store this process in the environment as the launcher of the ranks that it starts."""
    os.environ[_LAUNCHER] = json.dumps(Process.this().dump())


def find_launcher(environment: MutableMapping[str, str]) -> Process | None:
    """Return the launcher of this rank, running or ended; None if there is none, or if it is not visible.

    The variable is removed from the environment, so that child processes of a rank do not inherit it.
    """
    note = environment.pop(_LAUNCHER, None)
    if note is not None:
        launcher = Process.load(json.loads(note))
        return launcher if launcher.visible() else None
    if _OF_A_RANK[0] not in environment:
        return None
    values = [environment.get(name) for name in _OF_A_RANK]
    pid = os.getppid()
    while pid > 0:
        ancestor = Process.of(pid)
        try:
            text = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
        began_with = dict(line.partition("=")[::2] for line in text.split("\0"))
        if [began_with.get(name) for name in _OF_A_RANK] != values:
            return ancestor
        pid = ancestor.parent()
    return None


class _LauncherWatch(threading.Thread):
    def __init__(self, launcher: Process) -> None:
        super().__init__(name="tessera-launcher-watch", daemon=True)
        self.launcher = launcher
        self.ended = threading.Event()

    def run(self) -> None:
        while self.launcher.alive():
            if self.ended.wait(_INTERVAL_S):
                return
        if not self.ended.is_set():  # check again: `outlive_launcher` may have set it just before the launcher ended
            self.end_rank()

    def end_rank(self) -> NoReturn:
        text = (
            f"the launcher (process {self.launcher.pid}) has ended: this rank ends without saving; the same command or "
            "`tessera resume` continues from the newest checkpoint"
        )
        log.to_file(logging.ERROR, text)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(OSError):  # the process that reads stderr may have ended as well
                os.write(2, f"error: {text}\n".encode())
        os._exit(EXIT_CODE)


def watch_launcher() -> None:
    """Start a thread that ends this process soon after its launcher has ended."""
    if not _watches():
        launcher = find_launcher(os.environ)
        if launcher is not None:
            _LauncherWatch(launcher).start()


def outlive_launcher() -> None:
    """Stop watching the launcher: this process is saving before it ends, and the launcher may not wait for it."""
    for watch in _watches():
        watch.ended.set()


@contextlib.contextmanager
def launcher_blamed() -> Iterator[None]:
    """Watch the launcher. If the `with` block raises after the launcher has ended, report the end, not the error."""
    watch_launcher()
    try:
        yield
    except BaseException:
        end_without_launcher()
        raise


def end_without_launcher() -> None:
    """End this process now if its launcher has ended."""
    for watch in _watches():
        if not watch.ended.is_set() and not watch.launcher.alive():
            watch.end_rank()


def _watches() -> list[_LauncherWatch]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _LauncherWatch)]
