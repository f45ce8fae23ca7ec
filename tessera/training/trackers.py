"""Write the metrics of a run to experiment trackers: TensorBoard, Weights & Biases, SwanLab.

Trackers get the rows of `metrics.jsonl`, so that a tracker and the file never disagree. Each tracker has a thread, so
that a tracker that hangs does not delay the run. A tracker that fails is reported once and no longer used.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config.run_config import LogSection, RunConfig, TrackerSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import parse_row, read_json_mapping, replace_file

IDS = "trackers.json"  # file in the run folder with the id of the run in each tracker, by name of the tracker
FINISH_S = 60.0  # at its end, a run waits at most this long for all of its trackers
_ID = re.compile(r"[\w-]{1,64}")
log = logging.getLogger("tessera")


@dataclass(frozen=True)
class TrackedRun:
    """Describe a run to a tracker."""

    folder: Path
    name: str
    settings: Mapping[str, Any]  # all keys of the recipe, such as "optim.lr"
    id: str | None  # id of the run in the tracker; None: the tracker does not have the run yet
    step: int  # number of finished steps


class Tracker(ABC):
    """Write the rows of a run to one tracker, such as TensorBoard. Each subclass supports a tracker."""

    def __init__(self, section: TrackerSection) -> None:
        self.section = section

    @abstractmethod
    def start(self, run: TrackedRun) -> tuple[str, str]:
        """Begin or continue a run in the tracker. Return its id, and an address or command to see it."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def finish(self, failed: bool) -> None: ...


