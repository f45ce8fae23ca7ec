"""Trackers follow a run, go on with it, and never end it; callbacks can be named in a recipe."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.config.run_config import RunConfig, TrackerSection, load_config
from tessera.config.trust import named_code
from tessera.core.callback import Callback
from tessera.runtime.files import read_metrics
from tessera.training import trackers
from tessera.training.callbacks import named_callbacks
from tessera.training.run import resume, train
from tessera.training.trackers import IDS, TrackedRun, Tracker, Trackers, check_trackers, flat_settings, read_ids
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set

RECIPE = {"model": {"family": "qwen3", "preset": "quickstart-moe"}, "train": {"steps": 4}}


def recipe(out: Path, *names: Any) -> RunConfig:
    return load_config({**RECIPE, "out": str(out), "log": {"trackers": list(names)}})


class Kept(Tracker):
    """Keeps what it is given, as a tracker's server would."""

    def __init__(self, section: TrackerSection) -> None:
        super().__init__(section)
        self.runs: list[TrackedRun] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.ended: list[bool] = []

    def start(self, run: TrackedRun) -> tuple[str, str]:
        self.runs.append(run)
        return run.id or "id-1", "here"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def finish(self, failed: bool) -> None:
        self.ended.append(failed)


def trainer_of(config: RunConfig, step: int = 0) -> Any:
    config.folder.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(config=config, step=step, world=SimpleNamespace(is_main=True))


def add_rows(config: RunConfig, *steps: int) -> None:
    with (config.folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "train", "step": step, "loss": 1 / step}) + "\n" for step in steps)


def follow(config: RunConfig, make: Callable[[TrackerSection], Tracker], step: int = 0) -> tuple[Trackers, Any]:
    callback, trainer = Trackers(config.log, make), trainer_of(config, step)
    callback.on_start(trainer)
    return callback, trainer


def test_a_tracker_gets_every_row_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path) -> None:
    config = recipe(tmp_path, {"name": "wandb", "run_name": "mine"})
    tracker = Kept(config.log.tracker_sections[0])
    callback, trainer = follow(config, lambda settings: tracker)
    add_rows(config, 1, 2)
    callback.on_step_end(trainer, None)  # type: ignore[arg-type]
    add_rows(config, 3)
    callback.on_end(trainer)
    assert [(step, round(values["loss"], 3)) for step, values in tracker.rows] == [(1, 1.0), (2, 0.5), (3, 0.333)]
    assert tracker.ended == [False]
    assert (tracker.runs[0].id, tracker.runs[0].name) == (None, "mine")
    assert tracker.runs[0].settings["train.steps"] == 4
    assert read_ids(config.folder) == {"wandb": "id-1"}
    callback, trainer = follow(config, lambda settings: tracker, step=3)
    add_rows(config, 4)
    callback.on_error(trainer, RuntimeError())
    assert tracker.runs[1].id == "id-1"
    assert [step for step, _ in tracker.rows] == [1, 2, 3, 4]
    assert tracker.ended == [False, True]


def test_a_tracker_that_is_new_to_a_run_gets_what_was_before(tmp_path: Path) -> None:
    config = recipe(tmp_path, "tensorboard")
    tracker = Kept(config.log.tracker_sections[0])
    trainer_of(config)
    add_rows(config, 1, 2)
    callback, trainer = follow(config, lambda settings: tracker, step=2)
    callback.on_end(trainer)
    assert [step for step, _ in tracker.rows] == [1, 2]


def test_steps_that_happen_again_after_a_rewind_are_written_again(tmp_path: Path) -> None:
    config = recipe(tmp_path, "wandb")
    tracker = Kept(config.log.tracker_sections[0])
    callback, trainer = follow(config, lambda settings: tracker)
    add_rows(config, 1, 2, 3)
    callback.on_end(trainer)
    callback, trainer = follow(config, lambda settings: tracker, step=3)
    (config.folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 1.0}) + "\n")
    callback.on_rewind(trainer)
    add_rows(config, 2)
    callback.on_end(trainer)
    assert [step for step, _ in tracker.rows] == [1, 2, 3, 2]


@pytest.mark.parametrize("at", ["start", "write", "finish"])
def test_a_tracker_that_raises_is_reported_once_and_left_out(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Kept):
        pass

    def fail(self: Any, *arguments: Any) -> Any:
        raise SystemExit("no such key\nmore")

    setattr(Broken, at, fail)
    config = recipe(tmp_path, "wandb", "swanlab")
    trackers: dict[str, Kept] = {}

    def make(section: TrackerSection) -> Tracker:
        trackers[section.name] = (Broken if section.name == "wandb" else Kept)(section)
        return trackers[section.name]

    with caplog.at_level(logging.WARNING, "tessera"):
        callback, trainer = follow(config, make)
        add_rows(config, 1)
        for _ in range(3):
            callback.on_step_end(trainer, None)  # type: ignore[arg-type]
        callback.on_end(trainer)
    assert [step for step, _ in trackers["swanlab"].rows] == [1]
    told = [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()]
    assert told == ["wandb gets no further metrics: SystemExit: no such key"]


