"""Rotary positions: along one axis, over the two axes of a picture, and over time, height and width of a mixed row.

Angles are made once per forward pass from plain numbers, in fp32, and shared by all layers. No table is kept as a
buffer, so a model built on the meta device has nothing but parameters to fill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True)
class FrequencyScaling:
    """Stretches slow frequencies by `factor`, leaves fast ones, and blends between: a longer context for a model that
    was trained on `original` positions. A frequency is slow if it turns fewer than `low` times in that many, fast if
    more than `high` times."""

    factor: float
    low: float
    high: float
    original: int
    attention: ClassVar[float] = 1.0

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        turns = self.original * frequencies / (2 * math.pi)
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)  # of the unstretched
        return frequencies * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """Stretches all frequencies alike."""

    factor: float
    attention: ClassVar[float] = 1.0

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """As `FrequencyScaling`, but between frequencies that turn `slow` and `fast` times in `original` positions it
    blends by their number, and it makes attention sharper by stretching queries and keys. `whole`: the blend begins and
    ends at whole numbers."""

    factor: float
    fast: float
    slow: float
    original: int
    attention: float
    whole: bool

    def apply(self, frequencies: Tensor, rope: Rope) -> Tensor:
        first, last = (self._number(turns, rope) for turns in (self.fast, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.dim - 1)
        number = torch.arange(rope.dim // 2, device=frequencies.device, dtype=torch.float32)
        share = ((number - first) / (last - first or 0.001)).clamp(0, 1)  # of the stretched
        return frequencies / self.factor * share + frequencies * (1 - share)

    def _number(self, turns: float, rope: Rope) -> float:
        """Which frequency turns so often, as a real number."""
        return rope.dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_attention(factor: float, scale: float | None = None, scale_all: float | None = None) -> float:
    """What YaRN multiplies queries and keys by, where nobody says it."""

    def sharper(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    return sharper(scale) / sharper(scale_all) if scale and scale_all else sharper(1.0)


Scaling = FrequencyScaling | LinearScaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """How heads turn with the position of their token."""

    dim: int  # so many numbers of each head, the first ones, turn
    theta: float
    sections: tuple[int, ...] = ()  # frequencies that follow time, height and width; none: positions have one axis
    interleaved: bool = False  # the axes take turns among the frequencies; otherwise they come one after another
    scaling: Scaling | None = None

    def angles(self, positions: Tensor) -> Angles:
        """`positions` [3, T] holds time, height and width; [T] means text alone, where the three agree."""
        angles = self._angles(positions, self.frequencies(positions.device))
        factor = 1.0 if self.scaling is None else self.scaling.attention
        if factor == 1.0:
            return _angles(angles)
        return Angles(angles.cos() * factor, angles.sin() * factor)

    def frequencies(self, device: torch.device) -> Tensor:
        """[D / 2]: by how much one position turns."""
        plain = _frequencies(self.dim, self.theta, device)
        return plain if self.scaling is None else self.scaling.apply(plain, self)

    def _angles(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        if positions.dim() == 1:
            return positions.float().unsqueeze(-1) * frequencies
        wide = positions.float().unsqueeze(-1)
        if not self.interleaved:
            parts = [wide[axis % 3] * part for axis, part in enumerate(torch.split(frequencies, list(self.sections)))]
            return torch.cat(parts, dim=-1)
        number = torch.arange(self.dim // 2, device=positions.device)
        angles = wide[0] * frequencies
        for axis in (1, 2):
            mine = (number % 3 == axis) & (number < 3 * self.sections[axis])
            angles = torch.where(mine, wide[axis] * frequencies, angles)
        return angles


def axial_angles(positions: Tensor, dim: int, theta: float) -> Angles:
    """Two axes: `positions` [T, 2]; the first half of the frequencies follows the height, the second the width."""
    angles = positions.float().unsqueeze(-1) * _frequencies(dim // 2, theta, positions.device)  # [T, 2, dim / 4]
    return _angles(angles.flatten(1))


def rotate(x: Tensor, angles: Angles, *, implementation: str = AUTO) -> Tensor:
    """Turns the halves of each head of `x` [T, H, D] against each other by the angle of its position. With fewer angles
    than D / 2, the halves of the first part of each head."""
    run = ROTATE.choose(implementation, "plain", x.device, x.dtype)
    turned = 2 * angles.cos.shape[-1]
    if turned == x.shape[-1]:
        out: Tensor = run(x, angles)
        return out
    return torch.cat([run(x[..., :turned], angles), x[..., turned:]], dim=-1)


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
