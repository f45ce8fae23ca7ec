"""Experts dealt over ranks train like one process, with loads kept even by a loss."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tessera.config.run_config import ParallelSection
from tessera.core.model_plan import ModelPlan
from tessera.nn.moe import Dispatch, MoE, MoEShape, TokenRows, balance_loss
from tessera.parallel.experts import RankDispatch, apply_experts, plan_experts
from tessera.parallel.mesh import Mesh, make_axes
from tessera.training.run import resume
from tests.dist.layout_cases import EXPERTS as EXPERT_ROWS
from tests.dist.layout_cases import UNBALANCED
from tests.dist.layouts import (
    LIMIT,
    STEPS,
    Case,
    Record,
    experts_recipe,
    good,
    measure_selected,
    params,
    quietly,
    relative,
)
from tests.dist.spawn import run_ranks
from tests.toys import token_rows


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return measure_selected(request, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("case", params(EXPERT_ROWS))
def test_experts_train_like_one_process(case: Case, measured: dict[str, dict[str, float]]) -> None:
    row = measured[case.name]
    assert good(row), row


# ---------------------------------------------------------------------------------------------- ranks without tokens

EXPERTS, TOKENS, HIDDEN = 4, 6, 8


def stacks() -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((EXPERTS, 16, HIDDEN), (EXPERTS, 16, HIDDEN), (EXPERTS, HIDDEN, 16))
    return [torch.randn(size) for size in sizes]


def tokens_of(rank: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two experts to a rank. With "first" all tokens want those of rank 0; with "silent" rank 1 has no token."""
    torch.manual_seed(1 + rank)
    count = 0 if how == "silent" and rank == 1 else TOKENS
    high = 2 if how == "first" else EXPERTS
    ids = torch.stack([torch.randperm(high)[:2] for _ in range(count)]) if count else torch.empty((0, 2), dtype=int)
    return torch.randn(count, HIDDEN), ids, torch.rand(count, 2)


def send_to_experts(rank: int, world: int, how: str) -> Any:
    local = [stack.chunk(world)[rank].clone().requires_grad_() for stack in stacks()]
    x, ids, weights = tokens_of(rank, how)
    x.requires_grad_()
    weights.requires_grad_()

    mesh = init_device_mesh("cpu", (world,))
    dealt = [DTensor.from_local(part, mesh, [Shard(0)]) for part in local]
    out = RankDispatch("auto", dist.group.WORLD)(x, ids, weights, *dealt)
    gradients = torch.autograd.grad(out.square().sum(), (x, weights, *local))
    return out.tolist(), [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize("how", ["all", "first", "silent"])
def test_ranks_may_have_nothing_to_send_or_get_nothing(how: str) -> None:
    results = run_ranks(send_to_experts, 2, how)
    whole = [stack.requires_grad_() for stack in stacks()]
    per_rank = []
    total = torch.zeros(())
    for rank in range(2):
        x, ids, weights = tokens_of(rank, how)
        x.requires_grad_()
        weights.requires_grad_()
        out = Dispatch("eager")(x, ids, weights, *whole)
        total = total + out.square().sum()
        per_rank.append((x, weights, out))
    expected = torch.autograd.grad(total, [t for x, weights, _ in per_rank for t in (x, weights)] + whole)
    for rank, (out, gradients) in enumerate(results):
        assert distance(out, per_rank[rank][2].detach()) < LIMIT
        right = [*expected[2 * rank : 2 * rank + 2], *(gradient.chunk(2)[rank] for gradient in expected[4:])]
        for gradient, tensor in zip(gradients, right, strict=True):
            assert distance(gradient, tensor) < LIMIT


def distance(result: Any, expected: Tensor) -> float:
    return relative(torch.tensor(result).view(expected.shape), expected) if expected.numel() else len(result)


# ---------------------------------------------------------------------------------------------- rows on several ranks


class OneLayer(nn.Module):
    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.token_rows = TokenRows()
        self.moe = MoE(shape)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.3)


