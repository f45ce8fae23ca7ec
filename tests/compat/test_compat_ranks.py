"""`pretrain` on two ranks: gradients are Megatron's, and the example of the migration guide trains as a recipe does."""

from __future__ import annotations

import os
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import tessera
from tessera.runtime.files import read_metrics
from tessera_compat import state
from tessera_compat.mindspeed_mm import training
from tessera_compat.mindspeed_mm.forward_step import MicroBatch
from tessera_compat.served import serving
from tessera_compat.shards.files import LATEST
from tests.close import assert_as_close
from tests.compat.test_parallel_fsdp2_file import EXAMPLE
from tests.dist.spawn import run_ranks
from tests.toys import pretrain_parts as toy
from tests.toys.migrated import CustomDataset, PlainModel

CASES = {  # form of the loss, whether per token, context-parallel size
    "mean": (toy.mean_loss, False, 1),
    "mean, two ranks with a part of each batch": (toy.mean_loss, False, 2),
    "sum": (toy.sum_loss, False, 1),
    "sum per token": (toy.sum_loss, True, 1),
}


def micro_batches(dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Return the four micro-batches of a step: rank r of two has those with numbers r and r + 2."""
    points = toy.Points(8)
    return [{"x": points.x[i : i + 2].to(dtype), "loss_mask": points.mask[i : i + 2].to(dtype)} for i in range(0, 8, 2)]


def gradients_here(rank: int, world: int, folder: str) -> dict[str, dict[str, list[float]]]:
    """Return the gradients of one step for each case, whole."""
    os.environ["WORLD_SIZE"] = str(world)
    gradients: dict[str, dict[str, list[float]]] = {}
    for number, (case, (loss, per_token, cp)) in enumerate(CASES.items()):
        more = ["--context-parallel-size", str(cp), "--use-torch-fsdp2"]
        more += ["--calculate-per-token-loss"] if per_token else []
        with toy.command_line(*toy.flags(Path(folder) / str(number), *more, batch=8 // cp)):
            training.initialize_megatron()
        session = training.current_session()
        training.setup_model_and_optimizer(toy.model_provider, 1)

        def forward_step(data_iterator: Any, model: Any, loss: Any = loss) -> Any:
            batch = next(data_iterator)
            return model(batch["x"]), partial(loss, batch["loss_mask"])

        session.task.forward_step = forward_step
        batches = micro_batches()[rank::2]
        assert len(batches) == session.micro_batches
        session.trainer.engine.step(session.task, [MicroBatch.of(batch) for batch in batches])
        parameters = dict(session.trainer.module.named_parameters())
        assert any(isinstance(parameter, DTensor) for parameter in parameters.values())  # in shards
        grads = {name: parameter.grad for name, parameter in parameters.items()}
        whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        gradients[case] = {name: grad.flatten().tolist() for name, grad in whole.items() if grad is not None}
        session.abandon()
        state.destroy()
    return gradients


def by_formula(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients that Megatron has after its reduction over ranks, from its own rules."""
    loss, per_token, cp = CASES[case]
    net = toy.model_provider().to(dtype)
    results = [loss(batch["loss_mask"], net(batch["x"])) for batch in micro_batches(dtype)]
    ranks, here = 2, len(results) // 2  # micro-batches of one rank
    if per_token:  # no division in the schedule; sums over ranks; then all is divided by the tokens of all ranks
        total = sum(result[0] for result in results) / sum(result[1] for result in results)
    else:  # loss x cp / micro-batches in the schedule; the mean over dp x cp ranks
        means = [result[0] / result[1] if len(result) == 3 else result[0] for result in results]
        total = sum(mean * cp / here for mean in means) / ranks
    assert isinstance(total, Tensor)
    total.backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[float]]]]:
    return run_ranks(gradients_here, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("case", CASES)
def test_gradients_on_two_ranks_are_those_of_megatron(
    case: str, gradients: list[dict[str, dict[str, list[float]]]]
) -> None:
    exact, peer = by_formula(case, torch.float64), by_formula(case, torch.float32)
    assert gradients[0][case] == gradients[1][case]
    for name, gradient in exact.items():
        ours = torch.tensor(gradients[0][case][name]).reshape(gradient.shape)
        # A bias is a sum of residuals that cancel; the weights beside it sum terms of that size.
        beside = exact[name.replace("bias", "weight")]
        assert_as_close(ours, peer[name], gradient, what=f"{case}: {name}", roundings=2, terms=beside)


# ---------------------------------------------------------------------------------------------- the migration guide


def flags_of_the_guide(folder: Path) -> list[str]:
    """Return the launch flags that the guide prints, and those that a Megatron job has."""
    more = f"--use-torch-fsdp2 --fsdp2-config-path {folder / 'fsdp2_config.yaml'} --ckpt-format torch_dcp"
    return toy.flags(folder / "ckpt", *f"{more} --untie-embeddings-and-output-weights".split(), iterations=3)


def native_recipe(folder: Path) -> dict[str, Any]:
    """Return the same training as a recipe, in our own words."""
    parts = [f"text_decoder.{name}" for name in ("output_layer", "embedding", "rotary_pos_emb", "decoder.layers.{*}")]
    return {
        "name": "native",
        "out": str(folder),
        "model": {"family": "module"},
        "data": {"workers": 0},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 1, "seed": 3, "device": "cpu"},
        "optim": {"lr": 0.01, "betas": [0.9, 0.999], "weight_decay": 0.01, "schedule": {"kind": "constant"}},
        "parallel": {
            **{"wrap": parts, "ignore": ["image_encoder"], "recompute": parts[-1:], "use_reentrant": True},
            **{"prefetch_forward": 2, "prefetch_backward": 2, "pin_memory": False},
        },
        "precision": {"compute": "bfloat16", "reduce": "float32", "cast_inputs": True},
        "checkpoint": {"at_end": False},
    }


def train_both(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """Return the losses of the guide's script and of the recipe."""
    os.environ["WORLD_SIZE"] = str(world)
    script = Path(__file__).parents[1] / "acceptance" / "seed_000_script.py"
    with serving(), toy.command_line(*flags_of_the_guide(Path(folder))):
        runpy.run_path(str(script), run_name="__main__")
    torch.manual_seed(3)
    model, loader = PlainModel({"width": 8, "depth": 3}), DataLoader(CustomDataset(), batch_size=2)
    native = tessera.train(native_recipe(Path(folder)), model=model, dataset=loader)
    rows = read_metrics(Path(folder) / "ckpt" / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "train"], [row["loss"] for row in native.metrics]


@pytest.mark.slow
def test_the_job_of_the_migration_guide_trains_as_a_recipe_does(tmp_path: Path) -> None:
    (tmp_path / "fsdp2_config.yaml").write_text(EXAMPLE)
    guide, native = run_ranks(train_both, 2, str(tmp_path))[0]
    assert len(guide) == 3
    # Two samples to a micro-batch and four micro-batches: the two divide by powers of two, which rounds nothing.
    assert guide == native
    assert (tmp_path / "ckpt" / LATEST).read_text() == "3"
