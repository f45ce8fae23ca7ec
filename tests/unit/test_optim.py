from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from tessera.config.run_config import OptimSection, ScheduleSection
from tessera.errors import TesseraError
from tessera.optim.adamw import AdamW
from tessera.optim.optimizer import (
    build_optimizer,
    clip_gradients,
    lr_factor,
    parameter_groups,
    set_learning_rate,
    total_norm,
)
from tessera.runtime.gradients import scale_gradients


def net() -> nn.Module:
    module = nn.ModuleDict({"vision": nn.Linear(4, 4), "text": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    module["norm"].bias.requires_grad_(False)
    return module


def test_groups_by_pattern_last_one_wins() -> None:
    section = OptimSection.model_validate(
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "groups": [
                {"pattern": "vision", "lr": 1e-5},
                {"pattern": "vision.bias", "lr": 1e-4, "weight_decay": 0.2},
            ],
        }
    )
    groups = {name: (g["lr"], g["weight_decay"]) for g in parameter_groups(net(), section) for name in g["names"]}
    assert groups == {
        "vision.weight": (1e-5, 0.1),
        "vision.bias": (1e-4, 0.2),
        "text.weight": (1e-3, 0.1),
        "text.bias": (1e-3, 0.0),
        "norm.weight": (1e-3, 0.0),
    }


def test_a_group_for_nothing_is_an_error() -> None:
    section = OptimSection.model_validate({"groups": [{"pattern": "visoin"}]})
    with pytest.raises(TesseraError) as caught:
        parameter_groups(net(), section)
    assert caught.value.nearest == "vision"


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules(kind: str) -> None:
    final = {} if kind == "constant" else {"final": 0.1}
    section = ScheduleSection.model_validate({"kind": kind, "warmup": 10, **final})
    values = [lr_factor(section, step, 110) for step in range(110)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[10] == pytest.approx(1.0)
    if kind == "constant":
        assert set(values[10:]) == {1.0}
        return
    assert all(a > b for a, b in itertools.pairwise(values[10:]))
    assert 0.1 <= values[-1] < 0.12
    middle = lr_factor(section, 60, 110)
    assert middle == pytest.approx(0.55)
    assert kind == "linear" or lr_factor(section, 35, 110) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_learning_rates_keep_their_ratio() -> None:
    section = OptimSection.model_validate({"lr": 1e-2, "groups": [{"pattern": "text", "lr": 1e-3}]})
    optimizer = build_optimizer(net(), section, torch.device("cpu"))
    set_learning_rate(optimizer, 0.5)
    assert sorted({g["lr"] for g in optimizer.param_groups}) == pytest.approx([5e-4, 5e-3])


def test_clipping_is_one_factor_of_the_update_and_leaves_gradients_alone() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
    parameters[1].grad = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    assert float(total_norm([p.grad for p in parameters[:2]])) == pytest.approx(5.0)
    optimizer = AdamW([{"params": parameters}], (0.9, 0.95), 1e-8)
    norm = clip_gradients(optimizer, parameters, torch.device("cpu"), max_norm=0.25)
    assert float(norm) == pytest.approx(5.0)
    assert optimizer.clip_factor is not None
    assert float(optimizer.clip_factor) == pytest.approx(0.05, rel=1e-4)
    assert parameters[0].grad.tolist() == [3.0, 0.0, 0.0]
    optimizer.zero_grad()
    clip_gradients(optimizer, parameters, torch.device("cpu"), max_norm=None)
    assert optimizer.clip_factor is None


def test_gradients_of_another_optimizer_are_clipped_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    norm = clip_gradients(optimizer, [parameter], torch.device("cpu"), max_norm=1.0)
    assert float(norm) == pytest.approx(5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_an_update_multiplies_gradients_of_each_type_by_the_factor_once() -> None:
    """The same as torch's own after the multiplication; the next update knows nothing of the factor."""
    first = [torch.randn(3), torch.randn(2, 2).bfloat16(), torch.randn(1)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in first] for _ in range(2))
    mine, reference = (
        AdamW([{"params": ours}], (0.9, 0.95), 1e-8),
        torch.optim.AdamW(theirs, betas=(0.9, 0.95), fused=True),
    )
    for share in (0.25, None):
        for our, other in zip(ours[:2], theirs[:2], strict=True):  # the last has no gradient
            our.grad = torch.randn_like(our)
            other.grad = our.grad * (share or 1.0)
        if share is not None:
            mine.clip_factor = torch.tensor(share, dtype=torch.float64)
        mine.step()
        reference.step()
    for our, other in zip(ours, theirs, strict=True):
        assert torch.equal(our, other)
        assert all(torch.equal(value, reference.state[other][name]) for name, value in mine.state[our].items())


def test_a_dropped_step_takes_its_factor_along() -> None:
    """Moments made afterwards, from zeros, would be nan otherwise."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([{"params": [parameter]}], (0.9, 0.95), 1e-8)
    parameter.grad, optimizer.clip_factor = torch.ones(2), torch.tensor(float("nan"))
    optimizer.zero_grad()
    parameter.grad = torch.zeros(2)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].tolist() == [0.0, 0.0]


def test_bf16_gradients_are_scaled_by_a_factor_of_full_precision() -> None:
    """1/3 is 0.334 in bf16, and every gradient of a step would be off by the same 0.2 %."""
    torch.manual_seed(0)
    wide = torch.randn(4096)
    narrow = wide.bfloat16()
    scale_gradients([narrow], torch.tensor(1 / 3))
    assert torch.equal(narrow, (wide.bfloat16().float() * (1 / 3)).bfloat16())
