"""Rotary positions: along one axis, over the two axes of a picture, and over time, height and width of a mixed row.

Angles are made once per forward pass from plain numbers, in fp32, and shared by all layers. No table is kept as a
buffer, so a model built on the meta device has nothing but parameters to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.ops.registry import AUTO, Implementation, Operation


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of every position, [T, D / 2] in fp32.

    A dataclass and not a tuple on purpose: wrappers that cast the tensors in a module's arguments to bf16 look into
    tuples, and these two must stay fp32.
    """

    cos: Tensor
    sin: Tensor


def linear_angles(positions: Tensor, dim: int, theta: float) -> Angles:
    """One axis: `positions` [T]."""
    return _angles(positions.float().unsqueeze(-1) * _frequencies(dim, theta, positions.device))


def axial_angles(positions: Tensor, dim: int, theta: float) -> Angles:
    """Two axes: `positions` [T, 2]; the first half of the frequencies follows the height, the second the width."""
    angles = positions.float().unsqueeze(-1) * _frequencies(dim // 2, theta, positions.device)  # [T, 2, dim / 4]
    return _angles(angles.flatten(1))


def multimodal_angles(positions: Tensor, dim: int, theta: float, sections: Sequence[int]) -> Angles:
    """Three axes: `positions` [3, T] holds time, height and width; `sections` says how many frequencies follow each.

    Positions of one axis [T] mean text alone, where the three agree.
    """
    if positions.dim() == 1:
        return linear_angles(positions, dim, theta)
    frequencies = _frequencies(dim, theta, positions.device)
    wide = positions.float().unsqueeze(-1)
    parts = [wide[axis % 3] * part for axis, part in enumerate(torch.split(frequencies, list(sections)))]
    return _angles(torch.cat(parts, dim=-1))


def rotate(x: Tensor, angles: Angles, *, implementation: str = AUTO) -> Tensor:
    """Turns the halves of each head of `x` [T, H, D] against each other by the angle of its position."""
    run = ROTATE.choose(implementation, "plain", x.device, x.dtype)
    out: Tensor = run(x, angles)
    return out


def _frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    return 1.0 / (theta**exponents)


def _angles(angles: Tensor) -> Angles:
    return Angles(angles.cos(), angles.sin())


def _rotate_eager(x: Tensor, angles: Angles) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


ROTATE = Operation("rotate", (Implementation("eager", _rotate_eager),))
