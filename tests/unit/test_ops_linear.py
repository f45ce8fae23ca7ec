"""Products in the shapes and types that matrix units like are the products that were asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.nn.vit import EncoderMLP
from tessera.ops.linear import accumulate_matmul, tensor_core_padding
from tessera.runtime import device as devices


def mlp(gated: bool, bias: bool) -> EncoderMLP:
    torch.manual_seed(0)
    return EncoderMLP(16, 44, "silu" if gated else "gelu", bias=bias, gated=gated)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_zeros_behind_change_nothing(gated: bool, bias: bool) -> None:
    layer, x = mlp(gated, bias), torch.randn(5, 16, requires_grad=True)
    wanted = [x, *layer.parameters()]
    plain, aligned = layer(x), layer._aligned(x, 20)
    torch.testing.assert_close(aligned, plain, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(plain)
    for actual, other in zip(
        torch.autograd.grad((aligned * weights).sum(), wanted),
        torch.autograd.grad((plain * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)


def test_only_what_is_slow_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    half, single = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert tensor_core_padding(half, 3420) == 0, "a CPU does not care"
    monkeypatch.setattr(devices, "supports", lambda device, what: what == "tensor_cores")
    assert [tensor_core_padding(half, width) for width in (3420, 3424, 4304, 44, 1)] == [36, 0, 0, 20, 63]
    assert tensor_core_padding(single, 3420) == 0


def test_layers_that_are_not_what_they_look_like_are_left_alone() -> None:
    layer = mlp(True, True)
    assert layer._plain()
    layer.up = nn.Sequential(layer.up)  # type: ignore[assignment]
    assert not layer._plain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_added_in_the_type_of_the_sum(dtype: torch.dtype) -> None:
    a, b, total = torch.randn(6, 4).to(dtype), torch.randn(4, 3).to(dtype), torch.randn(6, 3)
    expected = total + a.float() @ b.float()
    accumulate_matmul(total, a, b)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=2e-2)
    assert total.dtype == torch.float32
