"""A pipeline trains, evaluates, saves, exports and answers like one process, under every schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tessera.config.run_config import load_config
from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult
from tessera.core.sample import Message, Part, Sample
from tessera.core.task import Task
from tessera.errors import TesseraError
from tessera.observe.watchdog.watchdog import Watchdog
from tessera.parallel.apply import initialize, parallelize
from tessera.parallel.mesh import Mesh
from tessera.parallel.pipeline_stages import LocalStages, PipelinedModel
from tessera.training.build import build_processor
from tessera.training.run import resume, train
from tessera.training.setup import build_meta_model
from tests.dist.layout_cases import DEEP, FOUR_LAYERS, IN_ENCODER, PIPELINE
from tests.dist.layouts import LIMIT, Case, good, measure_selected, params, recipe_of
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.engine_models import new_tokens

ONE_RANK = {"vision": [2, 0, 0, 0], "text": [0, 1, 1, 2]}  # by zbv, the table that embeds and its copy lie on rank 0


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("case", params(PIPELINE))
def test_a_pipeline_trains_like_one_process(case: Case, measured: Any) -> None:
    assert good(measured[case.name]), measured[case.name]


# ---------------------------------------------------------------------------------------------- what they saw


class Seen(Callback):
    """Pictures of each micro-batch, losses of training and evaluation, and the blocks that the watch followed."""

    def __init__(self) -> None:
        self.pictures: list[list[int]] = []
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self.watched = ""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.pictures.append([batch.counts["images"] for batch in result.microbatches])
        self.losses.append(result.numbers()["loss"])
        self.watched = next((c.module for c in trainer.callbacks if isinstance(c, Watchdog)), "")

    def on_eval(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.held_out.append(metrics["loss"])


def run(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    seen = Seen()
    train(recipe, overrides, callbacks=[seen])
    return vars(seen)


def go_on(rank: int, world: int, folder: Path, overrides: dict[str, Any]) -> list[float]:
    seen = Seen()
    resume(folder, overrides, callbacks=[seen])
    return seen.losses


def test_the_steps_have_text_alone_in_their_middle(tmp_path: Path) -> None:
    recipe = recipe_of(write_chat_set(tmp_path / "data"), tmp_path)
    pictures = run(0, 1, recipe, DEEP)["pictures"]
    assert any(0 in step[1:-1] and any(step) for step in pictures), pictures


@pytest.mark.slow
def test_evaluation_and_the_watch_know_all_stages(tmp_path: Path) -> None:
    """Three held-out rows on two data ranks: the last one is repeated and must not count twice."""
    data = write_chat_set(tmp_path / "data")
    recipe = chat_recipe(data, tmp_path / "one", steps=2, eval_every=1, eval_rows=3)
    overrides = {**DEEP, "checkpoint.at_end": False, "checkpoint.every": 0}
    alone = run(0, 1, recipe, overrides)
    recipe["out"] = str(tmp_path / "four")
    pipeline = {"parallel.pp": 2, "parallel.virtual": 2, "parallel.layers": IN_ENCODER}
    ranks = run_ranks(run, 4, recipe, {**overrides, **pipeline})
    assert len(alone["held_out"]) == 2
    for rank in ranks:
        assert rank["held_out"] == pytest.approx(alone["held_out"], rel=LIMIT)
        assert rank["losses"] == pytest.approx(alone["losses"], rel=LIMIT)
    # Each watched the blocks of its own stages: 0 and 2, 1 and 3.
    assert [rank["watched"].split(" of ")[1].rpartition(".")[0] for rank in ranks] == ["vision.blocks"] * 4
    assert [rank["watched"][-1] for rank in ranks] == ["0", "0", "1", "1"]


class Refusing(Task):
    def counts(self, batch: Batch) -> dict[str, int]:
        return {"tokens": 1}

    def losses(self, outputs: Any, batch: Batch) -> Any:
        raise TesseraError("not this batch", where="train.task")


TASK = Refusing


def refused(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any]) -> str:
    with pytest.raises(TesseraError) as caught:
        train(recipe, overrides)
    return caught.value.what


@pytest.mark.parametrize("virtual", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_a_stage_refuses_is_told_in_its_own_words(virtual: int, tmp_path: Path) -> None:
    recipe = recipe_of(write_chat_set(tmp_path / "data"), tmp_path)
    pipeline = {
        "parallel.pp": 2,
        "parallel.virtual": virtual,
        "parallel.watch": False,
        "train.task": "tests.dist.test_pipeline",
    }
    assert "not this batch" in run_ranks(refused, 2, recipe, {**DEEP, **pipeline}, leave=True)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.slow
def test_checkpoints_and_exports_know_nothing_of_stages(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "data")
    zbv = {"parallel.pp": 2, "parallel.schedule": "zbv", "parallel.layers": ONE_RANK}
    fixed = {**DEEP, "checkpoint.every": 2, "checkpoint.export": True, "data.eval": [], "optim.eps": 1e-5}
    fixed["checkpoint.prove"] = "always"  # by one rank, while the other waits

    def of(name: str) -> dict[str, Any]:
        return chat_recipe(data, tmp_path / name, steps=4)

    expected = run(0, 1, of("one"), fixed)["losses"]
    assert run_ranks(run, 2, of("two"), {**fixed, **zbv})[0]["losses"] == pytest.approx(expected, rel=LIMIT)
    tables = [
        json.loads((tmp_path / name / "chat/checkpoints/step-00000002/tensors.json").read_text())["tensors"]
        for name in ("one", "two")
    ]
    assert {name: entry["shape"] for name, entry in tables[0].items()} == {
        name: entry["shape"] for name, entry in tables[1].items()
    }
    folders = [load_file(tmp_path / name / "chat/hf/model.safetensors") for name in ("one", "two")]
    assert folders[0].keys() == folders[1].keys()
    assert max(float((folders[0][key] - folders[1][key]).abs().max()) for key in folders[0]) < 1e-5

    # From step 2 on, each goes on with what the other had saved.
    for name in ("one", "two"):
        for path in (tmp_path / name / "chat/checkpoints").glob("step-00000004*"):
            (path / "manifest.json").unlink()
    on_one = go_on(0, 1, tmp_path / "two/chat", {"parallel": {}})
    on_two = run_ranks(go_on, 2, tmp_path / "one/chat", zbv)
    assert on_one == pytest.approx(expected[2:], rel=LIMIT)
    assert on_two[0] == on_two[1] == pytest.approx(expected[2:], rel=LIMIT)

    # And both begin alike from the exported folder.
    begin = {**DEEP, "model.path": str(tmp_path / "two/chat/hf"), "model.config": {}, "model.family": None}
    begin = {**begin, "model.preset": None, "checkpoint.at_end": False, "data.eval": [], "train.steps": 1}
    first = run(0, 1, of("from-one"), begin)["losses"]
    assert run_ranks(run, 2, of("from-two"), {**begin, **zbv})[0]["losses"] == pytest.approx(first, rel=LIMIT)


# ---------------------------------------------------------------------------------------------- answers


# Weights large enough that an untrained model does not say one word for ever.
TALKATIVE: dict[str, Any] = {
    "model.config": {
        **FOUR_LAYERS,
        "text": {**FOUR_LAYERS["text"], "initializer_range": 0.5},
        "tie_word_embeddings": False,
    }
}


def all_answers(rank: int, world: int, recipe: dict[str, Any], each: list[dict[str, Any]]) -> list[Any]:
    return [answers(rank, world, recipe, overrides) for overrides in each]


def answers(rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any]) -> list[list[list[int]]]:
    """To two questions at once, one with a picture; and to one without."""
    device = torch.device("cpu")
    config = load_config(recipe, overrides)
    setup = build_meta_model(config, world)
    processor = build_processor(config, setup)
    assert processor is not None
    mesh = Mesh(setup.plan.layout.axes, device)
    module = parallelize(setup.module, setup.plan, mesh, device)
    initialize(module, 3, device)
    model: Any = module.eval()
    if isinstance(module, LocalStages):
        model = PipelinedModel(module, setup.plan, mesh, device)
    look = Image.new("RGB", (20, 24), (200, 30, 60))
    asks = [
        Sample("a", (Message("user", (Part("image", look), Part("text", "Say red."))),)),
        Sample("b", (Message("user", (Part("text", "Say tall old."),)),)),
    ]
    batches: list[Batch] = [processor.prompt(asks, [[look], []]), processor.prompt(asks[1:], [[]])]
    return [new_tokens(model, batch, 6, processor.stop_tokens, over_ranks=True) for batch in batches]


ANSWERING: dict[str, dict[str, Any]] = {
    "split in the encoder": {"pp": 2, "virtual": 2, "layers": {"vision": [1, 1, 0, 0], "text": [0, 0, 2, 2]}},
    "zbv": {"pp": 2, "schedule": "zbv"},
    "1f1b": {"pp": 2, "layers": {"vision": [2, 0], "text": [1, 3]}},
}


def test_answers_are_those_of_one_process(tmp_path: Path) -> None:
    recipe = recipe_of(write_chat_set(tmp_path / "data"), tmp_path)
    (expected,) = run_ranks(answers, 1, recipe, TALKATIVE)
    each = [{**TALKATIVE, **{f"parallel.{k}": v for k, v in pipeline.items()}} for pipeline in ANSWERING.values()]
    for rank in run_ranks(all_answers, 2, recipe, each):
        assert dict(zip(ANSWERING, rank, strict=True)) == dict.fromkeys(ANSWERING, expected)
    assert len({token for batch in expected for row in batch for token in row}) > 2, expected
