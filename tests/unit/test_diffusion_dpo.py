"""Pairs of images for one caption: how they are read, and what the preference objective makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.config.reader import build
from tessera.config.run_config import DataSection, load_config
from tessera.core.batch import Batch
from tessera.core.outputs import LATENTS, Outputs
from tessera.core.task import FrozenModule
from tessera.data.kinds import KINDS, RowRequest
from tessera.diffusion.objectives.diffusion_dpo import DiffusionDpoTask
from tessera.parallel.engine import SimpleEngine
from tests.contract.test_generation_training import recipe
from tests.errors import raises
from tests.toys.generation_set import CROSS, processor_of, write_image, write_jsonl
from tests.toys.pipeline_folder import TEXT_SIZE, write_pipeline_folder
from tests.unit.test_task_diffusion import spec_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline_folder(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    rows = []
    for number in range(4):
        for name in ("good", "bad"):
            write_image(folder / f"{name}{number}.png", shade=20 * number + 60 * (name == "bad"))
        rows.append({"cap": "a red square", "chosen": f"good{number}.png", "rejected": f"bad{number}.png"})
    write_image(folder / "small.png", (16, 16))
    rows.append({"cap": "a red square", "chosen": "good0.png", "rejected": "small.png"})
    return write_jsonl(folder / "pairs.jsonl", rows)


def rows_of(data: Path, pipeline: Path, kind: str = "generation_preference") -> Any:
    values = {"kind": kind, "train": str(data), "workers": 0, "length": 24, "shuffle": False}
    section = build(DataSection, values, "data")
    return KINDS.get(kind)(RowRequest(section, "train", processor_of(pipeline, CROSS, max_pixels=1024), 0, None))


def test_a_pair_is_two_segments_of_one_row_and_of_one_size(data: Path, pipeline: Path) -> None:
    rows = rows_of(data, pipeline)
    batch = rows.batch([0])
    assert batch.counts["pairs"] == 3
    assert batch.counts["samples"] == 3
    assert batch.segments["latents"].lengths == (4,) * 6
    assert [bad.code for bad in rows.bad_samples] == ["data.pair-sizes-differ"]
    with raises("data.too-many-bad-samples", "generation_preference"):
        rows_of(data, pipeline, "generation")


class Toy(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.latents = torch.nn.Linear(CROSS.patch_values, CROSS.patch_values)
        self.text = torch.nn.Linear(TEXT_SIZE, CROSS.patch_values)

    def forward(self, batch: Batch) -> Outputs:
        dtype = self.latents.weight.dtype
        captions = self.text(batch["text"].to(dtype)).mean(0)
        times = (batch["timesteps"] / 1000).to(dtype)[batch["sample_index"]]
        return {LATENTS: (self.latents(batch["latents"].to(dtype)) + captions) * (1 + times[:, None])}


def bound_task(pipeline: Path, reference: torch.nn.Module, **options: Any) -> DiffusionDpoTask:
    task = DiffusionDpoTask(encoders={"text": {"dtype": "float32"}}, **options)
    task.bind(spec_of(CROSS), None)
    config = load_config({"name": "encoded", "model": {"path": str(pipeline)}, "train": {"steps": 1}})
    parts = task.components(config, spec_of(CROSS))
    assert parts.pop("reference").stage == "split"
    loaded = {name: FrozenModule(part.loaded(), CPU, part.residence) for name, part in parts.items()}
    world: Any = SimpleNamespace(device=CPU)
    task.setup({**loaded, "reference": FrozenModule(reference, CPU, "sharded")}, world)
    return task


@pytest.mark.parametrize("by_time", [False, True])
def test_any_split_gives_the_gradient_of_the_published_loss(data: Path, pipeline: Path, by_time: bool) -> None:
    rows, beta = rows_of(data, pipeline), 0.006 if by_time else 3.0
    task = bound_task(pipeline, Toy(1), beta=beta, beta_by_time=by_time)
    whole = rows.batch([0, 1])
    inputs = task.inputs(*task.encode([whole]))
    model, prior = Toy(2).double(), Toy(1).double()
    errors = []
    for net in (model, prior):
        squares = (net(inputs)["latents"] - inputs["target"].double()).square().mean(1)
        errors.append([squares[inputs["sample_index"] == n].mean() for n in (0, 1, 2, 3, 4, 5, 6, 7)])
    noise = [
        inputs["target"][inputs["sample_index"] == n] + inputs["clean"][inputs["sample_index"] == n] for n in (0, 1)
    ]
    assert torch.allclose(noise[0], noise[1], atol=1e-5)  # one noise for both
    assert inputs["timesteps"][0] == inputs["timesteps"][1]
    total = torch.zeros((), dtype=torch.float64)
    for better, worse in ((0, 1), (2, 3), (4, 5), (6, 7)):
        change = (errors[0][better] - errors[0][worse]) - (errors[1][better] - errors[1][worse]).detach()
        scale = beta * float(inputs["timesteps"][better]) if by_time else beta
        total = total - F.logsigmoid(-0.5 * scale * change)
    (total / 4).backward()
    for split in ([whole], [rows.batch([0]), rows.batch([1])]):
        trained = Toy(2)
        totals = SimpleEngine(trained).step(task, split)
        assert float(totals.loss()) == pytest.approx(float(total.detach()) / 4, rel=1e-5)
        for parameter, wanted in zip(trained.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            assert wanted.grad is not None
            assert torch.allclose(parameter.grad.double(), wanted.grad, rtol=1e-3, atol=1e-6)


ADAPTED = pytest.param({"rank": 2, "targets": ["blocks.{*}.mlp"]}, marks=pytest.mark.slow)


@pytest.mark.parametrize("lora", [None, ADAPTED], ids=["whole", "lora"])
def test_a_run_begins_where_its_reference_is(data: Path, pipeline: Path, tmp_path: Path, lora: Any) -> None:
    paired = recipe(data, pipeline, tmp_path, beta=100.0)
    paired["data"] |= {"kind": "generation_preference", "length": 24}
    paired["train"] |= {"task": "diffusion_dpo", "steps": 2}
    paired["model"]["lora"] = lora
    run = tessera.train(paired)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("kind") == "train"]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    if lora is None:
        assert losses[1] != losses[0]
    features = {**paired, "name": "features"}
    features["train"] = {**paired["train"], "task_options": {}}
    with raises("generation.pairs-need-encoders"):
        tessera.plan(features)
