"""A failed attempt changes nothing of a run, a run folder has one owner, and it is found from anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import tessera
from tessera.checkpoint.files import FileRecord, RecordedFile
from tessera.config.run_config import CheckpointSection, load_config
from tessera.config.run_paths import find_file, located, paths_inside
from tessera.core.callback import Callback
from tessera.errors import TesseraError
from tessera.inference.weight_source import run_exists
from tessera.runtime.folder_lock import LOCK
from tessera.training.run import resume_config
from tessera.training.run_folder import RunFolder, check_fresh, describe_saving, read_from_old_run
from tests.dist.spawn import fork_context
from tests.errors import raises
from tests.quick import quick
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def quick_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    """Without worker processes and held-out rows: a run of three steps in a fraction of a second."""
    recipe = chat_recipe(data, out, **{"steps": 3, "global_batch": 1, **train})
    recipe["data"] |= {"workers": 0, "eval": []}
    recipe["guard"] = {"coverage": "off"}
    return recipe


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tessera.train(quick_recipe(data, tmp_path_factory.mktemp("runs"))).folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A run of three steps, one copy for each test."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / "chat"))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run but the logs and the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if not path.name.startswith(".")}


class FailAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == self.step:
            raise RuntimeError("planted")


# ---------------------------------------------------------------------------------------------- a resume that fails


@pytest.mark.parametrize(
    "override",
    quick(
        [
            {"data.train": [{"path": "no-such-file.jsonl"}]},
            {"model.config.text.intermediate_size": 96},
            {"train.seed": 5},
            {"train.steps": 9, "data.length": 3},
            {"train.steps": 9, "name": "elsewhere"},
            {"train.steps": 9, "out": "elsewhere"},
        ],
        {"model.config.text.intermediate_size": 96},
        {"train.steps": 9, "data.length": 3},
    ),
    ids=["data that is not there", "another shape", "another seed", "rows too short", "another name", "another place"],
)
def test_a_resume_that_fails_leaves_the_run_as_it_was(folder: Path, override: dict[str, Any]) -> None:
    before = content(folder)
    with pytest.raises(TesseraError):
        tessera.resume(folder, override)
    after = content(folder)
    assert {name: text for name, text in after.items() if not name.startswith("index")} == {
        name: text for name, text in before.items() if not name.startswith("index")
    }


def test_a_run_goes_on_and_is_converted_after_resumes_that_failed(folder: Path, tmp_path: Path) -> None:
    for override in ({"model.config.text.intermediate_size": 96}, {"train.steps": 9, "name": "elsewhere"}):
        with pytest.raises(TesseraError):
            tessera.resume(folder, override)
    assert tessera.resume(folder, {"train.steps": 4}).checkpoint == folder / "checkpoints" / "step-00000004"
    tessera.convert(folder, tmp_path / "hf", prove="never")


@pytest.mark.slow
def test_another_optimizer_is_told_and_takes_what_both_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tessera.resume(folder, {"train.steps": 4, "optim.name": "lion"})
    assert "optim.name was adamw and is lion now" in capsys.readouterr().err
    with raises("checkpoint.model-mismatch", "exp_avg_sq"):
        tessera.resume(folder, {"train.steps": 5, "optim.name": "adamw"})


def test_a_resume_that_fails_in_its_first_step_leaves_the_configuration(folder: Path) -> None:
    before = (folder / "config.yaml").read_text()
    with pytest.raises(RuntimeError, match="planted"):
        tessera.resume(folder, {"train.steps": 5, "optim.lr": 0.5}, callbacks=[FailAt(3)])
    assert (folder / "config.yaml").read_text() == before
    with pytest.raises(RuntimeError, match="planted"):
        tessera.resume(folder, {"train.steps": 5, "optim.lr": 0.5}, callbacks=[FailAt(4)])
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr"] == 0.5


def test_the_shape_of_the_model_is_that_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Also where an earlier version has left a configuration that fits no checkpoint, or none at all."""
    spoiled = yaml.safe_load((folder / "config.yaml").read_text())
    spoiled["model"]["config"]["text"]["hidden_size"] = 64
    (folder / "config.yaml").write_text(yaml.safe_dump(spoiled))
    tessera.convert(folder, tmp_path / "hf", prove="never")
    tessera.resume(folder, {"train.steps": 4})
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["config"]["text"]["hidden_size"] == 32
    (folder / "config.yaml").unlink()
    assert tessera.resume(folder, {"train.steps": 5}).checkpoint == folder / "checkpoints" / "step-00000005"