def balance_parts(rank: int, world: int, ranks: int) -> Any:
    """Router gradients of the balance alone, from this rank's every so-many-th token."""
    module = OneLayer(MoEShape(HIDDEN, 16, EXPERTS, 2, balance=0.5))
    if ranks > 1:
        section, said = ParallelSection(cp=ranks), ModelPlan(blocks=(), tensor={}, experts=("moe.experts",))
        axes = make_axes(section, said, world)
        plan = plan_experts(section, said, module, axes)
        assert plan is not None
        apply_experts(module, plan, Mesh(axes, torch.device("cpu")))
    batch = token_rows.TokenRows(24, 64, seed=5).batch([0, 1, 2])
    torch.manual_seed(7)
    x, local_rows = torch.randn(72, HIDDEN), torch.arange(rank, 72, ranks)
    if ranks > 1:
        batch = batch.with_tensors(token_index=local_rows, labels=batch["labels"][local_rows])
    rows = module.token_rows(batch)
    out, used = module.moe(x[local_rows], rows)
    ((out * 0.0).sum() + 0.5 * balance_loss(used, 2, rows)).backward()
    assert module.moe.router.weight.grad is not None
    return module.moe.router.weight.grad.tolist()


def test_a_row_on_several_ranks_is_balanced_as_one() -> None:
    gradient = torch.tensor(balance_parts(0, 1, 1))
    parts = run_ranks(balance_parts, 2, 2)
    assert relative(sum(torch.tensor(part) for part in parts), gradient) < LIMIT


# ---------------------------------------------------------------------------------------------- checkpoints


def train_and_save(rank: int, world: int, out: Path) -> None:
    recipe = {**experts_recipe(out), "checkpoint": {"at_end": True}}
    quietly(recipe, {"model.config": UNBALANCED, "parallel.ep": world, "train.steps": 2}, Record())


FEW = {"experts": 2}


def train_few_and_save(rank: int, world: int, out: Path) -> list[int]:
    """The dimensions of expert weights that ranks share."""
    recipe = {**experts_recipe(out), "checkpoint": {"at_end": True}}
    record = Shares()
    quietly(recipe, {"model.config": FEW, "train.steps": 2, "train.ema": {"decay": 0.9}}, record)
    return record.dims


class Shares(Record):
    def on_start(self, trainer: Any) -> None:
        super().on_start(trainer)
        stacked = [p for p in trainer.module.parameters() if p.dim() == 3]
        self.dims = sorted({placement.dim for p in stacked for placement in p.placements})


@pytest.mark.slow
def test_a_run_with_fewer_experts_than_ranks_goes_on_in_one_process(tmp_path: Path) -> None:
    record = Record()
    quietly(experts_recipe(tmp_path / "one"), {"model.config": FEW, "train.ema": {"decay": 0.9}}, record)
    assert run_ranks(train_few_and_save, 4, tmp_path / "four") == [[1]] * 4
    two = Record()
    with contextlib.redirect_stderr(io.StringIO()):
        resume(tmp_path / "four" / "experts", {"train.steps": STEPS}, callbacks=[two])
    late = [
        name for name in record.tensors if not name.startswith(("gradient.", "loss.1", "loss.2", "norm.1", "norm.2"))
    ]
    assert {name for name in late if relative(two.tensors[name], record.tensors[name]) > LIMIT} == set()


@pytest.mark.slow  # with fewer experts than ranks, below, is the harder case
def test_a_run_with_dealt_experts_goes_on_in_one_process(tmp_path: Path) -> None:
    record = Record()
    quietly(experts_recipe(tmp_path / "one"), {"model.config": UNBALANCED}, record)
    run_ranks(train_and_save, 2, tmp_path / "two")
    two = Record()
    with contextlib.redirect_stderr(io.StringIO()):
        resume(tmp_path / "two" / "experts", {"parallel.ep": 1, "train.steps": STEPS}, callbacks=[two])
    late = [
        name for name in record.tensors if not name.startswith(("gradient.", "loss.1", "loss.2", "norm.1", "norm.2"))
    ]
    assert {name for name in late if relative(two.tensors[name], record.tensors[name]) > LIMIT} == set()
