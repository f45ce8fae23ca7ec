"""In a pipeline the first stage alone holds and runs frozen encoders, and sends what they make to the others."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.config.run_config import ParallelSection, RunConfig, load_config
from tessera.core.batch import Batch, Segments
from tessera.core.callback import Callback
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, ModelSpec, Stage
from tessera.diffusion.autoencoders import Autoencoder
from tessera.diffusion.captions import TextEncoder
from tessera.errors import TesseraError
from tessera.parallel.frozen import encode_on_one_rank, frozen_bytes
from tessera.parallel.mesh import make_axes
from tessera.tasks.language import LanguageTask
from tessera.tools.dry_run import device_bytes
from tessera.training.setup import Objects, build_meta_model
from tests.dist.spawn import end_ranks, run_ranks
from tests.errors import raises
from tests.toys.generation_set import write_image, write_jsonl, write_video
from tests.toys.pipeline_folder import TEXT_SIZE, write_pipeline_folder

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_SIZE,
    "freq_dim": 8,
    "ffn_dim": 32,
    "num_layers": 2,
    "text_length": 8,
}


@pytest.fixture
def new_ranks() -> None:
    """Encoders that other tests have left in a rank would be counted."""
    end_ranks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with random weights, and images and a video that make rows of several shapes."""
    folder = tmp_path_factory.mktemp("stages")
    write_pipeline_folder(folder / "pipeline")
    write_video(folder / "set" / "0.mp4", 5)
    rows = [{"path": "0.mp4", "cap": "a red square moving"}]
    for number in range(1, 4):
        write_image(folder / "set" / f"{number}.png", shade=30 * number)
        rows.append({"path": f"{number}.png", "cap": "a red square"[: 3 + number]})
    write_jsonl(folder / "set" / "all.jsonl", rows)
    return folder


def recipe(folder: Path, name: str, pp: int, steps: int = 1) -> dict[str, Any]:
    encoders = {"folder": str(folder / "pipeline"), "steps": steps, "text": {"dtype": "float32"}}
    data = [{"path": str(folder / "set" / "all.jsonl")}]
    return {
        "name": name,
        "out": str(folder / "runs"),
        "model": {"family": "tests.toys.drawn_wan", "config": TINY, "tokenizer": str(folder / "pipeline")},
        "data": {
            "kind": "generation",
            "train": data,
            "eval": data,
            "length": 24,
            "pack": False,
            "workers": 0,
            "processor": {"num_frames": 5, "max_pixels": 1024},
        },
        "train": {
            "steps": 3,
            "global_batch": 2,
            "micro_batch": 1,
            "eval_every": 3,
            "device": "cpu",
            "task_options": {"encoders": encoders, "caption_dropout": 0.3},
        },
        "parallel": {"pp": pp, "watch": False},
        "optim": {"lr": 1e-2},
        "log": {"every": 1},
    }


class Held(Callback):
    """Count the bytes of encoders with weights in this process, and the calls of them."""

    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def on_start(self, trainer: Any) -> None:
        gc.collect()
        for module in gc.get_objects():
            if isinstance(module, Autoencoder | TextEncoder):
                self.bytes += sum(p.nbytes for p in module.parameters() if not p.is_meta)
                if not next(module.parameters()).is_meta:
                    encode = module.encode
                    module.encode = lambda *args, encode=encode: self._count(encode, *args)  # type: ignore[method-assign, misc, assignment]

    def _count(self, encode: Any, *args: Any) -> Any:
        self.calls += 1
        return encode(*args)


def train_on(rank: int, world: int, recipe: dict[str, Any]) -> dict[str, Any]:
    held = Held()
    run = tessera.train(recipe, callbacks=[held])
    losses = [value for row in run.metrics for name, value in sorted(row.items()) if name.endswith("loss")]
    return {"losses": losses, "bytes": held.bytes, "calls": held.calls}


