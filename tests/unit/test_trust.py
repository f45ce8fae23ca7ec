"""The trust boundary: what a recipe may call, and what a run folder may call that somebody else made."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.config.reader import dump_yaml
from tessera.config.run_config import DataSection, load_config
from tessera.config.trust import RUN_ID, STATE_VARIABLE, named_code
from tessera.data.kinds import KINDS, RowRequest
from tessera.errors import TesseraError
from tessera.models import FAMILIES, resolve
from tessera.models.foreign import import_class
from tessera.tasks import TASKS
from tests.errors import raises

TOYS = "tests.toys.own_data"
FOREIGN = """
import os
import pathlib
pathlib.Path({mark!r}).write_text("imported")
from torch.utils.data import Dataset
class Set(Dataset):
    def __len__(self): return 4
    def __getitem__(self, number): return {{}}
def unsaid(command): pathlib.Path({mark!r}).write_text("called")
def wrong(command) -> int: pathlib.Path({mark!r}).write_text("called")
def fitting(command) -> Set: return Set()
system = os.system
"""


def recipe(out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "own",
        "out": str(out),
        "model": {"family": "module", "config": {"class": "tests.toys.own_models:PlainNet"}},
        "data": {"kind": "custom", "options": {"dataset": f"{TOYS}:Digits", "arguments": {"count": 8}}, "workers": 0},
        "train": {"steps": 2, "global_batch": 2},
        "optim": {"lr": 1e-3},
        **changes,
    }


def rows(**options: Any) -> Any:
    return KINDS.get("custom")(RowRequest(DataSection(kind="custom", options=options), "train", None, 0))


# ---------------------------------------------------------------------------------------------- what is called


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "posix:system",
        "builtins:eval",
        "builtins:exec",
        "subprocess:run",
        "subprocess:Popen",
        "shutil:rmtree",
        "pickle:loads",
        "runpy:run_path",
        "functools:partial",
        "ctypes:CDLL",
        f"{TOYS}:random.randint",  # reached through a module of one's own
        f"{TOYS}:torch.load",
        f"{TOYS}:torch.hub.load",
        "torch:load",
        "torch.hub:load",
        "torch.utils.cpp_extension:load",
        "numpy:load",
        "tessera.config.reader:read_mapping",
        "tessera.runtime.process:os.system",
    ],
)
def test_what_is_no_data_set_and_no_maker_of_one_is_refused_before_it_is_called(path: str) -> None:
    arguments = {"command": "exit 77", "f": "x", "filename": "x", "path": "/nowhere"}
    for options in ({"dataset": path}, {"loader": path}, {"dataset": path, "arguments": arguments}):
        with pytest.raises(TesseraError) as raised:
            rows(**options)
        assert raised.value.where is not None
        assert raised.value.where.startswith("data.options")
        assert raised.value.code in ("recipe.part-of-python", "recipe.wrong-class", "recipe.not-callable")


@pytest.mark.parametrize("path", ["os:system", "builtins:print", "subprocess:run", f"{TOYS}:random.choice"])
def test_every_other_road_refuses_them_too(path: str) -> None:
    with pytest.raises(TesseraError):
        TASKS.get(path)
    with pytest.raises(TesseraError):
        KINDS.get(path)
    with pytest.raises(TesseraError):
        FAMILIES.get(path)
    with pytest.raises(TesseraError):
        rows(dataset=f"{TOYS}:Digits", collate_fn=path)
    with pytest.raises(TesseraError):
        import_class(path, object, "model.config.class")
    for family in ("module", "transformers"):
        section = load_config({"model": {"family": family, "config": {"class": path}}, "train": {"steps": 1}}).model
        spec, config = resolve(section)
        with pytest.raises(TesseraError):
            spec.main.build(config)


def test_modules_of_python_itself_are_refused_before_they_are_imported() -> None:
    for find in (TASKS.get, KINDS.get, FAMILIES.get, lambda path: rows(dataset=path)):
        with raises("recipe.part-of-python"):
            find("antigravity:fly")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["évil", "evil-x", "1evil", ".evil", "evil x", "package..evil"])
def test_what_is_imported_by_a_path_is_asked_about_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path that is imported is one that `resume` of a foreign folder shows and asks about."""
    mark = tmp_path / "mark"
    (tmp_path / f"{name}.py").write_text(FOREIGN.format(mark=str(mark)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = f"{name}:Set"
    config = load_config(recipe(tmp_path, data={"kind": "custom", "options": {"dataset": path}}))
    if path in named_code(config):
        return
    with raises("recipe.not-an-import-path"):
        rows(dataset=path)
    assert not mark.exists()


def test_own_functions_are_called_and_their_results_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "my_foreign_set.py").write_text(FOREIGN.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(rows(dataset="my_foreign_set:fitting", arguments={"command": "x"})) == 4
    assert len(rows(dataset="my_foreign_set:Set")) == 4
    with raises("recipe.part-of-python"):
        rows(dataset="my_foreign_set:system", arguments={"command": "x"})
    with raises("recipe.part-of-python"):
        rows(dataset="my_foreign_set:os.system", arguments={"command": "x"})
    assert mark.read_text() == "imported"
    with raises("data.not-a-dataset", "NoneType"):  # a function of the user's own that says nothing
        rows(dataset="my_foreign_set:unsaid", arguments={"command": "x"})


def test_a_function_of_an_installed_library_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    mark = tmp_path / "mark"
    (library / "my_installed_set.py").write_text(FOREIGN.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(library))
    with raises("recipe.wrong-class"):
        rows(dataset="my_installed_set:unsaid", arguments={"command": "x"})
    assert mark.read_text() == "imported"


# ---------------------------------------------------------------------------------------------- whose folder it is


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_run_of_ones_own_resumes_loads_and_exports_without_a_question(tmp_path: Path, state: Path) -> None:
    run = tessera.train(recipe(tmp_path))
    assert len(list((state / "runs").iterdir())) == 1
    tessera.resume(run.folder, {"train.steps": 3})
    tessera.load(run.folder)
    assert run.checkpoint is not None
    tessera.load(run.checkpoint)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    run.folder.rename(moved)
    tessera.resume(moved, {"train.steps": 4})
    tessera.convert(moved, tmp_path / "hf")
    assert sorted(os.listdir(state / "runs"))[0].endswith(".json")


def test_a_folder_that_somebody_else_made_is_shown_and_not_run(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tessera.train(recipe(tmp_path))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "another user"))
    assert run.checkpoint is not None
    for use in (
        lambda **trust: tessera.resume(run.folder, {"train.steps": 3}, **trust),
        lambda **trust: tessera.load(run.folder, **trust),
        lambda **trust: tessera.load(run.checkpoint, **trust),
        lambda **trust: tessera.convert(run.folder, tmp_path / "hf", **trust),
    ):
        with pytest.raises(TesseraError) as raised:
            use()
        assert "tests.toys.own_models:PlainNet" in str(raised.value)
        assert "--trust" in str(raised.value)
    with raises("run.code-not-trusted", str(TOYS)):
        tessera.resume(run.folder, trust={"tests.toys.own_models:PlainNet"})
    tessera.load(run.folder, trust={"tests.toys.own_models:PlainNet"})
    tessera.resume(run.folder, {"train.steps": 3}, trust=True)
    tessera.resume(run.folder, {"train.steps": 4})  # from now on it is this user's run


def test_a_folder_that_comes_back_with_other_code_is_not_trusted(tmp_path: Path, state: Path) -> None:
    run = tessera.train(recipe(tmp_path))
    text = (run.folder / "config.yaml").read_text()
    (run.folder / "config.yaml").write_text(text.replace(f"{TOYS}:Digits", "my_foreign.code:Set"))
    with pytest.raises(TesseraError) as raised:
        tessera.resume(run.folder)
    assert "data.options.dataset: my_foreign.code:Set" in str(raised.value)
    assert f"{TOYS}:Digits" not in str(raised.value)
    # What is said on the command line is said by the user.
    (run.folder / "config.yaml").write_text(text)
    tessera.resume(run.folder, {"train.steps": 3, "data.options.dataset": f"{TOYS}:Spoiled"} | SPOILED)
    tessera.resume(run.folder, {"train.steps": 4})


SPOILED = {"data.options.arguments": {"bad": [], "count": 8}}


def test_nothing_is_imported_from_a_foreign_folder(tmp_path: Path, state: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil_module.py").write_text(f"open({str(mark)!r}, 'w').close()\nSPEC = TASK = KIND = None\n")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    roads: list[dict[str, Any]] = [
        {"model": {"family": "evil_module:SPEC"}},
        {"model": {"family": "module", "config": {"class": "evil_module:SPEC"}}},
        {"model": {"family": "transformers", "config": {"class": "evil_module:SPEC"}}},
        {"train": {"steps": 1, "task": "evil_module:TASK"}},
        {"data": {"kind": "evil_module:KIND"}},
        {"data": {"kind": "custom", "options": {"dataset": "evil_module:KIND"}}},
        {"data": {"kind": "custom", "options": {"dataset": "tessera.x:y", "collate_fn": "evil_module:KIND"}}},
        {"data": {"kind": "custom", "options": {"eval": {"loader": "evil_module:KIND"}}}},
    ]
    for changes in roads:
        plain = {"model": {"family": "qwen2_vl"}, "train": {"steps": 1}}
        (folder / "config.yaml").write_text(dump_yaml(load_config({**plain, **changes})))
        for words in (
            ["resume", str(folder)],
            ["generate", str(folder), "?"],
            ["data", "doctor", "--model", str(folder)],
        ):
            if words[0] == "generate" and "model" not in changes:  # it needs nothing but the model
                continue
            _refuses(words, tmp_path, "--trust")
        if "model" in changes:  # as the beginning of another run
            (tmp_path / "recipe.yaml").write_text(json.dumps({"model": {"path": str(folder)}, "train": {"steps": 1}}))
            _refuses(["plan", "recipe.yaml"], tmp_path, "evil_module:SPEC")
    assert not mark.exists()


def _refuses(words: list[str], folder: Path, said: str) -> None:
    """In this process, as the command line would: a process for each would cost seconds."""
    from typer.testing import CliRunner

    from tessera.cli.main import app

    before = list(sys.path)
    here = os.getcwd()
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, words)
    finally:
        os.chdir(here)
        sys.path[:] = before
    assert isinstance(result.exception, TesseraError), (words, result.output, result.exception)
    assert said in str(result.exception), words