# ---------------------------------------------------------------------------------------------- replacing a run


def test_a_run_that_fails_before_its_first_step_gives_back_what_it_was_to_replace(data: Path, folder: Path) -> None:
    before = content(folder)
    with pytest.raises(RuntimeError, match="planted"):
        tessera.train(quick_recipe(data, folder.parent), overwrite=True, callbacks=[FailAt(0)])
    assert content(folder) == before
    with raises("tokenizer.no-file"):
        tessera.train(quick_recipe(data / "nowhere", folder.parent), overwrite=True)
    assert content(folder) == before
    with pytest.raises(RuntimeError, match="planted"):  # this one has proved itself: it is the run now
        tessera.train(quick_recipe(data, folder.parent, seed=1), overwrite=True, callbacks=[FailAt(1)])
    assert not run_exists(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["seed"] == 1


def test_the_recipe_of_a_resumed_run_replaces_the_run_in_place(folder: Path) -> None:
    before = content(folder)
    as_resumed = {"model.tokenizer": str(folder / "processor"), "out": str(folder.parent), "train.steps": 1}
    run = tessera.train(folder / "config.yaml", as_resumed, overwrite=True)
    assert run.checkpoint == folder / "checkpoints" / "step-00000001"
    after = content(folder)
    assert "processor/tokenizer.json" in after
    assert {name: text for name, text in before.items() if name.startswith("processor")} == {
        name: text for name, text in after.items() if name.startswith("processor")
    }


def test_rows_that_a_run_stores_are_copied_for_the_run_that_replaces_it(data: Path, folder: Path) -> None:
    stored = folder / "data" / "train.jsonl"
    stored.parent.mkdir()
    stored.write_text("{}\n")
    before = content(folder)
    config = load_config(quick_recipe(data, folder.parent), {"data.train": [{"path": str(stored)}]})
    assert read_from_old_run(config) == ["data"]
    assert read_from_old_run(config, written=[stored]) == []  # the new run stores its own rows
    replaced = RunFolder(folder)
    replaced.open(overwrite=True, inputs=["data"])
    assert content(folder) == {
        "data/train.jsonl": b"{}\n",
        **{f".replaced/{name}": text for name, text in before.items()},
    }
    stored.write_text("")
    replaced.close()
    assert content(folder) == before


@pytest.mark.parametrize("path", ["", "checkpoints/step-00000003", "hf"])
def test_a_run_is_not_replaced_by_one_that_reads_its_weights(path: str, data: Path, folder: Path) -> None:
    config = load_config(quick_recipe(data, folder.parent), {"model.path": str(folder / path)})
    with raises("run.reads-replaced-run"):
        read_from_old_run(config)


def test_a_killed_attempt_to_replace_a_run_is_undone_by_the_next_start(data: Path, folder: Path) -> None:
    before = content(folder)
    for stage in ("aside", "begun", "half aside", "half restored", "half restored by an older version"):
        taken = RunFolder(folder)
        taken.open(overwrite=True)
        if stage == "begun":
            (folder / "config.yaml").write_text("name: new\n")
            (folder / "ledger").mkdir()
        if stage == "half aside":
            (folder / ".replaced").rename(folder / ".replacing")
            (folder / ".replacing" / "metrics.jsonl").rename(folder / "metrics.jsonl")
        if stage.startswith("half restored"):  # the remains of the new run are removed before files are moved back
            aside = ".restoring" if "older" in stage else ".replacing"
            (folder / ".replaced").rename(folder / aside)
            (folder / aside / "checkpoints").rename(folder / "checkpoints")
        taken._lock.release()  # as the system does for a process that is killed
        assert run_exists(folder)
        assert find_file(folder, "config.yaml").read_bytes() == before["config.yaml"]
        again = RunFolder(folder)
        again.open(resume=True)
        again.close()
        assert content(folder) == before, stage
        assert not [path for path in folder.iterdir() if path.name.startswith((".rep", ".res", ".trash"))]
    taken.open(overwrite=True)
    taken._lock.release()
    with raises("run.exists"):
        tessera.train(quick_recipe(data, folder.parent))
    assert tessera.resume(folder, {"train.steps": 4}).checkpoint == folder / "checkpoints" / "step-00000004"


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_a_file_that_is_there_twice_is_not_chosen_for_the_user(name: str, folder: Path) -> None:
    replaced = RunFolder(folder)
    replaced.open(overwrite=True)
    replaced._lock.release()  # as the system does for a process that is killed
    (folder / ".replaced").rename(folder / ".replacing")  # killed again while its files were moved back
    (folder / name / "of-another-process").mkdir(parents=True)
    before = content(folder)
    again = RunFolder(folder)
    with raises("run.files-in-two-places", str(folder / name), str(folder / ".replacing" / name)):
        again.open(resume=True)
    again.close()
    assert content(folder) == before
    shutil.rmtree(folder / name)
    again.open(resume=True)
    again.close()
    assert run_exists(folder)
    assert not (folder / ".replacing").exists()


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "-rf", "_private", "a/b", "", "a" * 129, "a\nb"])
def test_a_name_that_could_lead_elsewhere_is_refused(name: str, data: Path, tmp_path: Path) -> None:
    with raises("recipe.wrong-value"):
        load_config(quick_recipe(data, tmp_path) | {"name": name})


