"""A block of every family is one graph for the compiler: where it breaks, kernels are not fused and memory grows.

Nothing is compiled here: the compiler follows the block, and what it found is run as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessera.config.pattern import matches
from tessera.config.run_config import load_config
from tessera.diffusion.family import GenerationSpec
from tessera.models import FAMILIES
from tessera.parallel.apply import build_engine, materialize, parallelize_on_meta
from tessera.parallel.mesh import Mesh
from tessera.runtime import distributed as dist
from tessera.tools.dry_run import example_batch
from tessera.training.setup import build_meta_model

CPU = torch.device("cpu")
QUICK = ("wan",)
OTHERS = sorted(set(FAMILIES.names()) - {"module", "transformers", *QUICK})


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_compiler_follows_every_block_of_a_family_to_its_end(family: str) -> None:
    generation = isinstance(FAMILIES.get(family), GenerationSpec)
    recipe: dict[str, Any] = {
        "model": {"family": family, "preset": "quickstart"},
        "train": {"steps": 1, "device": "cpu"},
        "data": {"length": 128, **({"kind": "generation"} if generation else {})},
        "precision": {"compute": "bfloat16"},  # the experts of fp32 leave the graph
    }
    config = load_config(recipe)
    setup = build_meta_model(config, 1)
    torch.compiler.reset()
    followed = 0
    with dist.fake_world(1, 0):
        mesh = Mesh(setup.plan.layout.axes, CPU)
        batch = example_batch(config, setup, mesh)
        module = materialize(parallelize_on_meta(setup.module, setup.plan, mesh, CPU), setup.plan, CPU)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                nn.init.normal_(tensor, std=0.02)
        blocks = setup.spec.main.plan(setup.config).blocks
        for path, block in module.named_modules():
            if any(matches(pattern, path) for pattern in blocks):
                block.compile(backend="eager", fullgraph=True)
                followed += 1
        build_engine(module, setup.plan, mesh, CPU).step(setup.task, [batch])
    assert followed > 1
