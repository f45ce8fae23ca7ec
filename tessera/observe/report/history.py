"""Record the sessions of a run in `history.jsonl`: a row for each start, each end, and about every minute.

A killed run writes no row for its end. Whether a run without that row still runs is concluded from its process and the
time of its last row.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.runtime.files import JsonLines, read_jsonl, step_of
from tessera.runtime.process import Process
from tessera.version import __version__, package_versions

HISTORY = "history.jsonl"
START, ALIVE, END = "start", "alive", "end"
SILENT = timedelta(minutes=5)  # without a row for this long, a run on another machine is "silent"
_PACKAGES = ("torch", "transformers", "diffusers", "torch-npu")

log = logging.getLogger("tessera")


class History:
    """Append rows to `history.jsonl` of a run. If a write fails, the error is logged."""

    def __init__(self, folder: Path) -> None:
        self._record = JsonLines(folder / HISTORY)

    def started(self, step: int, device: str, ranks: int = 1) -> None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        self._write(
            START,
            step,
            process=Process.this().dump(),
            device=device,
            ranks=ranks,
            machines=max(1, ranks // max(1, here)),
            versions={"tessera": __version__, "python": platform.python_version(), **package_versions(_PACKAGES)},
        )

    def alive(self, step: int) -> None:
        self._write(ALIVE, step)

    def ended(self, step: int, how: str, reason: str | None = None) -> None:
        """Write the last row of a session. `how`: finished, stopped or failed."""
        self._write(END, step, how=how, **({"reason": reason} if reason else {}))
        self._record.close()

    def _write(self, kind: str, step: int, **more: Any) -> None:
        try:
            self._record.write({"kind": kind, "step": step, "time": _now().isoformat(timespec="seconds"), **more})
        except (OSError, TesseraError) as error:
            log.warning("the history of the run was not written: %s", error)


@dataclass
class RunSession:
    """Describe one session of a run: from a start to its end, or to the last row before a kill."""

    began: datetime
    last: datetime  # time of the session's last row
    first_step: int
    last_step: int
    device: str = ""
    ranks: int = 1
    machines: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    how: str = ""  # finished, stopped, failed, running, killed or silent
    reason: str = ""

    @property
    def seconds(self) -> float:
        until = _now() if self.how == "running" else self.last
        return max(0.0, (until - self.began).total_seconds())

    @property
    def hardware(self) -> str:
        many = f"{self.ranks} x " if self.ranks > 1 else ""
        return f"{many}{self.device}" + (f" on {self.machines} machines" if self.machines > 1 else "")


def read_sessions(folder: Path) -> list[RunSession]:
    """Return the sessions of a run in order. Damaged rows are skipped."""
    sessions: list[RunSession] = []
    owner: dict[str, Any] = {}
    for row in read_jsonl(folder / HISTORY):
        step, time = step_of(row), _time(row.get("time"))
        if step is None or time is None:
            continue
        if row.get("kind") == START:
            if sessions and not sessions[-1].how:
                sessions[-1].how = "killed"
            owner = row["process"] if isinstance(row.get("process"), dict) else {}
            sessions.append(_session(row, time, step))
        elif sessions:
            sessions[-1].last, sessions[-1].last_step = time, step
            if row.get("kind") == END:
                sessions[-1].how, sessions[-1].reason = str(row.get("how", "")), str(row.get("reason", ""))
    if sessions and not sessions[-1].how:
        sessions[-1].how = _still(owner, sessions[-1].last)
    return sessions


def _session(row: dict[str, Any], time: datetime, step: int) -> RunSession:
    versions = row.get("versions")
    return RunSession(
        began=time,
        last=time,
        first_step=step,
        last_step=step,
        device=str(row.get("device", "")),
        ranks=_count(row.get("ranks")),
        machines=_count(row.get("machines")),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
    )


def _still(owner: dict[str, Any], last: datetime) -> str:
    """Return the state of a session that recorded no end: running, killed, or silent on another machine."""
    try:
        process = Process.load(owner)
    except TypeError:
        return "silent"
    if process.visible():
        return "running" if process.alive() else "killed"
    return "running" if _now() - last < SILENT else "silent"


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _time(text: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def _now() -> datetime:
    return datetime.now(UTC)