@pytest.mark.parametrize("name", ["a", "0", "run-2.1_b", "a" * 128, "größer", "模型"])
def test_other_names_are_fine(name: str, data: Path, tmp_path: Path) -> None:
    assert load_config(quick_recipe(data, tmp_path) | {"name": name}).name == name


def test_only_a_run_is_replaced_and_never_where_we_stand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "thesis"
    (other / "checkpoints" / "step-1").mkdir(parents=True)
    (other / "config.yaml").write_text("my: own\n")
    with raises("run.foreign-folder"):
        check_fresh(other, overwrite=True)
    check_fresh(folder, overwrite=True)
    for place in (folder, folder / "checkpoints"):
        monkeypatch.chdir(place)
        with raises("run.working-folder"):
            check_fresh(folder, overwrite=True)
        with raises("run.working-folder"):
            check_fresh(Path("..") / folder.name if place == folder else Path(".."), overwrite=True)


# ---------------------------------------------------------------------------------------------- one owner


def train_quietly(recipe: dict[str, Any]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        tessera.train(recipe)


def test_a_second_run_in_the_same_folder_is_refused_and_a_killed_one_goes_on(data: Path, tmp_path: Path) -> None:
    recipe = quick_recipe(data, tmp_path / "runs", steps=100000) | {"checkpoint": {"every": 1, "keep": 2}}
    folder = tmp_path / "runs" / "chat"
    first = fork_context().Process(target=train_quietly, args=(recipe,))
    first.start()
    try:
        deadline = time.monotonic() + 300
        while not (folder / "checkpoints" / "latest").exists():
            assert first.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for attempt in (
            lambda: tessera.resume(folder),
            lambda: tessera.train(recipe),  # neither a resume nor --overwrite would help
            lambda: tessera.train(recipe, overwrite=True),
            lambda: tessera.train(recipe | {"name": "chat"}, overwrite=True),
        ):
            with raises("run.folder-in-use", str(first.pid)):
                attempt()
        assert first.exitcode is None
    finally:
        first.kill()
        first.join()
    assert (folder / LOCK).read_bytes()  # names the process that was killed
    step = max(int(path.name[5:13]) for path in (folder / "checkpoints").glob("step-*"))
    run = tessera.resume(folder, {"train.steps": step + 2})
    assert run.checkpoint == folder / "checkpoints" / f"step-{step + 2:08d}"
    assert (folder / LOCK).read_bytes() == b""


# ---------------------------------------------------------------------------------------------- found from anywhere


@pytest.mark.slow
def test_a_run_is_resumed_from_any_working_folder_and_after_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    write_chat_set(project / "data", samples=12)
    monkeypatch.chdir(project)
    recipe = quick_recipe(Path("data"), Path("runs"))
    recipe["data"]["train"] = [{"path": "data/*.jsonl", "root": "data"}]
    tessera.train(recipe)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project" / "runs" / "chat"
    tessera.resume("project/runs/chat", {"train.steps": 4})
    monkeypatch.chdir(folder)
    assert tessera.resume(".", {"train.steps": 5}).checkpoint is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    away = folder.rename(tmp_path / "elsewhere" / "_an old name")
    run = tessera.resume(away, {"train.steps": 6})
    assert run.checkpoint == away / "checkpoints" / "step-00000006"
    tessera.load(away, device="cpu")
    away.rename(folder)
    tessera.resume(folder, {"train.steps": 7})
    project.rename(tmp_path / "moved")  # the data with it
    run = tessera.resume(tmp_path / "moved" / "runs" / "chat", {"train.steps": 8})
    assert [row["step"] for row in run.metrics if row["kind"] == "train"] == list(range(1, 9))


def test_all_paths_of_a_recipe_are_absolute_in_the_run_folder(tmp_path: Path) -> None:
    preview = {"prompts": ["a kite"], "folder": "vae", "images": ["a.png", "/b.png"]}
    recipe = {
        "model": {
            "family": "llama",
            "path": "start",
            "weights": "shards",
            "tokenizer": "words",
            "lora": {"path": "lo"},
        },
        "data": {"train": [{"path": "rows.jsonl", "root": "media"}]},
        "train": {"steps": 1, "preview": preview},
        # `functions` are compared with the text of the task file, relative to whose folder they are imported.
        "evaluation": {"data": "tables", "tasks": ["colours.yaml"], "functions": ["score.py:same"]},
    }
    config = located(load_config(recipe), tmp_path)
    assert config.model.weights == tmp_path / "shards"
    assert config.train.preview is not None
    assert config.train.preview.images == [tmp_path / "a.png", Path("/b.png")]
    assert config.evaluation.functions == ["score.py:same"]
    paths = [str(path) for path in paths_inside(config, tmp_path)]
    assert sorted(paths) == sorted(
        [
            "start",
            "shards",
            "words",
            "lo",
            "rows.jsonl",
            "media",
            "vae",
            "a.png",
            "tables",
            "colours.yaml",
        ]
    )


def test_code_that_a_recipe_names_must_be_importable_and_trusted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "project").mkdir()
    code = "from tessera.data.kinds.chat import KIND\n\ndef ROWS(request):\n    return KIND(request)\n"
    (tmp_path / "project" / "rows_of_a_project.py").write_text(code)
    recipe = quick_recipe(data, tmp_path / "runs")
    recipe["data"]["kind"] = "rows_of_a_project:ROWS"
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    folder = tessera.train(recipe).folder
    assert tessera.resume(folder, {"train.steps": 4}).checkpoint == folder / "checkpoints" / "step-00000004"
    shutil.rmtree(tmp_path / "state")
    with raises("run.code-not-trusted"):
        tessera.resume(folder, {"train.steps": 5})
    (tmp_path / "project" / "rows_of_a_project.py").unlink()
    sys.modules.pop("rows_of_a_project")
    with raises("recipe.cannot-import", "rows_of_a_project"):
        tessera.resume(folder, {"train.steps": 5}, trust=True)


