"""Distances of feature sets against their definitions and closed forms, and the coverage of intervals."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor

from tessera.evaluation.generation.distances import (
    Moments,
    frechet_distance,
    grouped_mean,
    kernel_distance,
    squared_mmd,
)

EPS = torch.finfo(torch.float64).eps


def drawn(rows: int, width: int, seed: int, rank: int | None = None, scale: float = 1.0) -> Tensor:
    """Return features with an uneven covariance of a rank."""
    chance = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank or width, width, generator=chance, dtype=torch.float64)
    values = torch.randn(rows, rank or width, generator=chance, dtype=torch.float64)
    return scale * (values @ mix + torch.randn(width, generator=chance, dtype=torch.float64))


def by_definition(first: Moments, second: Moments) -> float:
    offset = first.mean - second.mean
    root = sqrtm((first.covariance @ second.covariance).numpy())
    traces = first.covariance.trace() + second.covariance.trace()
    return float(offset @ offset + traces) - 2 * float(root.trace().real)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("rows", "others"), [(200, 150), (40, 37)])
def test_frechet_distance_is_its_definition(rows: int, others: int, scale: float) -> None:
    first, second = Moments.of(drawn(rows, 12, 1, scale=scale)), Moments.of(drawn(others, 12, 2, scale=scale))
    size = float(first.covariance.trace() + second.covariance.trace())
    # The square root of a matrix moves by its condition times a rounding.
    condition = float(torch.linalg.cond(first.covariance) * torch.linalg.cond(second.covariance))
    assert abs(frechet_distance(first, second) - by_definition(first, second)) < 12 * EPS * math.sqrt(condition) * size


@pytest.mark.parametrize(("rows", "rank"), [(9, None), (30, 5), (2, None)])
def test_frechet_distance_without_full_rank(rows: int, rank: int | None) -> None:
    """Tr (C1 C2)^(1/2) is the sum of the singular values of A B^T, where C1 = A^T A and C2 = B^T B."""
    width = 24
    first, second = drawn(rows, width, 3, rank), drawn(rows + 1, width, 4, rank)
    centered = [(x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (first, second)]
    root = torch.linalg.svdvals(centered[0] @ centered[1].T).sum()
    squares = sum(float((x**2).sum()) for x in centered)
    expected = float(((first.mean(0) - second.mean(0)) ** 2).sum()) + squares - 2 * float(root)
    value = frechet_distance(Moments.of(first), Moments.of(second))
    # An eigenvalue of rounding is width * eps * the largest, and its root is the error of a factor.
    assert abs(value - expected) < width * math.sqrt(width * EPS) * squares
    assert abs(value - expected) < 1e-9 * squares, "the factors have no eigenvalues of rounding"


def test_frechet_distance_of_equal_sets_is_zero() -> None:
    for rows in (2, 10, 100):
        features = drawn(rows, 30, 5)
        moments = Moments.of(features)
        assert frechet_distance(moments, moments) <= 30 * EPS * 4 * float(moments.covariance.trace())
        shuffled = Moments.of(features[torch.randperm(rows)])
        assert frechet_distance(moments, shuffled) <= 1e-10 * float(moments.covariance.trace())


def test_frechet_distance_of_gaussians_with_common_axes() -> None:
    """With common eigenvectors it is |m1 - m2|^2 + sum (s1 - s2)^2 over standard deviations."""
    axes = torch.linalg.qr(drawn(8, 8, 6)).Q
    first, second = torch.rand(8, dtype=torch.float64) + 0.1, torch.rand(8, dtype=torch.float64) + 0.1
    second[0] = 0.0
    means = drawn(2, 8, 7)
    moments = [Moments(m, axes @ (s**2).diag() @ axes.T, None) for m, s in zip(means, (first, second), strict=True)]
    expected = float(((means[0] - means[1]) ** 2).sum() + ((first - second) ** 2).sum())
    assert frechet_distance(*moments) == pytest.approx(expected, rel=1e-12)


def test_kernel_distance_is_the_unbiased_definition() -> None:
    first, second = drawn(7, 3, 8), drawn(5, 3, 9)

    def kernel(x: Tensor, y: Tensor) -> float:
        return float((x @ y / 3 + 1) ** 3)

    within = [
        sum(kernel(x[i], x[j]) for i in range(len(x)) for j in range(len(x)) if i != j) / (len(x) * (len(x) - 1))
        for x in (first, second)
    ]
    between = sum(kernel(x, y) for x in first for y in second) / 35
    assert float(squared_mmd(first, second)) == pytest.approx(sum(within) - 2 * between, rel=1e-12)


def test_kernel_distance_is_reproducible_and_near_the_value_of_all_samples() -> None:
    first, second = drawn(120, 4, 10).float(), (drawn(100, 4, 11) + 1).float()
    distance = kernel_distance(first, second)
    assert distance == kernel_distance(first, second)
    assert distance.size == 50
    complete = float(squared_mmd(first.double(), second.double()))
    # The mean of 100 subsets differs from the mean of all subsets by a tenth of their deviation, five times at most.
    assert abs(distance.estimate.value - complete) < 5 * distance.deviation / 10


def test_few_samples_have_no_interval() -> None:
    assert grouped_mean([1.0, 2.0, 3.0], ["a", "b", "b"], [1, 1, 2]).value == pytest.approx(9 / 4)
    assert grouped_mean([1.0] * 19, range(19), [1.0] * 19).interval is None
    assert grouped_mean([1.0] * 20, range(20), [1.0] * 20).interval == (1.0, 1.0)
    assert kernel_distance(drawn(19, 2, 1), drawn(40, 2, 2)).estimate.interval is None


def test_an_interval_has_the_width_of_normal_theory() -> None:
    values = torch.rand(200, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    low, high = grouped_mean(values.tolist(), range(200), [1.0] * 200).interval or (0.0, 0.0)
    # 2000 resamples give a quantile of 2.5 % with a deviation of 4 % of the half width.
    assert (high - low) / 2 == pytest.approx(1.96 * float(values.std()) / math.sqrt(200), rel=0.15)
    doubled = grouped_mean([*values.tolist()] * 2, [*range(200)] * 2, [1.0] * 400).interval
    assert doubled == pytest.approx((low, high)), "a second sample that repeats the first adds nothing"


def covered(intervals: list[tuple[float, float] | None], truth: float) -> float:
    return sum(interval is not None and interval[0] <= truth <= interval[1] for interval in intervals) / len(intervals)


@pytest.mark.slow
def test_intervals_of_prompts_cover_the_truth() -> None:
    """1000 benchmarks of 100 prompts with 5 samples each: the samples of a prompt have a common part."""
    chance = torch.Generator().manual_seed(0)
    common = torch.rand(1000, 100, 1, generator=chance, dtype=torch.float64)
    scores = 20 + 10 * common + 3 * torch.randn(1000, 100, 5, generator=chance, dtype=torch.float64)
    prompts = [number for number in range(100) for _ in range(5)]
    rows = [row.flatten().tolist() for row in scores]
    intervals = [grouped_mean(row, prompts, [1.0] * 500, seed).interval for seed, row in enumerate(rows)]
    assert 0.93 <= covered(intervals, 25.0) <= 0.97
    samples = [grouped_mean(row, range(500), [1.0] * 500).interval for row in rows[:300]]
    assert covered(samples, 25.0) < 0.9, "an interval over samples, as if they were independent, is too narrow"


@pytest.mark.slow
@pytest.mark.parametrize("others", [100, 250])
def test_intervals_of_the_kernel_distance_cover_the_truth(others: int) -> None:
    """In one dimension, MMD^2 is the sum of C(3, r) (difference of the moments r)^2; uniform from 0 and from 0.2."""
    chance = torch.Generator().manual_seed(1)
    moments = [[(high ** (r + 1) - low ** (r + 1)) / (r + 1) for r in range(4)] for low, high in ((0, 1), (0.2, 1.2))]
    truth = sum(math.comb(3, r) * (moments[0][r] - moments[1][r]) ** 2 for r in range(4))
    intervals = []
    for _ in range(400):
        first = torch.rand(100, 1, generator=chance, dtype=torch.float64)
        second = 0.2 + torch.rand(others, 1, generator=chance, dtype=torch.float64)
        intervals.append(kernel_distance(first, second).estimate.interval)
    # Three deviations of 400 trials; a larger second set makes the interval wider than needed.
    assert covered(intervals, truth) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)
