"""A mistake in a name costs no second: it is refused before torch is imported, with the nearest name that exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tessera
from tessera.config.built_ins import FAMILY_NAMES, KIND_NAMES, TASK_NAMES
from tessera.config.run_config import load_config
from tessera.data.kinds import KINDS
from tessera.errors import TesseraError
from tessera.models import FAMILIES
from tessera.tasks import TASKS
from tessera.training.early_checks import check_evaluated, check_model_names, check_path, check_run_names
from tessera.weights.layouts import no_such_folder
from tests.errors import raises
from tests.quick import quick

RECIPE = "model: {family: qwen2, preset: quickstart}\ndata: {train: {path: data.jsonl}}\ntrain: {steps: 2}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("{}\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("data.jsonl", str(tmp_path / "data.jsonl")))
    return path


def refused(recipe: Path, **settings: object) -> TesseraError:
    with pytest.raises(TesseraError) as caught:
        check_run_names(load_config(recipe, {key.replace("__", "."): value for key, value in settings.items()}))
    return caught.value


def test_names_that_are_found_without_an_import_are_those_that_can_be_used() -> None:
    for built_ins, registry in ((TASK_NAMES, TASKS), (FAMILY_NAMES, FAMILIES), (KIND_NAMES, KINDS)):
        assert len(built_ins.names()) > 5
        for name in built_ins.names():
            registry.get(name)
            built_ins.check(name)
        built_ins.check("my_package.my_module:NAME")


@pytest.mark.parametrize(
    "words",
    quick(
        [["train", "RECIPE", "train.task=grpo"], ["resume", "nowhere"], ["chat", "nowhere"]],
        ["train", "RECIPE", "train.task=grpo"],
    ),
)
def test_a_wrong_name_is_refused_without_torch(recipe: Path, tmp_path: Path, words: list[str]) -> None:
    code = "import sys; from tessera.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    argv = [str(recipe) if word == "RECIPE" else word for word in words]
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stdout.split() == ["False"]


def test_a_plan_refuses_what_a_run_refuses(recipe: Path) -> None:
    with raises("recipe.part-of-python", "data.kind"):
        check_model_names(load_config(recipe, {"data.kind": "os:system"}))
    with raises("device.unknown-name"):
        tessera.plan(recipe, {"train.device": "tpu"})
    with raises("recipe.pattern-matches-nothing", "optim.groups.0"):
        tessera.plan(recipe, {"optim.groups": [{"pattern": "nowhere", "lr": 1e-3}]})
    for world in (0, -1):
        with raises("layout.too-few-ranks"):
            tessera.plan(recipe, world=world)


def test_limits_that_leave_no_sample_are_refused() -> None:
    for number in (0, -1):
        with raises("evaluation.too-few-samples"):
            tessera.evaluate("nowhere", max_samples=number)
        with raises("evaluation.too-few-samples"):
            tessera.compare("nowhere", max_samples=number)


def test_a_mistyped_task_gets_the_nearest_name(recipe: Path) -> None:
    assert refused(recipe, train__task="dpoo").nearest == "dpo"


def test_data_and_models_that_are_not_there_are_refused_with_their_neighbour(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "Qwen2.5-VL-7B").mkdir(parents=True)
    assert refused(recipe, data__train=str(tmp_path / "date.jsonl")).nearest == "data.jsonl"
    wanted = str(tmp_path / "models" / "Qwen2.5-VL-7B")
    for mistyped in ("models/Qwen2.5VL-7B", "model/Qwen2.5-VL-7B"):
        error = refused(recipe, model__path=str(tmp_path / mistyped))
        assert (error.where, error.nearest) == ("model.path", wanted)
    assert no_such_folder(tmp_path / "other").nearest is None
    check_path(Path("hf://org/name"))
    check_path(Path("org-that-is-not-here/name"))  # a name on a hub
    # A plan needs no data.
    check_model_names(load_config(recipe, {"data.train": "gone.jsonl"}))


def test_evaluations_without_held_out_data_are_refused(recipe: Path, tmp_path: Path) -> None:
    assert refused(recipe, train__eval_every=1).where == "train.eval_every"
    assert refused(recipe, train__eval_every="1epoch").where == "train.eval_every"
    held_out = {"train.eval_every": 1, "data.eval": str(tmp_path / "data.jsonl")}
    check_evaluated(load_config(recipe, held_out))
    check_evaluated(load_config(recipe, {"train.eval_every": 0}))
    custom = {"data.kind": "custom", "data.train": [], "data.options": {"eval": "my_module:held_out"}}
    check_evaluated(load_config(recipe, {"train.eval_every": 1, **custom}))
