"""Write the metrics of a run to experiment trackers: TensorBoard, Weights & Biases, SwanLab, MLflow.

Each tracker has a thread that follows `metrics.jsonl`. So a tracker and the file never disagree, and no step waits for
a network. A tracker that fails is reported once and left out; the run goes on.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config.run_config import LogSection, RunConfig, TrackerSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import parse_row, read_json_mapping, replace_file

IDS = "trackers.json"  # in the run's folder: name of a tracker -> id of the run there
END_SECONDS, ERROR_SECONDS = 60.0, 10.0  # that a run waits for its trackers at the end, and after an error
_ID = re.compile(r"[\w-]{1,64}")
log = logging.getLogger("tessera")


@dataclass(frozen=True)
class TrackedRun:
    """Describe a run to a tracker."""

    folder: Path
    name: str
    settings: Mapping[str, Any]  # the recipe, with dotted keys
    id: str | None  # that the tracker gave this run before; None: it is new there
    step: int  # steps done already


class Tracker(ABC):
    """Write to one tracker. All methods are called from one thread, which is not the main one."""

    package = ""  # that has to be installed
    pip = ""  # its name for pip install

    def __init__(self, section: TrackerSection) -> None:
        self.section = section

    @abstractmethod
    def start(self, run: TrackedRun) -> tuple[str, str]:
        """Begin, or go on with, the run; return its id and where it can be seen."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def finish(self, failed: bool) -> None: ...


class TensorBoardTracker(Tracker):
    package, pip = "tensorboard", "tensorboard"

    def start(self, run: TrackedRun) -> tuple[str, str]:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        # Events of later steps, which will happen again, are hidden.
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.id and run.step else None)
        return "tensorboard", f"tensorboard --logdir {folder}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Write to Weights & Biases. Its counter of steps only grows, but a resumed run repeats steps. So `step` is a
    metric that all others are drawn over."""

    package, pip = "wandb", "wandb"

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
    package, pip = "swanlab", "swanlab"

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


class MlflowTracker(Tracker):
    """Write to MLflow: to the server of `uri` or of MLFLOW_TRACKING_URI, otherwise to files in the run's folder."""

    package, pip = "mlflow", "mlflow"

    def start(self, run: TrackedRun) -> tuple[str, str]:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        local = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        uri = None if self.section.mode == "offline" else self.section.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or local)
        project = self.section.project or "tessera"
        if run.id is None:
            existing = self._client.get_experiment_by_name(project)
            experiment = self._client.create_experiment(project) if existing is None else existing.experiment_id
            tags = dict.fromkeys(self.section.tags, "true")
            self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            settings = [Param(key, str(value)[:500]) for key, value in run.settings.items()]
            for at in range(0, len(settings), 100):  # the most that one request may have
                self._client.log_batch(self._id, params=settings[at : at + 100])
        else:
            self._id = run.id
            self._client.set_terminated(self._id, "RUNNING")
        return self._id, uri or f"mlflow ui --backend-store-uri {local}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(key, value, now, step) for key, value in values.items()])

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "swanlab": SwanlabTracker,
    "mlflow": MlflowTracker,
}


def check_trackers(section: LogSection) -> None:
    """Raise if the package of a tracker is missing, before anything is built."""
    for number, tracker in enumerate(section.tracker_sections):
        kind = TRACKERS[tracker.name]
        if importlib.util.find_spec(kind.package) is None:
            raise TesseraError(
                f"the tracker {tracker.name} needs the package {kind.package}, which is not installed",
                where=f"log.trackers.{number}",
                fix=f"pip install {kind.pip}, or leave the tracker out",
                code="environment.tracker-not-installed",
            )


