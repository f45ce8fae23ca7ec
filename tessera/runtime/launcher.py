"""End a rank whose launcher is gone: nobody would stop it, and it would keep the run folder from a restarted job.

The launcher is the process that started the ranks of this machine: `tessera train --nproc`, or an elastic agent such as
torchrun. Ranks that something else started (Slurm, MPI, a shell) have none. A shell between launcher and rank, and
whatever started the launcher itself, may end as they like.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NoReturn

from tessera.runtime import log
from tessera.runtime.process import Process

EXIT_CODE = 3  # as of every rank that ends because of something outside of it
_LAUNCHER = "TESSERA_LAUNCHER"  # what our own launcher leaves in the environment: itself
# What an elastic agent sets for one rank. A process that began with the same values belongs to that rank.
_OF_A_RANK = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK", "LOCAL_RANK")
_INTERVAL_S = 0.5


def announce_launcher() -> None:
    """Let the ranks that this process starts know their launcher, also those that begin after its death."""
    os.environ[_LAUNCHER] = json.dumps(Process.this().dump())


def find_launcher(environment: MutableMapping[str, str]) -> Process | None:
    """Return the launcher of this rank, dead or alive; None where there is none, or it cannot be observed.

    Our own launcher's note is taken out of the environment: processes that a rank starts are no ranks.
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
        self.end_rank()

    def end_rank(self) -> NoReturn:
        text = (
            f"the launcher (process {self.launcher.pid}) is gone: this rank ends without a save, and the same command "
            "or `tessera resume` goes on from the newest checkpoint"
        )
        log.to_file(logging.ERROR, text)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(OSError):  # whoever read this may be gone as well
                os.write(2, f"error: {text}\n".encode())
        os._exit(EXIT_CODE)


def watch_launcher() -> None:
    """End this process soon after its launcher has ended, if it has one."""
    if not _watches():
        launcher = find_launcher(os.environ)
        if launcher is not None:
            _LauncherWatch(launcher).start()


def outlive_launcher() -> None:
    """Let this process end by itself: it was asked to stop and saves, and a launcher may not wait for that."""
    for watch in _watches():
        watch.ended.set()


@contextlib.contextmanager
def launcher_blamed() -> Iterator[None]:
    """Watch the launcher during the block, and report its end instead of an error that follows from it."""
    watch_launcher()
    try:
        yield
    except BaseException:
        end_without_launcher()
        raise


def end_without_launcher() -> None:
    """End this process now if its launcher is gone: whatever else is wrong follows from that."""
    for watch in _watches():
        if not watch.ended.is_set() and not watch.launcher.alive():
            watch.end_rank()


def _watches() -> list[_LauncherWatch]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _LauncherWatch)]
