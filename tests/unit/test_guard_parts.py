"""Limits, the conditional update, damage, and who is to blame, each by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.core.types import Batch, LossOut
from tessera.parallel.engine import SimpleEngine
from tessera.train.guard.check import judge, step_unless, update_unless_bad
from tessera.train.guard.damage import find_damage, largest
from tessera.train.guard.limits import Running
from tessera.train.guard.probe import listen
from tessera.train.guard.suspects import first_bad, first_unlike, most_of

INF = math.inf


def test_nothing_is_a_spike_before_enough_is_known() -> None:
    running = Running(10, 100, 20)
    for _ in range(19):
        running.add(1.0)
    assert running.limit == INF
    running.add(1.0)
    assert running.limit == pytest.approx(1.5)


def test_limits_follow_a_falling_loss_and_bear_noise() -> None:
    chance = torch.Generator().manual_seed(0)
    running, crossed = Running(10, 200, 20), 0
    for step in range(1000):
        value = 5 * math.exp(-step / 100) + 1 + 0.1 * float(torch.randn((), generator=chance))
        crossed += value > running.limit
        running.add(value)
    assert crossed == 0
    assert 1.5 < running.limit < 3.0


def test_what_happens_often_is_no_spike_and_one_outlier_moves_nothing() -> None:
    often = Running(10, 100, 20)
    for step in range(100):
        often.add(3.0 if step % 8 == 0 else 0.1)
    assert often.limit > 3.0
    once = Running(10, 100, 20)
    for step in range(60):
        once.add(1000.0 if step == 30 else 1.0)
    assert once.limit == pytest.approx(1.5)


def test_limits_come_back_from_a_checkpoint() -> None:
    running, again = Running(10, 50, 5), Running(10, 50, 5)
    for step in range(30):
        running.add(1 + step % 3)
    again.restore(running.state())
    assert again.limit == running.limit


@pytest.mark.parametrize(
    ("loss", "norm", "bad"),
    [(1.0, 1.0, 0), (math.nan, 1.0, 1), (1.0, math.inf, 1), (5.1, 1.0, 1), (1.0, 7.1, 1), (-math.inf, 1.0, 1)],
)
def test_judgement(loss: float, norm: float, bad: int) -> None:
    assert float(judge(torch.tensor(loss), torch.tensor(norm), 5.0, 7.0)) == bad


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in [*module.parameters(), *moments]]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_update_leaves_weights_moments_and_counts_alone(on_device: bool) -> None:
    module = nn.Linear(3, 3)
    optimizer = optimizer_of(module)

    def update(scale: float) -> None:
        module(torch.ones(2, 3)).sum().mul(scale).backward()
        if on_device:
            step_unless(optimizer, judge(torch.tensor(scale), torch.tensor(1.0), INF, INF))
            assert not hasattr(optimizer, "found_inf")
        else:
            verdict = update_unless_bad(optimizer, torch.tensor(scale), torch.tensor(1.0), INF, INF)
            assert verdict.bad == (not math.isfinite(scale))
        optimizer.zero_grad()

    update(1.0)
    before = snapshot(module, optimizer)
    update(math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(module, optimizer), strict=True))
    update(1.0)
    assert not any(torch.equal(a, b) for a, b in zip(before[:2], module.parameters(), strict=True))


def test_damage_is_found_where_numbers_are_impossible() -> None:
    tensors = {"a": torch.ones(4), "b": torch.zeros(3), "count": torch.tensor(7)}
    normal = largest(tensors)
    assert find_damage(tensors, normal) == []
    tensors["a"][2] = 3e38
    tensors["b"][:2] = math.nan
    found = find_damage(tensors, normal)
    assert [(one.name, one.count) for one in found] == [("a", 1), ("b", 2)]
    assert math.isnan(found[1].value)
    tensors["a"][2] = 50.0  # training may come to that
    assert [one.name for one in find_damage(tensors, normal)] == ["b"]
    assert find_damage({"new": torch.full((2,), 1e30)}, normal) == []


# ---------------------------------------------------------------------------------------------- first bad module


class Root(torch.autograd.Function):
    """Its value is fine where its gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 100, math.nan, gradient)


class Rooted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Root.apply(x)


class Divided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.detach() - 50)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False)
        self.block = nn.Sequential(nn.Identity(), middle)
        self.last = nn.Linear(1, 1)
        nn.init.ones_(self.first.weight)

    def forward(self, batch: Batch) -> Tensor:
        return self.last(self.block(self.first(batch["x"])))


class Sum:
    def inputs(self, batch: Batch) -> Batch:
        return batch

    def loss(self, outputs: Tensor, batch: Batch) -> LossOut:
        return LossOut(outputs.sum(), torch.tensor(float(len(outputs))))


def batches(*values: float) -> list[Batch]:
    return [Batch({"x": torch.tensor([[value]])}) for value in values]


@pytest.mark.parametrize(
    ("middle", "value", "expected"),
    [
        (Divided(), 50.0, "forward of block.1"),
        (Rooted(), 200.0, "backward of block.1"),
        (nn.Identity(), math.inf, "forward of first (what went in was not finite already)"),
    ],
)
def test_the_first_bad_module_is_found(middle: nn.Module, value: float, expected: str) -> None:
    module = Net(middle)
    heard = listen(module, SimpleEngine(module), Sum(), batches(1.0, value, 2.0))
    culprit = first_bad(heard.events)
    assert culprit is not None
    assert culprit.text == expected
    assert [heard.fine(number) for number in range(3)] == [True, False, True]
    assert set(heard.losses) == {0, 1, 2}
    assert not module.first._forward_hooks


def test_all_is_well_when_it_is() -> None:
    module = Net(nn.Identity())
    heard = listen(module, SimpleEngine(module), Sum(), batches(1.0, 2.0))
    assert first_bad(heard.events) is None
    assert heard.pull(0) > 0


def test_a_module_that_stands_out_is_named() -> None:
    module = Net(nn.Identity())
    heard = listen(module, SimpleEngine(module), Sum(), batches(1.0, 1000.0))
    of = lambda number: [e for e in heard.events if e.microbatch == number]  # noqa: E731
    assert first_unlike(of(1), of(0)) == "first"
    assert first_unlike(of(0), of(1)) is None


@pytest.mark.parametrize(
    ("excess", "expected"),
    [
        ([0.1, 9.0, 0.2, -1.0], [1]),
        ([5.0, 5.0, 0.1, 0.1], [0, 1]),
        ([1.0, 1.0, 1.0, 1.0], []),
        ([3.0], [0]),
        ([-1.0, -2.0], []),
        ([], []),
    ],
)
def test_few_are_to_blame_or_none(excess: list[float], expected: list[int]) -> None:
    assert most_of(excess) == expected


def test_a_checkpoint_of_an_earlier_step_can_be_asked_for(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=3)
    for step in (1, 2):
        manager.save(step, {"x": torch.full((2,), float(step))}, {"rows_drawn": step}, "")
    x, extra = torch.zeros(2), torch.full((1,), 5.0)
    found = manager.resume({"x": x}, may_lack={"ema.x": extra}, before=2)
    assert found == (1, {"rows_drawn": 1})
    assert x.tolist() == [1.0, 1.0]
    assert extra.tolist() == [5.0]
    assert manager.resume({"x": x}, before=1) is None
