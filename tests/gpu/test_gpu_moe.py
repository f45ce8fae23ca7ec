"""Experts on an accelerator: grouped products against the loop in bf16, and nobody waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tessera.nn.moe import MoE, MoEShape, RowIds, balance_loss
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
    shape = MoEShape(256, 128, 8, 2, balance=0.1, bias_rate=0.1, implementation=implementation)
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
    found, peers, exact = results("grouped"), results("eager"), results("eager", torch.float32)
    assert len(found) == len(peers) == len(exact) == 6
    for one, peer, right in zip(found, peers, exact, strict=True):
        assert_as_close(one, peer, right.double())


@pytest.mark.usefixtures("no_waiting")
def test_nobody_waits_for_counts() -> None:
    shape = MoEShape(256, 128, 8, 2, balance=0.1, bias_rate=0.1, implementation="grouped")
    device = torch.accelerator.current_accelerator()
    with torch.device(device):
        moe = MoE(shape)
        moe.balance.bias, moe.balance.loads = torch.zeros(8), torch.zeros(8)
        x, row = torch.randn(512, 256).bfloat16().requires_grad_(), torch.arange(512) // 256
        rows = RowIds(row, row >= 0, torch.ones(2))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1)
        parameter.data = parameter.data.bfloat16()
    out, used = moe(x, rows)
    (out.square().sum() + 0.1 * balance_loss(used, 2, rows)).backward()
    assert x.grad is not None
