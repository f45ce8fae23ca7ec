"""Judge whether two tensors differ by more than rounding explains, and describe the difference.

What is allowed is measured, not chosen: a recording tells how far each tensor moves if every weight is moved by one
rounding. Any order of additions gives the exact result of weights that were moved by about so much. Added is the
rounding of the result itself to its own type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import DTYPES

ROUNDINGS = 8.0  # allowed difference, in multiples of the measured effect of one rounding of the weights
_SMALL = (0.001, 0.005)  # relative errors for which the share of elements above them is reported


@dataclass(frozen=True)
class Difference:
    """Describe the difference of two tensors. Relative errors are shares of the first tensor."""

    max_abs: float
    max_rel: float
    rms: float
    cosine: float
    beyond_01: float  # share of elements with a relative error beyond 0.1 %
    beyond_05: float
    limit_max: float
    limit_rms: float
    positions: tuple[int, ...] = ()  # indices of the first dimension with the largest errors, at most 4096
    not_finite: int = 0

    @property
    def excess(self) -> float:
        """Return the difference as a multiple of its limit."""
        if self.not_finite:
            return math.inf
        return max(_ratio(self.max_abs, self.limit_max), _ratio(self.rms, self.limit_rms))

    @property
    def differs(self) -> bool:
        return self.excess > 1


def _ratio(value: float, limit: float) -> float:
    return 0.0 if value == 0 else math.inf if limit == 0 else value / limit


@dataclass(frozen=True)
class Rounding:
    """Hold the effect of rounding on a tensor. None: not measured, but estimated from `depth` operations."""

    largest: float | None
    rms: float | None
    eps: float
    depth: float = 1.0
    floor: float = 0.0  # for a tensor that is a difference, such as an update: rounding error of the two terms
    drift: float = 1.0  # difference of the weights of both recordings, in multiples of a rounding; at least 1

    def limits(self, largest: float, rms: float) -> tuple[float, float]:
        """Return the allowed largest and root-mean-square difference of a tensor of this size."""
        estimate = self.eps * math.sqrt(max(1.0, self.depth))
        moved_max = estimate * largest if self.largest is None else self.largest
        moved_rms = estimate * rms if self.rms is None else self.rms
        factor = ROUNDINGS * self.drift
        # Rounding changes each of the two results by at most eps / 2: 2 * eps is twice what they may differ by.
        limits = factor * moved_max + 2 * self.eps * largest, factor * moved_rms + 2 * self.eps * rms
        return limits[0] + self.floor, limits[1] + self.floor


def eps_of(*codes: str) -> float:
    """Return the eps of the least precise of some types, by their names in safetensors; 0 for integers."""
    types = [DTYPES[code] for code in codes if code in DTYPES]
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=0.0)


def difference(a: Tensor, b: Tensor, rounding: Rounding, explained: Tensor | None = None) -> Difference:
    """Compare two tensors of the same shape. `explained`: part of each element's difference that has a known cause."""
    if not a.numel():
        return Difference(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    first, second = a.double(), b.double()
    if torch.equal(first, second):
        limits = rounding.limits(float(first.abs().max()), float(first.square().mean().sqrt()))
        return Difference(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, limits[0], limits[1])
    bad = ~(torch.isfinite(first) & torch.isfinite(second)) & ~((first == second) | (first.isnan() & second.isnan()))
    ok = torch.isfinite(first) & torch.isfinite(second)
    first, second = torch.where(ok, first, 0.0), torch.where(ok, second, 0.0)
    apart = (first - second).abs()
    if explained is not None:
        apart = (apart - explained).clamp(min=0.0)
    size = first.abs()
    relative = torch.where(apart > 0, apart / size.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    norms = float(first.norm() * second.norm())
    limit_max, limit_rms = rounding.limits(float(size.max()), float(size.square().mean().sqrt()))
    over = (apart > limit_max) | bad
    if not bool(over.any()):
        # If no single element is above its limit, report the elements above the root mean square.
        over = apart > max(limit_rms, float(apart.square().mean().sqrt()))
    rows = over.reshape(len(over), -1).any(1).nonzero().flatten().tolist() if over.dim() else []
    return Difference(
        float(apart.max()),
        float(relative.max()),
        float(apart.square().mean().sqrt()),
        float((first * second).sum()) / norms if norms else float(float(first.norm()) == float(second.norm())),
        float((relative > _SMALL[0]).double().mean()),
        float((relative > _SMALL[1]).double().mean()),
        limit_max,
        limit_rms,
        tuple(rows[:4096]),
        int(bad.sum()),
    )


def change_of_update(gradient: Tensor, other: Tensor, largest: float, limit: float = math.inf) -> Tensor:
    """Return how much each element of the update may differ because the two gradients differ by at most `limit`."""
    first, second = gradient.double(), other.double()
    smaller = torch.minimum(first.abs(), second.abs())
    apart = (first - second).abs()
    apart = torch.where(apart <= limit, apart, 0.0)
    share = (apart / smaller.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num(nan=0.0)
    return 2 * largest * share.clamp(max=1.0)


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Return maximum, minimum, mean and norm of the recorded elements."""
    wide = tensor.double().flatten()
    if not wide.numel():
        return {"max": 0.0, "min": 0.0, "mean": 0.0, "norm": 0.0}
    return {
        "max": float(wide.max()),
        "min": float(wide.min()),
        "mean": float(wide.mean()),
        "norm": float(wide.norm()),
    }
