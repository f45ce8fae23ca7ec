"""An engine over a model on several ranks: tokens, adapters and replaced weights as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.checkpoint.state import model_tensors
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tessera.inference.adapters import bank_of
from tests.dist.layout_cases import FOUR_LAYERS
from tests.dist.spawn import run_ranks
from tests.toys.banked import NEW, Banked, alone, linear_layers, prompt
from tests.toys.chat_set import chat_recipe, write_chat_set

LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {}]  # tensor parallelism; sharded weights
CASES = [(name, seed) for seed in (1, 2) for name in (None, "a", "b")]
FACTOR = 1.25


def answers(rank: int, world: int, folder: Path, adapters: dict[str, Path]) -> list[list[list[int]]]:
    """Return for each layout the answers to all cases, then those of the base with other weights."""
    results = []
    for layout in LAYOUTS:
        model, _ = tessera.load(folder, device="cpu", parallel=layout)
        engine = Engine(model, EngineLimits(blocks=64, block_size=4, tokens=19), bank_of(model))
        for name, path in adapters.items():
            engine.load_adapter(name, path)
        served = Banked(model.spec, model.config, None)
        requests = [
            Request(prompt(served, seed, image=seed == 1), max_new_tokens=NEW, adapter=name) for name, seed in CASES
        ]
        results.append([list(answer.tokens) for answer in engine.run(requests)])
        plain, _ = tessera.load(folder, device="cpu")
        engine.replace_weights(changed(plain.module).items())
        base = [request for request in requests if request.adapter is None]
        results.append([list(answer.tokens) for answer in engine.run(base)])
    return results


def changed(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: FACTOR * tensor.detach() for name, tensor in model_tensors(module).items() if "mlp" in name}


@pytest.mark.slow  # trains and exports a model, and loads it in two layouts
def test_answers_over_ranks_are_those_of_one_rank(tmp_path: Path) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "data", samples=8), tmp_path, steps=1)
    recipe["model"]["config"] = {**FOUR_LAYERS, "text": {**FOUR_LAYERS["text"], "initializer_range": 0.3}}
    recipe["checkpoint"] = {"export": True, "prove": "never"}
    folder = tessera.train(recipe).folder / "hf"
    model, _ = tessera.load(folder, device="cpu")
    banked = Banked(model.spec, model.config, model.module)
    layers = linear_layers(model.module, "text.")
    tower = linear_layers(model.module, "vision.blocks")
    adapters = {
        "a": banked.write(tmp_path / "a", [*layers, *tower], 1, size=0.5),
        "b": banked.write(tmp_path / "b", layers[1::2], 2, rank=9, size=0.5),
    }
    models = {None: model.module, **{name: banked.merged(path) for name, path in adapters.items()}}
    expected = [alone(models[name], prompt(banked, seed, image=seed == 1)) for name, seed in CASES]
    with torch.no_grad():
        for name, tensor in changed(model.module).items():
            model_tensors(model.module)[name].copy_(tensor)
    replaced = [alone(model.module, prompt(banked, seed, image=seed == 1)) for seed in (1, 2)]
    assert sum(certain for _, certain in [*expected, *replaced]) > 0.8 * NEW * 8, "few tokens are compared"
    assert len({tuple(tokens) for tokens, _ in [*expected, *replaced]}) > 6, "adapters, prompts and weights matter"
    for of_rank in run_ranks(answers, 2, folder, adapters):
        for computed, wanted in zip(of_rank, [expected, replaced] * len(LAYOUTS), strict=True):
            for tokens, (exact, certain) in zip(computed, wanted, strict=True):
                assert len(tokens) == NEW
                assert tokens[:certain] == exact[:certain]
