"""Lion, Muon and the schedule that stays: their updates, their groups, what `tessera plan` says of their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.api import plan
from tessera.config.run_config import OptimSection, ScheduleSection, load_config
from tessera.optim.adafactor import Adafactor, adafactor_bytes
from tessera.optim.lion import Lion
from tessera.optim.muon import Muon, matrices_of, orthogonalize
from tessera.optim.optimizer import build_optimizer, clip_gradients, lr_factor, parameter_groups
from tessera.runtime.modules import StackedExperts
from tessera.training.memory_keys import memory_keys
from tests.close import assert_as_close
from tests.errors import raises

CPU = torch.device("cpu")
RECIPE = {"model": {"family": "qwen3", "preset": "quickstart-moe"}, "train": {"steps": 4}}


class Stack(StackedExperts):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 4))


def net() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(9, 4), "up": nn.Linear(4, 6), "norm": nn.LayerNorm(4), "experts": Stack()}
    return nn.ModuleDict({**parts, "head": nn.Linear(4, 9, bias=False)})


def gradients(module: nn.Module, seed: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=chance) for p in module.parameters()]


def test_lion_is_the_formula() -> None:
    module, exact = net(), net().double()
    optimizer = Lion([{"params": list(module.parameters()), "lr": 0.01, "weight_decay": 0.1}], (0.9, 0.99))
    means = [torch.zeros_like(p) for p in exact.parameters()]
    for step in range(3):
        for p, grad in zip(module.parameters(), gradients(module, step), strict=True):
            p.grad = grad
        optimizer.step()
        with torch.no_grad():
            for p, mean, grad in zip(exact.parameters(), means, gradients(module, step), strict=True):
                wide = grad.double()
                p -= 0.01 * (0.1 * p + (0.9 * mean + 0.1 * wide).sign())
                mean.copy_(0.99 * mean + 0.01 * wide)
    for p, right in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.detach().double(), right.detach(), rtol=0, atol=8 * torch.finfo(torch.float32).eps)
    assert {key for state in optimizer.state.values() for key in state} == {"exp_avg"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adafactor_updates_as_torch_s_own_does(dtype: torch.dtype) -> None:
    ours, theirs = net().to(dtype), net().to(dtype)
    optimizer = Adafactor([{"params": list(ours.parameters()), "lr": 0.05, "weight_decay": 0.1}])
    reference = torch.optim.Adafactor(theirs.parameters(), lr=0.05, weight_decay=0.1, foreach=False)
    for step in range(4):
        for first, other, grad in zip(ours.parameters(), theirs.parameters(), gradients(ours, step), strict=True):
            first.grad, other.grad = grad.to(dtype), grad.to(dtype)
        optimizer.step()
        reference.step()
    for p, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        # State and update are in fp32: each step is a few roundings of a number below 1.
        torch.testing.assert_close(p.detach(), right.detach(), rtol=0, atol=32 * torch.finfo(torch.float32).eps)
    state = optimizer.state[ours["up"].weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (6, 1),
        "col_var": (1, 4),
    }
    for p in ours.parameters():
        assert adafactor_bytes(p.shape) == sum(value.nbytes for value in optimizer.state[p].values())


def test_muon_updates_as_torch_s_own_does_and_adamw_the_rest() -> None:
    section = OptimSection.model_validate({"name": "muon", "lr": 0.01, "weight_decay": 0.1, "clip_norm": None})
    ours, theirs = net(), net()
    optimizer = build_optimizer(ours, section, CPU)
    assert isinstance(optimizer, Muon)
    reference = torch.optim.Muon([theirs["up"].weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [p for name, p in theirs.named_parameters() if name not in ("up.weight", "experts.up")]
    wide = [p for p in rest if p.dim() > 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        for first, other, grad in zip(ours.parameters(), theirs.parameters(), gradients(ours, step), strict=True):
            first.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
        adamw.step()
    for name, p in theirs.named_parameters():
        parameter = dict(ours.named_parameters())[name]
        if name == "up.weight":  # torch's own iterates in bf16
            moved = 3 * 0.01 * 0.2 * 6**0.5
            assert float((parameter - p).detach().abs().max()) < moved * 8 * torch.finfo(torch.bfloat16).eps
        elif name != "experts.up":
            assert torch.equal(parameter, p), name
    assert set(optimizer.state[ours["up"].weight]) == {"momentum_buffer"}


def test_each_expert_is_a_matrix_of_its_own() -> None:
    stacked = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    for matrix, whole in zip(stacked, orthogonalize(stacked), strict=True):
        exact = orthogonalize_plainly(matrix.double())
        assert_as_close(whole, orthogonalize(matrix), exact, k=4.0, roundings=8.0)
        assert 0.5 < float(torch.linalg.svdvals(whole).min()) <= float(torch.linalg.svdvals(whole).max()) < 1.3


def orthogonalize_plainly(matrix: Tensor) -> Tensor:
    """By its definition: a polynomial of the singular values, five times."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def test_which_parameters_are_matrices_and_that_a_group_says_otherwise() -> None:
    assert matrices_of(net()) == {"up.weight", "experts.up"}
    section = OptimSection.model_validate(
        {"name": "muon", "groups": [{"pattern": "up", "optimizer": "adamw"}, {"pattern": "head", "optimizer": "muon"}]}
    )
    optimizer = build_optimizer(net(), section, CPU)
    names = {name for group in optimizer.param_groups if group.get("muon") for name in group["names"]}
    assert names == {"experts.up", "head.weight"}