@pytest.mark.slow  # diffusers is slow to import
@pytest.mark.usefixtures("new_ranks")
def test_two_stages_train_as_one_process_and_only_the_first_holds_encoders(folder: Path) -> None:
    (alone,) = run_ranks(train_on, 1, recipe(folder, "alone", 1))
    assert len(alone["losses"]) == 4  # three steps and an evaluation
    first, second = run_ranks(train_on, 2, recipe(folder, "stages", 2))
    for stage in (first, second):
        assert stage["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["bytes"] == alone["bytes"] > 0
    assert first["calls"] > 0
    assert (second["bytes"], second["calls"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("new_ranks")
def test_steps_that_are_encoded_together_are_sent_on_as_well(folder: Path) -> None:
    (alone,) = run_ranks(train_on, 1, recipe(folder, "alone-ahead", 1, steps=2))
    first, second = run_ranks(train_on, 2, recipe(folder, "stages-ahead", 2, steps=2))
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert (second["bytes"], second["calls"]) == (0, 0)


@pytest.mark.slow  # diffusers is slow to import
def test_a_plan_counts_encoders_on_the_first_stage_alone(folder: Path) -> None:
    plan = build_meta_model(load_config(recipe(folder, "plan", 2)), 2).plan
    assert {part.position for part in plan.memory.frozen.values()} == {0}
    encoders = sum(part.size for part in plan.memory.frozen.values())
    held = [memory.total - memory.gradients for memory in plan.memory.by_position]
    assert [device_bytes(plan, position) for position in (0, 1)] == [held[0] + encoders, held[1]]
    assert "on ranks 0 of the pipeline alone" in plan.describe()


@pytest.mark.parametrize(("owner", "last"), [((0, 1), 1), ((0, 1, 1, 0), 0)])  # the second as zbv places stages
def test_a_component_is_counted_on_the_ranks_of_its_stage(owner: tuple[int, ...], last: int) -> None:
    pipeline: Any = SimpleNamespace(owner=owner)
    module, axes = torch.nn.Linear(2, 2), make_axes(ParallelSection(), ModelPlan((), {}), 1)
    places: dict[Stage, int | None] = {"first": 0, "last": last, "split": None}
    for stage, position in places.items():
        component = Component(lambda _: module, trained=False, stage=stage)
        assert frozen_bytes(module, component, axes, pipeline).position == position
        assert frozen_bytes(module, component, axes, None).position is None


class TrainsAnother(LanguageTask):
    def components(self, config: RunConfig, spec: ModelSpec) -> dict[str, Component]:
        return {"teacher": spec.main}


def test_a_component_that_would_be_trained_is_refused() -> None:
    recipe = {"model": {"family": "qwen2", "preset": "quickstart"}, "train": {"steps": 1}}
    with raises("task.trained-component"):
        build_meta_model(load_config(recipe), 1, Objects(task=TrainsAnother()))


class Doubling:
    """A task that replaces a tensor, adds one of another type with its segments, and removes one."""

    def __init__(self, rank: int, failing: bool) -> None:
        self.rank, self.failing = rank, failing

    def encode(self, batches: list[Batch]) -> list[Batch]:
        assert self.rank == 0, "only the first rank encodes"
        if self.failing:
            raise TesseraError("not this batch", where="data.train")
        first, *rest = batches
        tensors = {"x": first["x"] * 2, "kept": first["kept"], "new": torch.ones(2, 3, dtype=torch.bfloat16).T}
        return [Batch(tensors, {"new": Segments.of([1, 2])}, {"new": ((1, 2, 3),)}, seeds=first.seeds), *rest]


def sent(rank: int, world: int, failing: bool) -> Any:
    batches = [Batch({"x": torch.arange(4.0), "kept": torch.zeros(2), "frames": torch.ones(5)}, seeds=(7,))]
    batches.append(Batch({"x": torch.arange(3.0)}))
    group = torch.distributed.group.WORLD
    assert group is not None
    task: Any = Doubling(rank, failing)
    try:
        first, second = encode_on_one_rank(task, batches, group, 0, torch.device("cpu"))
    except TesseraError as error:
        return error.where
    assert second is batches[1], "nothing changed"
    assert first["kept"] is batches[0]["kept"], "not sent again"
    assert (first.segments["new"].lengths, first.shapes, first.seeds) == ((1, 2), {"new": ((1, 2, 3),)}, (7,))
    assert first.segments["new"].bounds.tolist() == [0, 1, 3]
    return sorted(first.tensors), first["x"].tolist(), first["new"].tolist()


def test_changed_tensors_and_refusals_reach_every_stage() -> None:
    for rank in run_ranks(sent, 2, False):
        assert rank == (["kept", "new", "x"], [0.0, 2.0, 4.0, 6.0], [[1.0, 1.0]] * 3)
    assert run_ranks(sent, 2, True) == ["data.train"] * 2
