"""Layers that ranks compute together train, generate and talk as they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera.config.run_config import load_config
from tessera.core.batch import Batch, Segments
from tessera.parallel.apply import build_engine, initialize, parallelize
from tessera.parallel.communication import CommCounter
from tessera.parallel.mesh import Mesh
from tessera.tasks.language import LanguageTask
from tessera.training.setup import ModelSetup, build_meta_model
from tests.dist.layout_cases import SEQUENCE, TENSOR, UNTIED
from tests.dist.layouts import Case, Record, good, measure_selected, params, quietly, recipe_of
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import MODEL, write_chat_set
from tests.toys.engine_models import new_tokens

MODELS: list[dict[str, Any]] = [{}, UNTIED]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("tensor"))


@pytest.mark.parametrize("case", params(TENSOR))
def test_layers_computed_together_train_like_one_process(case: Case, measured: Any) -> None:
    assert good(measured[case.name]), measured[case.name]


def last_losses(rank: int, world: int, folder: Path, parallel: dict[str, Any]) -> list[float]:
    results = []
    for number, model in enumerate(MODELS):
        record = Record()
        overrides = {**model, **parallel, "train.steps": 2}
        quietly(recipe_of(folder / "data", folder / f"{world}-{number}"), overrides, record)
        results.append(float(record.tensors["loss.2"]))
    return results


@pytest.mark.slow  # mixed precision on ranks is in test_user_models and test_trainer_layouts
def test_bf16_under_fsdp_stays_near_fp32(tmp_path: Path) -> None:
    write_chat_set(tmp_path / "data")
    narrow = {
        "precision.compute": "bfloat16",
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "train.global_batch": 2,
    }
    wide = last_losses(0, 1, tmp_path, {"train.global_batch": 2})
    for losses in run_ranks(last_losses, 4, tmp_path, narrow):
        assert losses != wide
        assert losses == pytest.approx(wide, rel=0.01)


# ---------------------------------------------------------------------------------------------- generation


def build(world: int, parallel: dict[str, Any], model: dict[str, Any]) -> tuple[nn.Module, ModelSetup, Mesh]:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart", "config": MODEL}, "train": {"steps": 1}}
    setup = build_meta_model(load_config(recipe, {f"parallel.{k}": v for k, v in parallel.items()} | model), world)
    device = torch.device("cpu")
    mesh = Mesh(setup.plan.layout.axes, device)
    module = parallelize(setup.module, setup.plan, mesh, device)
    initialize(module, 7, device)
    return module, setup, mesh


def prompt(lengths: list[int], values: int) -> Batch:
    """Conversations of so many tokens; the first has a picture of 4 x 4 patches, which makes 4 tokens."""
    chance = torch.Generator().manual_seed(3)
    positions = torch.cat([torch.arange(length) for length in lengths])
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    tensors = {
        "tokens": torch.randint(500, (sum(lengths),), generator=chance),
        "labels": torch.randint(500, (sum(lengths),), generator=chance),
        "positions": positions.expand(3, -1).clone(),
        "pixels": torch.randn(16, values, generator=chance),
        "patch_positions": grid,
        "media_slots": torch.arange(1, 5),
    }
    return Batch(tensors, {"text": Segments.of(lengths), "vision": Segments.of([16])})


def write_tokens(rank: int, world: int, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Prompts whose tokens two ranks do not divide, several in a row and one alone: then a rank has no token at all."""
    results = []
    for parallel, model in pairs:
        module, setup, _ = build(world, parallel, model)
        module.eval()
        values = setup.config.vision.patch_values
        for lengths in ([9, 5, 3], [7]):
            batch = prompt(lengths, values)
            results.append(new_tokens(module, batch, 4, over_ranks=True))
    return results


@pytest.mark.slow
def test_generating_gives_the_tokens_of_one_process_on_every_rank() -> None:
    (alone,) = run_ranks(write_tokens, 1, [({}, {}), ({}, UNTIED)])
    assert len({token for rows in alone for row in rows for token in row}) > 2
    assert run_ranks(write_tokens, 2, [({"tp": 2}, {}), (SEQUENCE, UNTIED)]) == [alone] * 2


# ---------------------------------------------------------------------------------------------- collectives


def count(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Of one micro-batch, over the ranks that compute layers together."""
    results = []
    for parallel in layouts:
        module, setup, mesh = build(world, parallel, {})
        engine = build_engine(module, setup.plan, mesh, torch.device("cpu"))
        batch = prompt([9, 5, 4], setup.config.vision.patch_values)
        with CommCounter(mesh) as counter:
            engine.step(LanguageTask(), [batch])
        results.append({part.kind: part.count for part in counter.volumes if part.axis == "tp"})
    return results


def test_layers_that_share_an_input_sum_its_gradient_once() -> None:
    text, vision = MODEL["text"]["num_hidden_layers"], MODEL["vision"]["depth"]
    whole, parts = run_ranks(count, 2, [{"tp": 2}, SEQUENCE])[0]
    # Each layer twice forward (attention, MLP) and twice backward. The projector: once forward and once backward.
    # Beside these the embedding forward, and the gradient of the last hidden states; and one exchange of the loss.
    assert whole == {"all-reduce": 4 * text + 4 * vision + 2 + 2, "all-gather": 1}
    # In parts: a gather before and a scatter behind each, and the other way round in backward; a gather where they
    # leave the decoder and, backward, where they entered it. Norms' gradients are summed once, at the end of the step.
    assert parts == {
        "all-reduce": 4 * vision + 2 + 2 + 1,
        "all-gather": 4 * text + 2 + 1,
        "reduce-scatter": 4 * text,
    }