def test_clipping_reaches_both_kinds_of_updates_once() -> None:
    section = OptimSection.model_validate({"name": "muon", "lr": 0.01})
    clipped, scaled = net(), net()
    for module, factor in ((clipped, 1.0), (scaled, 0.01)):
        optimizer = build_optimizer(module, section, CPU)
        for p, grad in zip(module.parameters(), gradients(module, 0), strict=True):
            p.grad = grad * factor
        if factor == 1.0:
            norm = clip_gradients(optimizer, module.parameters(), CPU, None)
            optimizer.clip_factor = torch.tensor(0.01)  # type: ignore[attr-defined]
            assert float(norm) > 1
        optimizer.step()
        assert optimizer.clip_factor is None  # type: ignore[attr-defined]
        state = optimizer.state[module["up"].weight]["momentum_buffer"]
        torch.testing.assert_close(state, 0.05 * 0.01 * gradients(module, 0)[1])
    for first, other in zip(clipped.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(first, other)


def test_a_schedule_that_stays_and_falls_at_the_end() -> None:
    section = ScheduleSection.model_validate({"kind": "wsd", "warmup": 10, "decay": 0.3, "final": 0.1})
    values = [lr_factor(section, step, 100) for step in range(101)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(values[10:71]) == {1.0}
    assert values[85] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"optim.schedule": {"kind": "cosine", "decay": 0.5}}, "recipe.wrong-value"),
        ({"optim.momentum": 0.9}, "recipe.wrong-value"),
        ({"optim.name": "lion", "optim.eps": 1e-6}, "recipe.wrong-value"),
        ({"optim.name": "adafactor", "optim.betas": [0.9, 0.99]}, "recipe.wrong-value"),
        ({"optim.groups": [{"pattern": "head", "optimizer": "muon"}]}, "recipe.wrong-value"),
        ({"optim.name": "moun"}, "recipe.wrong-value"),
    ],
)
def test_keys_without_effect_are_told(settings: dict[str, Any], error: str) -> None:
    with raises(error):
        load_config(RECIPE, settings)


def test_muon_refuses_vectors() -> None:
    with raises("recipe.muon-not-matrix"):
        build_optimizer(
            net(),
            OptimSection.model_validate({"name": "muon", "groups": [{"pattern": "norm", "optimizer": "muon"}]}),
            CPU,
        )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"optim.name": "muon", "parallel.offload": True}, "recipe.optimizer-offload"),
        ({"optim.name": "adafactor", "parallel.offload": True}, "recipe.optimizer-offload"),
        ({"optim.groups": [{"pattern": "nothing", "lr": 0.1}]}, "recipe.pattern-matches-nothing"),
        ({"train.early_stop": {}}, "recipe.held-out-never-measured"),
        ({"train.generate_every": 2, "parallel.cp": 2}, "layout.generation-with-cp"),
    ],
)
def test_the_plan_refuses_what_a_run_refuses(settings: dict[str, Any], error: str) -> None:
    with raises(error):
        plan(RECIPE, settings, world=2)


def test_offload_is_not_advised_where_it_is_refused() -> None:
    for name, advised in (("lion", True), ("muon", False)):
        keys = memory_keys(load_config(RECIPE, {"optim.name": name}), 1, [])
        assert any("parallel.offload" in key.settings for key in keys) is advised


def test_the_plan_counts_the_state_of_each_optimizer() -> None:
    memory = {
        name: plan(RECIPE, {"optim.name": name}).memory.by_position[0]
        for name in ("adamw", "lion", "muon", "adafactor")
    }
    parameters = memory["lion"].parameters
    assert memory["lion"].optimizer == parameters
    assert memory["adamw"].optimizer > 2 * parameters
    assert parameters < memory["muon"].optimizer < 2 * parameters
    assert 0 < memory["adafactor"].optimizer < parameters / 10


def test_matrix_b_of_adapters_has_a_rate_of_its_own() -> None:
    module = nn.ModuleDict(
        {"up": nn.ModuleDict({"lora_a": nn.Linear(4, 2, bias=False), "lora_b": nn.Linear(2, 4, bias=False)})}
    )
    section = OptimSection.model_validate(
        {"lr": 1e-4, "loraplus_lr_ratio": 16, "groups": [{"pattern": "up.lora_a", "weight_decay": 0.1}]}
    )
    rates = {name: group["base_lr"] for group in parameter_groups(module, section) for name in group["names"]}
    assert rates == {"up.lora_a.weight": 1e-4, "up.lora_b.weight": pytest.approx(16e-4)}
    with raises("recipe.wrong-value"):
        load_config(RECIPE, {"optim.loraplus_lr_ratio": 16})
