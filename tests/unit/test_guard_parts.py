"""StepLimits, divergence, the conditional update, damage, and who is to blame, each by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.core.batch import Batch
from tessera.core.task import Losses, LossTerm, Task
from tessera.observe.anomaly.activation_trace import trace_step
from tessera.observe.anomaly.attribution import dominant, first_bad
from tessera.observe.anomaly.check import (
    IN_A_ROW,
    LASTING,
    DivergenceDetector,
    RunningLimit,
    StepLimits,
    check_step,
    checked_update,
    step_unless,
)
from tessera.observe.anomaly.state import find_damage, largest
from tessera.optim.adamw import AdamW
from tessera.parallel.engine import SimpleEngine

INF = math.inf


def test_nothing_is_a_spike_before_enough_is_known() -> None:
    running = RunningLimit(10, 100, 20)
    for _ in range(19):
        running.add(1.0)
    assert running.limit == INF
    running.add(1.0)
    assert running.limit == pytest.approx(1.5)


def test_limits_follow_a_falling_loss_and_bear_noise() -> None:
    chance = torch.Generator().manual_seed(0)
    running, crossed = RunningLimit(10, 200, 20), 0
    for step in range(1000):
        value = 5 * math.exp(-step / 100) + 1 + 0.1 * float(torch.randn((), generator=chance))
        crossed += value > running.limit
        running.add(value)
    assert crossed == 0
    assert 1.5 < running.limit < 3.0


def test_what_happens_often_is_no_spike_and_one_outlier_moves_nothing() -> None:
    often = RunningLimit(10, 100, 20)
    for step in range(100):
        often.add(3.0 if step % 8 == 0 else 0.1)
    assert often.limit > 3.0
    once = RunningLimit(10, 100, 20)
    for step in range(60):
        once.add(1000.0 if step == 30 else 1.0)
    assert once.limit == pytest.approx(1.5)


def test_a_new_level_is_accepted_after_a_few_values_and_the_limit_is_no_wider_for_it() -> None:
    """A loss that rises and stays is not a spike for ever: dropping all of it would starve the run."""
    running = RunningLimit(10, 200, 20)
    for step in range(100):
        running.add(0.5 + 0.01 * (step % 3))
    narrow = running.limit - running.level
    above = 0
    while running.limit < 2.0:
        above += 1
        running.add(2.0)
        if above == IN_A_ROW:
            running.accept_new_level()
    assert above == IN_A_ROW
    assert running.level == 2.0
    assert running.limit - running.level == pytest.approx(4 * narrow, rel=0.1)  # as wide for its level as it was


def test_no_sequence_of_values_is_above_the_limit_for_long() -> None:
    """Whatever comes, steps, ramps or noise with a heavy tail: alarms are few, and never many in a row."""
    chance = torch.Generator().manual_seed(3)
    for kind in range(20):
        running, alarms, in_a_row, most = RunningLimit(10, 200, 50), 0, 0, 0
        level = 1.0
        for step in range(2000):
            if step % 300 == 299:
                level *= float(torch.rand((), generator=chance)) * 10
            heavy = float(torch.rand((), generator=chance)) ** -(kind % 4 / 4)  # up to a Pareto tail of 4/3
            value = level * heavy
            in_a_row = in_a_row + 1 if value > running.limit else 0
            alarms += in_a_row > 0
            most = max(most, in_a_row)
            running.add(value)
            if in_a_row == IN_A_ROW:
                running.accept_new_level()
                in_a_row = 0
        assert most <= IN_A_ROW
        assert alarms <= 40, kind  # of 2,000 steps; a level that rises takes 3


def test_what_clipping_lets_through_is_no_spike() -> None:
    running = RunningLimit(20, 200, 20, ordinary=1.0)
    for _ in range(100):
        running.add(0.01)
    assert running.limit >= 1.0


def test_small_losses_of_a_run_that_learnt_much_are_judged_less_strictly() -> None:
    learnt, always = RunningLimit(10, 100, 20), RunningLimit(10, 100, 20)
    for step in range(400):
        learnt.add(6.0 * 0.95**step + 0.01)
        always.add(0.01)
    assert always.limit == pytest.approx(0.015)
    assert learnt.limit > 5 * always.limit


def test_limits_come_back_from_a_checkpoint() -> None:
    running, again = RunningLimit(10, 50, 5), RunningLimit(10, 50, 5)
    for step in range(30):
        running.add(1 + step % 3)
    again.restore(running.state())
    assert again.limit == running.limit
    trend, same = DivergenceDetector(), DivergenceDetector()
    for step in range(40):
        trend.add(5.0 - step / 10, 5.0 - step / 10)
    same.restore(trend.state())
    assert (same.start, same.best, same.lost) == (trend.start, trend.best, trend.lost)


def follow(losses: list[float]) -> list[int]:
    """Steps at which divergence is told."""
    trend, running, told = DivergenceDetector(), RunningLimit(10, 200, 50), []
    for step, loss in enumerate(losses):
        running.add(loss)
        if trend.add(loss, running.level):
            trend.mark_reported()
            told.append(step)
    return told


def test_divergence_is_a_loss_that_stays_above_where_it_began() -> None:
    falling = [6.0 * 0.97**step + 0.5 for step in range(200)]
    assert follow(falling) == []
    assert follow(falling + [3.0] * 300) == []  # worse than it was, but most is still learnt: perhaps other data
    assert follow(falling + [9.0] * 20 + falling) == []  # it came back by itself
    (step,) = follow(falling + [9.0] * 300)
    assert 200 + LASTING - 1 <= step <= 200 + LASTING + 10
    assert len(follow([2.0, 20.0, 8.0, 40.0] + [30.0] * 100)) == 1  # with far too high a learning rate: at once
    assert follow([0.1] + [3.0 / (1 + step % 30) for step in range(200)]) == []  # the first sample was easy by chance
    assert len(follow(falling + [9.0] * 100 + falling + [9.0] * 100)) == 2


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (1.0, 1.0, [0, 0]),
        (math.nan, 1.0, [1, 0]),
        (1.0, INF, [1, 1]),
        (5.1, 1.0, [0, 1]),
        (1.0, 7.1, [0, 1]),
        (-INF, 1.0, [1, 0]),
    ],
)
def test_judgement(loss: float, norm: float, expected: list[int]) -> None:
    checked = check_step(torch.tensor(loss), torch.tensor(norm), StepLimits(5.0, 7.0))
    assert checked[:2].tolist() == expected
    assert checked.isfinite().all()


@pytest.mark.parametrize(("norm", "clip_norm"), [(0.5, 1.0), (40.0, 1.0), (40.0, None)])
def test_the_update_of_a_spike_is_clipped_to_what_is_usual_and_no_other_is_touched(
    norm: float, clip_norm: float | None
) -> None:
    def update(limits: StepLimits) -> Tensor:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = AdamW([{"params": [weight], "lr": 1.0, "weight_decay": 0.0}], (0.0, 0.0), 1e3)  # as SGD / 1000
        weight.grad = torch.full((4,), norm / 2)
        optimizer.clip_factor = torch.tensor(min(1.0, (clip_norm or INF) / norm))
        check = checked_update(optimizer, torch.tensor(3.0), torch.tensor(norm), limits)
        assert check.applied
        return 1000 * weight.detach().norm()

    usual = min(norm, clip_norm or INF)
    roof = INF if clip_norm is None else clip_norm
    assert float(update(StepLimits(2.0, INF, roof, 0.25))) == pytest.approx(0.25, rel=1e-2)
    assert float(update(StepLimits(4.0, INF, roof, 0.25))) == float(update(StepLimits()))  # no spike: bit by bit
    assert float(update(StepLimits(2.0, INF, roof, 1e6))) == pytest.approx(usual, rel=5e-2)  # never more than before


def test_a_spike_can_be_held_back() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = AdamW([{"params": [weight], "lr": 1.0, "weight_decay": 0.0}], (0.9, 0.9), 1e-8)
    weight.grad = torch.ones(4)
    check = checked_update(
        optimizer, torch.tensor(3.0), torch.tensor(2.0), StepLimits(2.0, INF, 1.0, 0.5, drop_spikes=True)
    )
    assert (check.kind, check.applied) == ("loss spike", False)
    assert not weight.detach().any()


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
            step_unless(optimizer, check_step(torch.tensor(scale), torch.tensor(1.0), StepLimits())[0])
            assert not hasattr(optimizer, "found_inf")
        else:
            check = checked_update(optimizer, torch.tensor(scale), torch.tensor(1.0), StepLimits())
            assert check.applied == math.isfinite(scale)
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
    damage = find_damage(tensors, normal)
    assert [(one.name, one.count) for one in damage] == [("a", 1), ("b", 2)]
    assert math.isnan(damage[1].value)
    tensors["a"][2] = 50.0  # training may come to that
    assert [one.name for one in find_damage(tensors, normal)] == ["b"]
    assert find_damage({"new": torch.full((2,), 1e30)}, normal) == []
    tensors["a"][2], tensors["b"][:] = 500.0, 0.0  # 500 is no damage where the learning rate is that high
    assert [one.name for one in find_damage(tensors, normal)] == ["a"]
    assert find_damage(tensors, normal, moved=60.0) == []


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


class Sum(Task):
    def counts(self, batch: Batch) -> dict[str, int]:
        return {"rows": len(batch["x"])}

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        return Losses([LossTerm("sum", outputs.sum(), "rows")])


def batches(*values: float) -> list[Batch]:
    return [Batch({"x": torch.tensor([[value]])}) for value in values]


@pytest.mark.parametrize(
    ("middle", "value", "expected"),
    [
        (Divided(), 50.0, "forward of block.1"),
        (Rooted(), 200.0, "gradient of the output of first"),
        (nn.Identity(), math.inf, "forward of first (its input was not finite already)"),
    ],
)
def test_the_first_bad_module_is_found(middle: nn.Module, value: float, expected: str) -> None:
    module = Net(middle)
    trace = trace_step(module, SimpleEngine(module), Sum(), batches(1.0, value, 2.0))
    bad_module = first_bad(trace.records)
    assert bad_module is not None
    assert bad_module[1] == expected
    assert [trace.finite(number) for number in range(3)] == [True, False, True]
    assert set(trace.losses) == {0, 1, 2}
    assert not module.first._forward_hooks


def test_all_is_well_when_it_is() -> None:
    module = Net(nn.Identity())
    trace = trace_step(module, SimpleEngine(module), Sum(), batches(1.0, 2.0))
    assert first_bad(trace.records) is None
    assert trace.grad_sq(0) > 0


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
    assert dominant(excess) == expected


def test_a_checkpoint_of_an_earlier_step_can_be_asked_for(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=3)
    for step in (1, 2):
        manager.save(step, {"x": torch.full((2,), float(step))}, {"rows_drawn": step}, "")
    x, extra = torch.zeros(2), torch.full((1,), 5.0)
    resumed = manager.resume({"x": x}, may_lack={"ema.x": extra}, before=2)
    assert resumed == (1, {"rows_drawn": 1})
    assert x.tolist() == [1.0, 1.0]
    assert extra.tolist() == [5.0]
    assert manager.resume({"x": x}, before=1) is None
