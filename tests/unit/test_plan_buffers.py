"""What is no parameter takes memory as well: weights in fewer bits and tables are in the forecast, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.run_config import load_config
from tessera.ops.linear import packed_sizes
from tessera.parallel.apply import parallelize
from tessera.parallel.mesh import PP, Mesh
from tessera.runtime import distributed as dist
from tessera.runtime.modules import local_shard
from tessera.training.setup import build_meta_model

CPU = torch.device("cpu")
FOUR_BITS: dict[str, Any] = {"family": "qwen2_vl", "preset": "quickstart", "lora": {"rank": 4, "quantize": "nf4"}}
DIGITS = {"family": "module", "config": {"class": "tests.toys.own_models:PlainNet"}}  # with tables in buffers


def recipe(model: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "train": {"steps": 1, "global_batch": 4}, "data": {"length": 64}}


@pytest.mark.parametrize(
    ("model", "world", "parallel"),
    [
        pytest.param(FOUR_BITS, 1, {}, marks=pytest.mark.slow),
        pytest.param(FOUR_BITS, 4, {}, marks=pytest.mark.slow),
        (FOUR_BITS, 4, {"parallel.shard": 2, "precision.compute": "bfloat16"}),
        pytest.param(FOUR_BITS, 4, {"parallel.pp": 2}, marks=pytest.mark.slow),
        (FOUR_BITS, 2, {"parallel.pp": 2, "parallel.layers": {"vision": [3, 0], "text": [1, 3]}}),
        (DIGITS, 2, {}),
    ],
)
def test_a_rank_holds_what_the_plan_says(model: dict[str, Any], world: int, parallel: dict[str, Any]) -> None:
    planned = tessera.plan(recipe(model), parallel, world=world)
    assert sum(memory.buffers for memory in planned.memory.by_position) > 0
    for position in range(planned.layout.axes.size(PP)):
        setup = build_meta_model(load_config(recipe(model), parallel), world)
        with dist.fake_world(world, position * world // planned.layout.axes.size(PP)):
            mesh = Mesh(setup.plan.layout.axes, CPU)
            module = parallelize(setup.module, setup.plan, mesh, CPU)
            parameters = sum(local_shard(p).nbytes for p in module.parameters())
            buffers = sum(buffer.nbytes for buffer in module.buffers())
        assert (parameters, buffers) == (
            planned.memory.by_position[position].parameters,
            planned.memory.by_position[position].buffers,
        )


def test_four_bits_are_half_a_byte_and_a_scale_for_64_and_part_of_the_total() -> None:
    setup = build_meta_model(load_config(recipe(FOUR_BITS)), 8)
    whole = dict(build_meta_model(load_config(recipe({**FOUR_BITS, "lora": None})), 8).module.named_parameters())
    sizes = [packed_sizes(*whole[f"{path}.weight"].shape) for path in setup.adapters]
    most = setup.plan.memory.heaviest
    assert most.buffers == sum(count + 4 * blocks for count, blocks in sizes)
    assert most.total == most.parameters + most.buffers + most.gradients + most.optimizer


def test_eight_bits_are_a_byte_and_a_scale_for_a_row() -> None:
    eight = {**FOUR_BITS, "lora": {**FOUR_BITS["lora"], "quantize": "fp8"}}
    setup = build_meta_model(load_config(recipe(eight)), 8)
    whole = dict(build_meta_model(load_config(recipe({**eight, "lora": None})), 8).module.named_parameters())
    shapes = [whole[f"{path}.weight"].shape for path in setup.adapters]
    assert setup.plan.memory.heaviest.buffers == sum(rows * columns + 4 * rows for rows, columns in shapes)


def test_text_and_figures_tell_of_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(FOUR_BITS)))
    words = [
        "plan",
        str(tmp_path / "recipe.yaml"),
        "--world",
        "2",
        "parallel.pp=2",
        "--json",
        str(tmp_path / "a/plan.json"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    planned = tessera.plan(recipe(FOUR_BITS), {"parallel.pp": 2}, world=2)
    figures = json.loads((tmp_path / "a/plan.json").read_text())
    assert [one["buffers"] for one in figures["memory"]] == [memory.buffers for memory in planned.memory.by_position]
    assert [one["total"] for one in figures["memory"]] == [memory.total for memory in planned.memory.by_position]
    assert figures["axes"] == {"pp": 2, "dp_shard": 1}
    assert figures["communication"][0][0]["kind"] == "send"
    (line,) = [line for line in done.output.splitlines() if line.startswith("per rank")]
    assert f"buffers {planned.memory.heaviest.buffers / 1024:.2f} KiB (not sharded)" in line
    plain = tessera.plan(recipe({**FOUR_BITS, "lora": {}}))
    assert "buffers" not in plain.describe()
