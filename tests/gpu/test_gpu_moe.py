"""Experts on an accelerator: grouped products against the loop in bf16, and nobody waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tessera.lora.modules import LoraExperts
from tessera.lora.select import Adapter
from tessera.nn.moe import Experts, MoE, MoEShape, RowIds, balance_loss
from tests.close import assert_as_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    if not hasattr(device, "set_sync_debug_mode"):
        pytest.skip("this device does not tell when the host waits")
    device.set_sync_debug_mode("error")
    yield
    device.set_sync_debug_mode("default")


def results(implementation: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Of experts and tokens in bf16, computed in `dtype`."""
    shape = MoEShape(256, 128, 8, 2, balance=0.1, implementation=implementation)
    moe = MoE(shape)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        moe.router.weight[3] = 0  # seldom chosen
    device = torch.accelerator.current_accelerator()
    moe = moe.to(device)
    for experts in moe.experts.parameters(recurse=False):
        experts.data = experts.data.bfloat16().to(dtype)
    x = torch.randn(512, 256, generator=draw).to(device).bfloat16().to(dtype).requires_grad_()
    row = (torch.arange(512) // 256).to(device)
    rows = RowIds(row, row >= 0, torch.full((2,), 256.0).to(device))
    out, used = moe(x, rows)
    (out.square().sum() + 0.1 * balance_loss(used, 2, rows)).backward()
    return [out, *(t.grad for t in (x, *moe.parameters()) if t.grad is not None)]


def test_grouped_experts_are_those_of_the_loop() -> None:
    ours, peers, exact = results("grouped"), results("eager"), results("eager", torch.float32)
    assert len(ours) == len(peers) == len(exact) == 6
    for actual, peer, right in zip(ours, peers, exact, strict=True):
        assert_as_close(actual, peer, right.double())


def adapted_results(implementation: str, rank: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The output, and gradients of the input and of adapters, of experts in bf16, computed in `dtype`."""
    device, draw = torch.accelerator.current_accelerator(), torch.Generator().manual_seed(0)
    experts = Experts(MoEShape(256, 128, 8, 2, implementation=implementation)).requires_grad_(False)
    for name, weights in experts.adapted_weights.items():
        adapter = Adapter(rank, 2.0 * rank, stacked=weights)
        setattr(experts, name, LoraExperts(experts.get_parameter(weights[0]), adapter))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
            parameter.data = parameter.data.to(device).bfloat16().to(dtype)
    x = torch.randn(512, 256, generator=draw).to(device).bfloat16().to(dtype).requires_grad_()
    ids = torch.randint(0, 7, (512, 2), generator=draw).to(device)  # the last expert gets nothing
    weights = torch.rand(512, 2, generator=draw).to(device).bfloat16().to(dtype)
    out = experts(x, ids, weights)
    out.square().sum().backward()
    return [out, *(t.grad for t in (x, *experts.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 20])
def test_grouped_adapters_of_experts_are_those_of_the_loop(rank: int) -> None:
    ours, peers = adapted_results("grouped", rank), adapted_results("eager", rank)
    exact = adapted_results("eager", rank, torch.float32)
    assert len(ours) == len(peers) == len(exact) == 6
    for actual, peer, right in zip(ours, peers, exact, strict=True):
        assert_as_close(actual, peer, right.double())


@pytest.mark.usefixtures("no_waiting")
def test_nobody_waits_for_counts() -> None:
    shape = MoEShape(256, 128, 8, 2, balance=0.1, implementation="grouped")
    device = torch.accelerator.current_accelerator()
    with torch.device(device):
        moe = MoE(shape)
        x, row = torch.randn(512, 256).bfloat16().requires_grad_(), torch.arange(512) // 256
        rows = RowIds(row, row >= 0, torch.ones(2))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1)
        parameter.data = parameter.data.bfloat16()
    out, used = moe(x, rows)
    (out.square().sum() + 0.1 * balance_loss(used, 2, rows)).backward()
    assert x.grad is not None