class Hanging(Kept):
    """Never answers, as a tracker without a network."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()


def test_a_run_with_a_tracker_that_hangs_goes_on_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chat_set(tmp_path / "data")
    settings = {"train.steps": 2, "data.eval": [], "data.workers": 0, "guard.coverage": "off"}
    callback = Trackers(recipe(tmp_path, "wandb").log, Hanging, finish_s=0.0)
    run = train(chat_recipe(tmp_path / "data", tmp_path), settings, callbacks=[callback])
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert "wandb does not respond" in capsys.readouterr().err


def test_a_missing_package_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with raises("environment.tracker-not-installed") as caught:
        check_trackers(recipe(tmp_path, "swanlab").log)
    assert "pip install swanlab" in str(caught.value)


@pytest.mark.parametrize(
    ("tracker", "error"),
    [
        ("wnadb", "recipe.wrong-value"),
        ({"name": "tensorboard", "project": "p"}, "recipe.wrong-value"),
        ("mlflow", "recipe.wrong-value"),
        ({"name": "wandb", "mode": "maybe"}, "recipe.several-problems"),
    ],
)
def test_wrong_trackers_are_told(tracker: Any, error: str, tmp_path: Path) -> None:
    with raises(error):
        recipe(tmp_path, tracker)


def test_a_tracker_named_twice_is_told(tmp_path: Path) -> None:
    with raises("recipe.wrong-value"):
        recipe(tmp_path, "wandb", {"name": "wandb"})


def test_ids_of_a_strange_file_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / IDS).write_text('{"wandb": "../../x", "tensorboard": 3, "swanlab": "abc-1"}')
    assert read_ids(tmp_path) == {"swanlab": "abc-1"}
    (tmp_path / IDS).write_text("nonsense")
    assert read_ids(tmp_path) == {}


def test_settings_are_flat_and_leave_out_what_says_nothing(tmp_path: Path) -> None:
    settings = flat_settings(recipe(tmp_path, "wandb"))
    assert settings["optim.lr"] == 1e-5
    assert settings["optim.betas"] == "[0.9, 0.95]"
    assert "model.lora" not in settings


# ---------------------------------------------------------------------------------------------- the packages themselves


def installed(name: str) -> Any:
    return pytest.param(
        name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    )


def read_tensorboard(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def stored_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in blocks of 32 KiB, the form in which wandb and swanlab keep runs."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of one, or its last part
            yield record
            record = b""


def read_wandb(folder: Path) -> dict[int, float]:
    from wandb.proto import wandb_internal_pb2

    values: dict[int, float] = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in stored_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "loss" in items:
                values[int(json.loads(items["step"]))] = float(items["loss"])
    return values


def read_swanlab(folder: Path) -> dict[int, float]:
    """Its records have no public reader: a loss is there if its eight bytes are, beside its name."""
    records = [one for path in (folder / "swanlab").rglob("*.swanlab") for one in stored_records(path)]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    losses = {row["step"]: row["loss"] for row in rows}
    return {
        step: loss
        for step, loss in losses.items()
        if any(b"loss" in one and struct.pack("<d", loss) in one for one in records)
    }


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "swanlab": read_swanlab}


@pytest.mark.slow
@pytest.mark.parametrize("name", [installed(name) for name in READERS])
def test_what_a_tracker_keeps_offline_is_read_back(name: str, tmp_path: Path) -> None:
    write_chat_set(tmp_path / "data")
    settings = {"train.steps": 4, "data.eval": [], "checkpoint.every": 2, "log.every": 1}
    settings["log.trackers"] = [name if name == "tensorboard" else {"name": name, "mode": "offline"}]
    run = train(chat_recipe(tmp_path / "data", tmp_path), settings, callbacks=[StopAt(2)])
    first = read_ids(run.folder)
    resume(run.folder)
    assert read_ids(run.folder) == first != {}
    losses = {row["step"]: row["loss"] for row in run.metrics if row["kind"] == "train"}
    values = READERS[name](run.folder)
    assert sorted(values) == [1, 2, 3, 4]
    assert values == pytest.approx(losses, rel=1e-6)


# ---------------------------------------------------------------------------------------------- callbacks by name


class Counting(Callback):
    def __init__(self, most: int = 3) -> None:
        self.most = most


def test_callbacks_are_named_in_a_recipe_with_options() -> None:
    path = f"{__name__}:Counting"
    callbacks = named_callbacks(
        load_config(RECIPE, {"train.callbacks": [path, {"name": path, "options": {"most": 5}}]}).train
    )
    assert [one.most for one in callbacks if isinstance(one, Counting)] == [3, 5]


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        ("os:system", "recipe.part-of-python"),
        ("tests.toys.callbacks:StopAtt", "recipe.no-attribute"),
        ("no_such_package.callbacks:X", "recipe.cannot-import"),
        ("json", "recipe.not-an-import-path"),
        ("tessera.errors:TesseraError", "recipe.wrong-class"),
        ({"name": "tests.toys.callbacks:StopAt", "options": {"stepp": 1}}, "recipe.wrong-options"),
    ],
)
def test_what_is_no_callback_is_refused(callback: Any, error: str) -> None:
    with raises(error):
        named_callbacks(load_config(RECIPE, {"train.callbacks": [callback]}).train)


def test_a_callback_of_a_foreign_run_folder_is_code_that_has_to_be_trusted() -> None:
    config = load_config(
        RECIPE, {"train.callbacks": [{"name": "mine.parts:Mail", "options": {"by": "mine.mail:send"}}]}
    )
    assert named_code(config) == {
        "mine.parts:Mail": "train.callbacks.0",
        "mine.mail:send": "train.callbacks.0.options.by",
    }
