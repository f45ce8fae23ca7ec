"""Compute distances between two sets of features, and confidence intervals of means over samples.

Everything is computed in float64. Features are tensors [N, D] with one row per sample.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUBSETS, SUBSET_SIZE = 100, 1000  # KID is the mean over random subsets, as published
RESAMPLES = 2000  # number of bootstrap samples
FEWEST_GROUPS = 20  # below this number, the coverage of a bootstrap interval is too low
_NORMAL_95 = 1.959964  # quantile of the normal distribution for 95 %


@dataclass(frozen=True)
class Moments:
    """Hold mean [D] and covariance [D, D] of features, with the divisor N - 1, and the number of samples.

    `count`: None if a file of statistics does not state it.
    """

    mean: Tensor
    covariance: Tensor
    count: int | None

    @staticmethod
    def of(features: Tensor) -> Moments:
        """Return the moments of features. At least two rows are needed."""
        values = features.double()
        mean = values.mean(0)
        centered = values - mean
        return Moments(mean, centered.T @ centered / (len(values) - 1), len(values))


def frechet_distance(first: Moments, second: Moments) -> float:
    """Return |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    With C = F^T F, the eigenvalues of C1 C2 are the squared singular values of F1 F2^T. Their sum is exact to rounding
    even for covariances without full rank, for which the iteration of `scipy.linalg.sqrtm` may fail.
    """
    offset = first.mean.double() - second.mean.double()
    cross = _factor(first.covariance) @ _factor(second.covariance).T
    root = torch.linalg.svdvals(cross).sum() if cross.numel() else torch.zeros(())
    traces = first.covariance.double().trace() + second.covariance.double().trace()
    return max(0.0, float(offset @ offset + traces - 2 * root))


def _factor(covariance: Tensor) -> Tensor:
    """Return F [R, D] with F^T F equal to a covariance of rank R. Eigenvalues within rounding of zero are left out."""
    symmetric = covariance.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    floor = len(values) * torch.finfo(torch.float64).eps * values.abs().max()
    positive = values > floor
    factor: Tensor = vectors[:, positive] * values[positive].sqrt()
    return factor.T


@dataclass(frozen=True)
class SampleEstimate:
    """Hold a value with its 95 % confidence interval; the interval is None if there are too few groups."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class KernelDistance:
    """Hold the mean and the standard deviation of the kernel distance over subsets of `size` samples."""

    estimate: SampleEstimate
    deviation: float
    size: int


def squared_mmd(first: Tensor, second: Tensor) -> Tensor:
    """Return the unbiased squared MMD with the kernel (x . y / D + 1)^3, over the last two axes [N, D]."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.mT / x.shape[-1] + 1) ** 3

    def within(x: Tensor) -> Tensor:
        values, rows = kernel(x, x), x.shape[-2]
        diagonal = values.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (values.sum((-2, -1)) - diagonal) / (rows * (rows - 1))

    return within(first) + within(second) - 2 * kernel(first, second).mean((-2, -1))


def kernel_distance(first: Tensor, second: Tensor) -> KernelDistance:
    """Return the kernel distance of two sets of features: the mean of `squared_mmd` over random subsets of both.

    A subset has 1000 samples as published, or half of the smaller set if that has fewer than 2000. The interval scales
    the variance over subsets, which are drawn without replacement, to the variance of the full sets.
    """
    fewest = min(len(first), len(second))
    size = max(2, min(SUBSET_SIZE, fewest // 2))
    generator = torch.Generator().manual_seed(0)
    values = torch.stack(
        [squared_mmd(_subset(first, size, generator), _subset(second, size, generator)) for _ in range(SUBSETS)]
    )
    mean, deviation = float(values.mean()), float(values.std())
    sound = fewest >= FEWEST_GROUPS
    half = _NORMAL_95 * deviation * math.sqrt(size / (fewest - size)) if sound else 0.0
    return KernelDistance(SampleEstimate(mean, (mean - half, mean + half) if sound else None), deviation, size)


def _subset(features: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return features[torch.randperm(len(features), generator=generator)[:size]].double()


def grouped_mean(
    values: Sequence[float], groups: Sequence[Hashable], weights: Sequence[float], seed: int = 0
) -> SampleEstimate:
    """Return the weighted mean of values, with a percentile interval by a bootstrap over groups.

    Samples of one prompt are not independent, so prompts are drawn, not samples.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([numbers[group] for group in groups])
    weight = torch.tensor(weights, dtype=torch.float64)
    products = torch.tensor(values, dtype=torch.float64) * weight
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, index, products)
    totals = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, index, weight)
    mean = float(sums.sum() / totals.sum())
    if len(numbers) < FEWEST_GROUPS:
        return SampleEstimate(mean)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(numbers), (RESAMPLES, len(numbers)), generator=generator)
    means = sums[drawn].sum(1) / totals[drawn].sum(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return SampleEstimate(mean, (low, high))
