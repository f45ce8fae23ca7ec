"""Models that Tessera did not write train on two ranks as on one: a user's own, and classes of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tessera.core.callback import Callback, StepResult
from tessera.runtime.modules import clean_name
from tessera.training.run import Run, resume, train
from tests.close import assert_within_rounding, move_by_a_rounding
from tests.dist.spawn import run_ranks
from tests.quick import quick
from tests.toys.hf_folders import CASES, write_folder
from tests.toys.vision_classes import CLASSES, write_chats, write_class

OWN = "tests.toys.own_models"
NAMES = ["tempered"]
LATER = [
    "adapted",
    "internvl",
    "plain",
    "two_encoders",
    "qwen3",
    "whisper",
]  # "tempered" is "plain" with one parameter more, and "adapted" is "qwen3"

CHATS = [name for name in CLASSES if name != "got_ocr2"]  # its image has 256 tokens


class Keep(Callback):
    """The first step's gradients, whole, as lists (they cross a process border); and who is sharded. `move`: begins
    from weights that are one rounding away, which shows how far apart two right results may be."""

    def __init__(self, stop: int | None, move: bool = False) -> None:
        self.stop, self.move = stop, move
        self.gradients: dict[str, list[float]] = {}
        self.groups: list[str] = []

    def on_start(self, trainer: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        named = trainer.module.named_modules()
        self.groups = [clean_name(name + ".")[:-1] for name, part in named if isinstance(part, FSDPModule)]
        if self.move:
            move_by_a_rounding(trainer.module.parameters(), seed=0)

    def on_before_optim(self, trainer: Any) -> None:
        if trainer.step == 0:
            for name, parameter in trainer.module.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad
                    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                    self.gradients[clean_name(name)] = whole.flatten().double().tolist()

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        if result.step == self.stop:
            trainer.request_stop("test")


def begin(
    rank: int, world: int, recipe: dict[str, Any], overrides: dict[str, Any], stop: int | None, move: bool = False
) -> Any:
    keep = Keep(stop, move)
    run = train(recipe, overrides, callbacks=[keep])
    return keep.gradients, losses(run), keep.groups


def begin_all(rank: int, world: int, recipes: list[dict[str, Any]]) -> list[Any]:
    """All models in one go: starting processes that import `transformers` is what takes time here."""
    return [begin(rank, world, one, {}, 2) for one in recipes]


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def chat_recipe(name: str, folders: Folders, out: Path, micro_batch: int = 2) -> dict[str, Any]:
    """One conversation to a row: in the first step, one of four has no image, and one has two."""
    folder = write_class(name, folders.base / name)
    data = write_chats(name, folders.base / f"{name}-chats")
    return {
        "name": name,
        "out": str(out),
        "model": {"path": str(folder)},
        "data": {"train": str(data), "length": 256, "workers": 0, "pack": False, "shuffle": False},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": micro_batch, "device": "cpu"},
        "optim": {"lr": 1e-3, "eps": 1e-3, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 2, "export": True, "prove": "never"},
        "log": {"every": 1},
    }


def recipe(name: str, folders: Folders, out: Path, micro_batch: int = 2) -> dict[str, Any]:
    if name in CHATS:
        return chat_recipe(name, folders, out, micro_batch)
    make = "digits"
    model: dict[str, Any]
    parallel: dict[str, Any] = {}
    if name == "plain":
        model = {"family": "module", "config": {"class": f"{OWN}:PlainNet", "arguments": {"depth": 3}}}
        parallel = {"wrap": ["blocks.{*}"]}
    elif name == "tempered":
        model = {"family": "module", "config": {"class": f"{OWN}:Tempered"}}
        parallel = {"wrap": ["blocks.{*}"]}
    elif name == "two_encoders":
        model = {"family": "module", "config": {"class": f"{OWN}:TwoEncoders"}}
    elif name == "adapted":
        adapted = "tests.toys.adapted_qwen3:AdaptedQwen3"
        model = {"family": "transformers", "config": {"folder": str(folders["qwen3"]), "class": adapted}}
        make = CASES["qwen3"].rows
    else:
        model = {"family": "transformers", "path": str(folders[name])}
        make = CASES[name].rows
    return {
        "name": name,
        "out": str(out),
        "model": model,
        "data": {"kind": "tests.toys.keyword_rows", "options": {"make": make}},
        "parallel": parallel,
        "train": {"steps": 3, "global_batch": 4, "micro_batch": micro_batch, "device": "cpu"},
        # AdamW divides by the gradient's own size: with a small eps, a gradient that is but rounding moves its weight
        # as far as any other does.
        "optim": {"lr": 1e-3, "eps": 1e-3, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 2, "export": True, "prove": "never"},
        "log": {"every": 1},
    }


def relative(result: list[float], expected: list[float]) -> float:
    a, b = torch.tensor(result), torch.tensor(expected)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


class Folders(dict[str, Path]):
    """The folder of each class, written when a test first asks for it."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, name: str) -> Path:
        self[name] = write_folder(name, self.base / name)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The models that tests of this file train on two ranks, whatever was deselected."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    wanted = {item.callspec.params["name"] for item in here if "two_ranks" in item.fixturenames}
    return [name for name in [*NAMES, *LATER, *CHATS] if name in wanted]