class TensorBoardTracker(Tracker):
    def start(self, run: TrackedRun) -> tuple[str, str]:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        # `purge_step` hides events of later steps, which will be trained again.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.id and run.step else None)
        return "tensorboard", f"tensorboard --logdir {folder}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Write to Weights & Biases. Its step counter cannot go back, but a resumed run repeats steps. So `step` is logged
    as a metric, and is the x axis of all other metrics."""

    def start(self, run: TrackedRun) -> tuple[str, str]:
        import wandb

        self._run = wandb.init(
            project=self.section.project or "tessera",
            entity=self.section.workspace,
            name=run.name,
            id=run.id or secrets.token_hex(8),
            resume="allow",
            mode=self.section.mode,
            tags=self.section.tags or None,
            config=dict(run.settings),
            dir=str(run.folder),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        address = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)
        return str(self._run.id), address

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class SwanlabTracker(Tracker):
    def start(self, run: TrackedRun) -> tuple[str, str]:
        import swanlab

        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        id = run.id or secrets.token_hex(10)
        self._run = swanlab.init(
            project=self.section.project or "tessera",
            workspace=self.section.workspace,
            name=run.name,
            id=id,
            resume="allow",
            mode=self.section.mode,
            tags=self.section.tags or None,
            config=dict(run.settings),
            log_dir=str(folder),
        )
        return id, f"swanlab sync {folder}/*" if self.section.mode == "offline" else f"swanlab project of {run.name}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success", error="the run failed" if failed else None)


TRACKERS: Mapping[str, type[Tracker]] = {  # package of the tracker -> class
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanlabTracker,
}


def check_trackers(section: LogSection) -> None:
    """Raise if the package of a tracker is missing, before anything is built."""
    for number, tracker in enumerate(section.tracker_sections):
        if importlib.util.find_spec(tracker.name) is None:
            raise TesseraError(
                f"the tracker {tracker.name} needs the package {tracker.name}, which is not installed",
                where=f"log.trackers.{number}",
                fix=f"pip install {tracker.name}, or leave the tracker out",
                code="environment.tracker-not-installed",
            )


class Trackers(Callback):
    """Copy new rows of `metrics.jsonl` to every tracker of a recipe. The main rank writes."""

    def __init__(
        self,
        section: LogSection,
        make: Callable[[TrackerSection], Tracker] = lambda section: TRACKERS[section.name](section),
        finish_s: float = FINISH_S,
    ) -> None:
        self._sections, self._make, self._finish_s = section.tracker_sections, make, finish_s
        self._writers: list[_Writer] = []

    def on_start(self, trainer: TrainerHandle) -> None:
        if not trainer.world.is_main:
            return
        config, folder = trainer.config, trainer.config.folder
        ids, settings = read_ids(folder), flat_settings(config)
        for section in self._sections:
            run = TrackedRun(folder, section.run_name or config.name, settings, ids.get(section.name), trainer.step)
            tracker = self._make(section)
            # Some packages install signal handlers here, and only the main thread may do so.
            with _reported(section.name):
                id, address = tracker.start(run)
                log.info("%s: %s", section.name, address)
                if run.id is None:
                    ids[section.name] = id
                    replace_file(folder / IDS, (json.dumps(ids, indent=1) + "\n").encode())
                self._writers.append(_Writer(section.name, tracker, folder, from_start=run.id is None))

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self._wake()

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        self._wake()

    def _wake(self) -> None:
        for writer in self._writers:
            writer.wake()

    def on_rewind(self, trainer: TrainerHandle) -> None:
        for writer in self._writers:
            writer.rewind()

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._end(failed=True)

    def on_end(self, trainer: TrainerHandle) -> None:
        self._end(failed=False)

    def _end(self, failed: bool) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.end(failed)
        deadline = time.monotonic() + self._finish_s
        for writer in writers:
            writer.join(deadline - time.monotonic())


class _Writer:
    """Send rows of `metrics.jsonl` to one tracker from a thread, so that a tracker that hangs does not delay the run.

    The file is the queue: a slow tracker gets all rows, only later.
    """

    def __init__(self, name: str, tracker: Tracker, folder: Path, *, from_start: bool) -> None:
        self._name, self._tracker, self._path = name, tracker, folder / "metrics.jsonl"
        self._position = 0 if from_start else self._size()  # number of bytes of the file that were read
        self._lock = threading.Lock()  # guards `_position`
        self._news, self._ending, self._failed = threading.Event(), False, False
        self._thread = threading.Thread(target=self._write, name=f"tessera-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Send the rows that were added to the file."""
        self._news.set()

    def rewind(self) -> None:
        """Continue at the end of the truncated file. Repeated steps are sent again."""
        with self._lock:
            self._position = min(self._position, self._size())

    def end(self, failed: bool) -> None:
        """Send the last rows, then finish the run in the tracker."""
        self._failed, self._ending = failed, True
        self._news.set()

    def join(self, seconds: float) -> None:
        """Wait until the tracker has finished, for `seconds` at most."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            log.warning("%s does not respond, and may lack the last rows; %s has all of them", self._name, self._path)

    def _write(self) -> None:
        with _reported(self._name):
            ending = False
            while not ending:
                self._news.wait()
                self._news.clear()
                ending = self._ending  # read this flag before the rows, so that no row is missed
                for step, values in self._rows():
                    self._tracker.write(step, values)
            self._tracker.finish(self._failed)

    def _rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) of the rows that were added to the file since the last call."""
        with self._lock:
            size = self._size()
            if size <= self._position:
                return []
            with self._path.open("rb") as file:
                file.seek(self._position)
                rows = [parse_row(line) for line in file.read(size - self._position).splitlines()]
            self._position = size
        return [
            (row["step"], {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)})
            for row in rows
            if row is not None and isinstance(row.get("step"), int)
        ]

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Log an error of a tracker. The run goes on without the tracker."""
    try:
        yield
    except (Exception, SystemExit) as error:  # some packages raise SystemExit
        log.warning("%s gets no further metrics: %s: %s", name, type(error).__name__, first_line(error))


def read_ids(folder: Path) -> dict[str, str]:
    """Return the ids of a run in trackers, from `trackers.json`. Invalid content is ignored."""
    try:
        ids = read_json_mapping(folder / IDS) if (folder / IDS).exists() else {}
    except TesseraError:
        return {}
    return {name: id for name, id in ids.items() if isinstance(id, str) and _ID.fullmatch(id)}


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return a recipe as a flat mapping with dotted keys, without empty values."""
    settings: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value not in (None, [], ""):
            settings[prefix] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value)

    add("", config.model_dump(mode="json"))
    return settings