# ---------------------------------------------------------------------------------------------- saving by the clock


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "every 10 minutes and at the end; the newest 2 are kept"),
        ({"every": 100}, "every 100 steps and at the end"),
        ({"every": "30 min"}, "every 30 minutes and at the end"),
        ({"every": "2h"}, "every 120 minutes and at the end"),
        ({"every": "0.5epoch"}, "every 0.5 epochs and at the end"),
        ({"at_end": False}, "none"),
        ({"every": 0}, "checkpoints   at the end"),
        ({"every": "0.5min", "at_end": False, "keep": 1}, "every 0.5 minutes; the newest 1"),
    ],
)
def test_how_often_a_run_saves_is_said(section: dict[str, Any], said: str) -> None:
    assert said in describe_saving(CheckpointSection.model_validate(section))


def test_a_run_saves_by_the_clock(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = quick_recipe(data, tmp_path) | {"checkpoint": {"every": "1e-9min", "keep": 9, "asynchronous": False}}

    class Quick(Callback):
        def on_save(self, trainer: Any, path: Path) -> None:
            assert trainer.checkpoints.report is not None
            for field in ("seconds", "paused_seconds"):  # or it would be seen to take too long
                object.__setattr__(trainer.checkpoints.report, field, 0.0)

    tessera.train(recipe, callbacks=[Quick()])
    assert "checkpoints   every 1e-09 minutes and at the end" in capsys.readouterr().err
    saved = sorted(path.name for path in (tmp_path / "chat" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000000", "step-00000001", "step-00000002", "step-00000003"]


def test_saving_takes_no_more_than_a_twentieth_of_the_time(data: Path, tmp_path: Path) -> None:
    recipe = quick_recipe(data, tmp_path, steps=5) | {
        "checkpoint": {"every": "1e-9min", "keep": 9, "asynchronous": False}
    }

    class Slow(Callback):
        def on_save(self, trainer: Any, path: Path) -> None:
            object.__setattr__(trainer.checkpoints.report, "paused_seconds", 1000.0)

    tessera.train(recipe, callbacks=[Slow()])
    saved = sorted(path.name for path in (tmp_path / "chat" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000000", "step-00000005"]


# ---------------------------------------------------------------------------------------------- the folder itself


def test_a_finished_run_does_not_read_its_checkpoint_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    class Counted(RecordedFile):
        def __init__(self, path: Path, record: FileRecord) -> None:
            super().__init__(path, record)
            read.append(path)

    monkeypatch.setattr("tessera.checkpoint.files.RecordedFile", Counted)
    monkeypatch.setattr("tessera.checkpoint.stored.RecordedFile", Counted)
    run = tessera.train(quick_recipe(data, tmp_path))
    assert run.checkpoint == tmp_path / "chat" / "checkpoints" / "step-00000003"
    assert read == []
    assert tessera.resume(run.folder).checkpoint == run.checkpoint
    assert len([path for path in read if path.suffix == ".safetensors"]) == 1


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("run.folder-not-writable") as raised:
        tessera.train(quick_recipe(data, tmp_path / "file" / "runs"))
    assert raised.value.exit_code == 2
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with raises("run.folder-not-writable"):
        RunFolder(tmp_path / "runs" / "mine").open()
    with raises("run.folder-not-writable"):
        RunFolder(Path("/proc/runs/mine")).open()


def test_a_disk_that_fills_up_while_a_run_goes_on_is_said(data: Path, tmp_path: Path) -> None:
    class Full(Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with raises("run.folder-not-writable"):
        tessera.train(quick_recipe(data, tmp_path), callbacks=[Full()])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_at_the_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        handle = os.open("/dev/full", os.O_WRONLY)
        try:
            return os.write(handle, b"x")
        finally:
            os.close(handle)

    monkeypatch.setattr("os.pwrite", full)
    with raises("run.folder-not-writable"):
        RunFolder(tmp_path / "run").open()


def test_a_changed_schedule_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tessera.resume(folder, {"train.steps": 4, "optim.schedule": {"kind": "cosine", "warmup": 2}})
    said = capsys.readouterr().err
    assert "the schedule has changed since step 3 was saved (kind constant -> cosine, warmup 0 -> 2" in said


# ---------------------------------------------------------------------------------------------- links in a run folder


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", *map(slow, ("report.html", "ledger/rank-00000.jsonl", "logs/rank-00000.log", "config.yaml.new"))],
)
def test_nothing_is_written_through_a_link_in_a_run_folder(name: str, folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    text = '{"kind": "train", "step": 100}\nwritten by the user\n'
    precious.write_text(text)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)
    tessera.resume(folder, {"train.steps": 4})
    assert precious.read_text() == text
    assert not (folder / name).is_symlink()


@pytest.mark.parametrize("name", ["checkpoints", "logs", "ledger", ".replaced"])
def test_a_folder_of_a_run_that_is_a_link_out_of_it_is_refused(name: str, tmp_path: Path) -> None:
    """The run folder itself may be a link, and so may the folder of all runs."""
    (tmp_path / "victim" / "checkpoints").mkdir(parents=True)
    (tmp_path / "disk" / "chat").mkdir(parents=True)
    folder = tmp_path / "chat"
    folder.symlink_to(tmp_path / "disk" / "chat")
    (folder / name).symlink_to(tmp_path / "victim")
    for resume in (True, False):
        with raises("run.link-out-of-folder"), contextlib.closing(RunFolder(folder)) as linked:
            linked.open(resume=resume)
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["checkpoints"]
    (folder / name).unlink()
    with contextlib.closing(RunFolder(folder)) as linked:
        linked.open(resume=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("pipe", "manifest.json"),
        slow("pipe", "state.json"),
        slow("pipe", "tensors.json"),
        slow("pipe", "rows"),
        slow("pipe", "run.json"),
        slow("pipe", "metrics.jsonl"),
        slow("deep", "manifest.json"),
        ("deep", "state.json"),
        slow("deep", "tensors.json"),
        slow("deep", "rows"),
        slow("deep", "run.json"),
        slow("deep", "metrics.jsonl"),
    ],
)
def test_a_pipe_or_a_bomb_among_the_files_of_a_run_is_never_waited_for(kind: str, name: str, folder: Path) -> None:
    """What can be done without is done without; the rest is said. (A pipe would hang, a bomb end in a traceback.)"""
    path = [one for one in sorted(folder.rglob("*")) if one.name.startswith(name)][-1]  # of the newest checkpoint
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"[" * 200_000)
    if name == "metrics.jsonl" and kind == "pipe":
        with raises("environment.not-regular-file"):
            tessera.resume(folder, {"train.steps": 4})
    else:
        assert [row["step"] for row in tessera.resume(folder, {"train.steps": 4}).metrics][-1] == 4


def test_an_owner_that_cannot_be_read_keeps_nobody_out(folder: Path) -> None:
    (folder / LOCK).write_bytes(b"[" * 200_000)
    assert tessera.resume(folder, {"train.steps": 4}).checkpoint is not None


def test_a_damaged_copy_of_the_tokenizer_is_not_trained_on(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = folder / "processor" / "chat_template.jinja"
    content_before, whole = template.read_bytes(), load_config(folder / "config.yaml")
    template.write_bytes(b"")
    assert resume_config(folder).model.tokenizer == whole.model.tokenizer  # where the run read it first
    assert "chat_template.jinja" in caplog.text
    assert whole.model.tokenizer is not None
    gone = {"model.tokenizer": str(tmp_path / "gone")}
    with raises("run.processor-files-changed"):
        resume_config(folder, gone)
    template.write_bytes(content_before)
    assert resume_config(folder, gone).model.tokenizer == folder / "processor"