@pytest.fixture(scope="module")
def one_rank(names: list[str], folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    return {name: (*begin(0, 1, recipe(name, folders, out), {}, None)[:2], out / name) for name in names}


@pytest.fixture(scope="module")
def two_ranks(names: list[str], folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stopped after two of three steps. One row at a time, where the single rank took two: rows with fewer labels
    must not weigh more."""
    out = tmp_path_factory.mktemp("two")
    recipes = [recipe(name, folders, out, micro_batch=1) for name in names]
    by_name = run_ranks(begin_all, 2, recipes, timeout=60.0 * (2 + len(recipes)))[0]
    return {name: (*results, out / name) for name, results in zip(names, by_name, strict=True)}


GROUPS = {
    "plain": ["", "blocks.0", "blocks.1", "blocks.2"],
    "tempered": ["", "blocks.0", "blocks.1"],
    "two_encoders": ["", "fuse", "picture.2"],
    "internvl": [
        "",
        "model.vision_tower.encoder.layer.0",
        "model.vision_tower.encoder.layer.1",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
    ],
    "qwen3": ["", "model.layers.0", "model.layers.1"],
    "whisper": [
        "",
        "model.encoder.layers.0",
        "model.encoder.layers.1",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    ],
    "adapted": ["", "model.layers.1"],
}


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)])
def test_two_ranks_train_as_one_and_resume(name: str, one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    gradients, values, folder = one_rank[name]
    curve, begun, groups, other = two_ranks[name]
    assert sorted(groups) == sorted(GROUPS[name])
    assert curve.keys() == gradients.keys()
    assert max(relative(curve[n], gradients[n]) for n in gradients) < 1e-5
    assert begun == pytest.approx(values[:2], rel=1e-5)
    assert losses(resume(other)) == pytest.approx(values, rel=1e-5)  # the last step on one rank again
    ours, theirs = (load_file(place / "hf" / "model.safetensors") for place in (other, folder))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow  # processes that import classes with images take longest; "adapted" is a class of transformers, too
@pytest.mark.parametrize("name", CHATS)
def test_a_class_trains_on_conversations_on_two_ranks_as_on_one(
    name: str, folders: Folders, one_rank: dict[str, Any], two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    """A rank whose only conversation has no image takes part in all that the other one gathers."""
    gradients, values, folder = one_rank[name]
    curve, begun, groups, other = two_ranks[name]
    assert sum("layers.0" in path or "layer.0" in path for path in groups) >= (1 if name == "paligemma" else 2), groups
    off = {"checkpoint.export": False, "checkpoint.every": 0}
    moved, near, _ = begin(0, 1, recipe(name, folders, tmp_path), off, 1, move=True)
    assert curve.keys() == gradients.keys() == moved.keys()
    assert_within_rounding(first_step(curve, begun), first_step(gradients, values), first_step(moved, near))
    assert len(losses(resume(other))) == 3  # the last step on one rank
    ours, theirs = (load_file(place / "hf" / "model.safetensors") for place in (other, folder))
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("name", quick(["plain", "internvl", "whisper"], "plain"))
def test_mixed_precision_casts_what_the_data_gives(name: str, folders: Folders, tmp_path: Path) -> None:
    """Batches are float32; the classes compute in bfloat16 over float32 weights, with tables as they came."""
    settings = {"precision.compute": "bfloat16", "train.steps": 2, "train.global_batch": 2}
    _, values, _ = begin(0, 1, recipe(name, folders, tmp_path), settings, None)
    assert values[-1] < 1.2 * values[0]
    saved = load_file(tmp_path / name / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_recompute_of_a_library_class_changes_nothing(folders: Folders, tmp_path: Path) -> None:
    plainly = {"checkpoint.export": False, "checkpoint.every": 0}
    settings = {"parallel.recompute": ["model.language_model.layers.{*}"], **plainly}
    losses, values, _ = begin(0, 1, recipe("internvl", folders, tmp_path / "found"), settings, 1)
    moved, near, _ = begin(0, 1, recipe("internvl", folders, tmp_path / "moved"), plainly, 1, move=True)
    gradients, expected, _ = begin(0, 1, recipe("internvl", folders, tmp_path / "plain"), plainly, 1)
    first = (first_step(losses, values), first_step(gradients, expected), first_step(moved, near))
    assert_within_rounding(*first)


def first_step(gradients: dict[str, list[float]], losses: list[float]) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(losses[0]), **{name: torch.tensor(values) for name, values in gradients.items()}}
