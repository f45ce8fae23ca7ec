"""Norms, rotary positions and gates against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.ops.pointwise import Angles, Rope, axial_angles, layer_norm, rms_norm, rotate, swiglu


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), inputs))


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_norms_equal_eager(implementation: str) -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((5, 12), (12,), (12,)))
    for ours, reference, inputs in (
        (
            rms_norm(x, weight, 1e-6, implementation=implementation),
            rms_norm(x, weight, 1e-6, implementation="eager"),
            2,
        ),
        (
            layer_norm(x, weight, bias, 1e-6, implementation=implementation),
            layer_norm(x, weight, bias, 1e-6, implementation="eager"),
            3,
        ),
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
        both = [gradients(out, [x, weight, bias][:inputs]) for out in (ours, reference)]
        for mine, theirs in zip(*both, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_eager_norms_follow_their_definition() -> None:
    x = torch.tensor([[3.0, -4.0]])
    weight, bias = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 5.0])
    root = math.sqrt(12.5)
    torch.testing.assert_close(rms_norm(x, weight, 0.0, implementation="eager"), torch.tensor([[6 / root, -4 / root]]))
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.0, implementation="eager"), torch.tensor([[2.0, 4.0]]))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at: int, other: int) -> Tensor:
        angles = [Rope(8, 10_000.0).angles(torch.tensor([p])) for p in (at, other)]
        return (rotate(q, angles[0]) * rotate(k, angles[1])).sum()

    torch.testing.assert_close(score(3, 1), score(12, 10), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score(3, 1), score(3, 2))
    rotated = rotate(q, Rope(8, 10_000.0).angles(torch.tensor([5])))
    torch.testing.assert_close(rotated.norm(), q.norm())


def test_three_equal_axes_are_one_axis() -> None:
    positions = torch.arange(6)
    flat = Rope(16, 1e4).angles(positions)
    spread = Rope(16, 1e4, (2, 3, 3)).angles(positions.expand(3, -1))
    assert torch.equal(flat.cos, spread.cos)
    assert torch.equal(flat.sin, Rope(16, 1e4, (2, 3, 3)).angles(positions).sin)


def test_each_frequency_follows_its_own_axis() -> None:
    start = torch.zeros(3, 1, dtype=torch.int64)
    for axis, columns in ((0, range(2)), (1, range(2, 5)), (2, range(5, 8))):
        moved = start.clone()
        moved[axis] = 7
        differs = (Rope(16, 1e4, (2, 3, 3)).angles(moved).cos != 1).flatten()
        assert differs.nonzero().flatten().tolist() == list(columns)
    for axis, columns in ((0, range(4)), (1, range(4, 8))):
        moved = torch.zeros(1, 2, dtype=torch.int64)
        moved[:, axis] = 7
        assert (axial_angles(moved, 16, 1e4).cos != 1).flatten().nonzero().flatten().tolist() == list(columns)


def test_angles_stay_fp32_and_the_result_has_the_type_of_the_input() -> None:
    angles = Rope(8, 1e4).angles(torch.arange(3))
    assert isinstance(angles, Angles)
    assert angles.cos.dtype == torch.float32
    assert rotate(torch.randn(3, 2, 8).bfloat16(), angles).dtype == torch.bfloat16


def test_swiglu() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(swiglu(gate, up), gate * torch.sigmoid(gate) * up)
    torch.testing.assert_close(swiglu(gate, up, implementation="eager"), F.silu(gate) * up)
