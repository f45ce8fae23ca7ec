"""What runs on accelerators alone, against what runs everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.nn.vit import VisionMLP, VisionShape
from tessera.ops.loss import linear_cross_entropy
from tessera.ops.products import add_product, lacking

pytestmark = pytest.mark.gpu


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def test_half_products_are_added_to_single_numbers() -> None:
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((300, 500), (500, 200)))
    total = torch.randn(300, 200, device="cuda")
    expected = total.double() + a.double() @ b.double()
    add_product(total, a, b)
    assert apart(total, expected) < 1e-5  # no half number in between


@pytest.mark.parametrize("gated", [True, False])
def test_widths_that_are_slow_are_computed_as_others(gated: bool) -> None:
    torch.manual_seed(0)
    layer = VisionMLP(VisionShape(12, 64, 172, 1, 2, 2, "silu", gated=gated)).to("cuda", torch.bfloat16)
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    assert lacking(x, 172) == 20
    out = layer(x)
    out.float().square().sum().backward()
    found = [p.grad.float() for p in layer.parameters()]
    wide = layer.float()
    wide.zero_grad(set_to_none=True)
    expected = wide(x.float())
    expected.square().sum().backward()
    assert apart(out, expected) < 1e-2
    for one, parameter in zip(found, wide.parameters(), strict=True):
        assert apart(one, parameter.grad) < 2e-2


@pytest.mark.parametrize("implementation", ["chunked", "compiled"])
def test_losses_of_a_table_agree(implementation: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    table = (torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16) * 0.1).requires_grad_()
    labels = torch.randint(0, 1000, (300,), device="cuda")
    labels[::7] = -100
    found = linear_cross_entropy(hidden, table, labels, chunk=64, implementation=implementation)[0]
    grads = torch.autograd.grad(found, (hidden, table))
    wide = [x.detach().float().requires_grad_() for x in (hidden, table)]
    expected = linear_cross_entropy(*wide, labels, implementation="eager")[0]
    assert apart(found, expected) < 1e-2
    for one, other in zip(grads, torch.autograd.grad(expected, wide), strict=True):
        assert apart(one, other) < 2e-2