def test_a_recipe_that_names_the_code_itself_may_begin_from_a_foreign_run(tmp_path: Path, state: Path) -> None:
    run = tessera.train(recipe(tmp_path))
    shutil.rmtree(state)
    section = {"path": str(run.folder), "family": "module", "config": {"class": "tests.toys.own_models:PlainNet"}}
    again = tessera.train(recipe(tmp_path, name="again", model=section))
    assert again.checkpoint is not None
    with raises("run.code-not-trusted", "PlainNet"):
        tessera.train(recipe(tmp_path, name="unsaid", model={"path": str(run.folder)}))


def test_train_or_resume_needs_no_note_because_the_recipe_is_at_hand(tmp_path: Path, state: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(tmp_path)))
    from typer.testing import CliRunner

    from tessera.cli.main import app

    words = ["train", str(tmp_path / "recipe.yaml"), "--or-resume", "name=named", f"out={tmp_path}"]
    assert CliRunner().invoke(app, words).exit_code == 0
    shutil.rmtree(state)  # as in a container that begins anew each time
    result = CliRunner().invoke(app, [*words, "train.steps=3"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "named" / "checkpoints" / "step-00000003").is_dir()


def test_a_note_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file" / "below"))
    run = tessera.train(recipe(tmp_path))
    assert "will need --trust" in capsys.readouterr().err
    with raises("run.code-not-trusted", "--trust"):
        tessera.resume(run.folder)


def test_a_run_without_code_of_its_own_leaves_no_note(tmp_path: Path, state: Path) -> None:
    plain = load_config({"model": {"family": "qwen2_vl"}, "train": {"steps": 1, "task": "language"}})
    assert named_code(plain) == {}
    assert named_code(load_config({"model": {"family": "tessera.models.qwen3"}, "train": {"steps": 1}})) == {}
    led_out = {"kind": "custom", "options": {"dataset": "tessera.runtime.process:os.system"}}
    assert named_code(load_config({"model": {"family": "qwen3"}, "train": {"steps": 1}, "data": led_out}))


def test_the_id_of_a_run_is_no_path(tmp_path: Path, state: Path) -> None:
    run = tessera.train(recipe(tmp_path))
    (tmp_path / "evil.json").write_text(json.dumps({"code": [f"{TOYS}:Digits", "tests.toys.own_models:PlainNet"]}))
    (run.folder / RUN_ID).write_text("../../evil")
    with raises("run.code-not-trusted", "--trust"):
        tessera.resume(run.folder)