class Trackers(Callback):
    """Have every tracker of a recipe follow the run. The main rank writes."""

    def __init__(
        self, section: LogSection, make: Callable[[TrackerSection], Tracker] = lambda one: TRACKERS[one.name](one)
    ) -> None:
        self._section, self._make = section, make
        self._threads: list[_Follower] = []

    def on_start(self, trainer: TrainerHandle) -> None:
        if not trainer.world.is_main:
            return
        config, folder = trainer.config, trainer.config.folder
        ids, settings = known_ids(folder), flat_settings(config)
        for section in self._section.tracker_sections:
            run = TrackedRun(folder, section.run_name or config.name, settings, ids.get(section.name), trainer.step)
            self._threads.append(_Follower(section.name, self._make(section), run))

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        for thread in self._threads:
            thread.look()

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        for thread in self._threads:
            thread.look()

    def on_rewind(self, trainer: TrainerHandle) -> None:
        """Continue from the shortened file; the steps are written again."""
        for thread in self._threads:
            thread.rewind()

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._end(failed=True, seconds=ERROR_SECONDS)

    def on_end(self, trainer: TrainerHandle) -> None:
        self._end(failed=False, seconds=END_SECONDS)

    def _end(self, failed: bool, seconds: float) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.end(failed)
        for thread in threads:
            thread.join(seconds)
            if thread.is_alive():
                log.warning("%s still writes after %g s: the run ends without it", thread.name, seconds)


class _Follower(threading.Thread):
    """Copy new rows of `metrics.jsonl` to a tracker, from a run that began or goes on."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        super().__init__(name=name, daemon=True)  # a tracker that hangs does not keep the process
        self._tracker, self._run = tracker, run
        self._path = run.folder / "metrics.jsonl"
        # What was written before the run went on is there already, unless the tracker is new to the run.
        self._at = self._size() if run.id is not None else 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending: bool | None = None  # whether the run failed; None: it goes on
        self.start()

    def look(self) -> None:
        self._wake.set()

    def rewind(self) -> None:
        with self._lock:
            self._at = self._size()

    def end(self, failed: bool) -> None:
        self._ending = failed
        self._wake.set()

    def run(self) -> None:
        try:
            id, address = self._tracker.start(self._run)
            if id != self._run.id:
                keep_id(self._run.folder, self.name, id)
            log.info("%s: %s", self.name, address)
            while self._ending is None:
                self._wake.wait()
                self._wake.clear()
                self._copy()
            self._copy()
            self._tracker.finish(self._ending)
        except BaseException as error:  # some packages leave by SystemExit
            log.warning("%s is left out from here on: %s: %s", self.name, type(error).__name__, first_line(error))

    def _copy(self) -> None:
        with self._lock:
            at, size = self._at, self._size()
            if size <= at:
                return
            with self._path.open("rb") as file:
                file.seek(at)
                text = file.read(size - at)
            text = text[: text.rfind(b"\n") + 1]  # the last line may be half written
            self._at = at + len(text)
        for line in text.splitlines():
            row = parse_row(line)
            step = None if row is None else row.get("step")
            if row is None or not isinstance(step, int):
                continue
            values = {
                key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)
            }
            self._tracker.write(step, values)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


def known_ids(folder: Path) -> dict[str, str]:
    """Return the ids that trackers gave a run. Other content of the file is ignored."""
    try:
        ids = read_json_mapping(folder / IDS) if (folder / IDS).exists() else {}
    except TesseraError:
        return {}
    return {name: id for name, id in ids.items() if isinstance(id, str) and _ID.fullmatch(id)}


_WRITING = threading.Lock()  # several trackers start at once


def keep_id(folder: Path, name: str, id: str) -> None:
    with _WRITING:
        replace_file(folder / IDS, (json.dumps({**known_ids(folder), name: id}, indent=1) + "\n").encode())


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return a recipe as one level of dotted keys, without empty values."""
    settings: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value not in (None, [], ""):
            settings[prefix] = value if isinstance(value, (bool, int, float, str)) else json.dumps(value)

    add("", config.model_dump(mode="json"))
    return settings
