"""Intervals cover the truth as often as they say, and paired tests have the values of their definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tessera.evaluation.intervals import estimates, mcnemar, paired_test
from tessera.evaluation.metrics.overlap import wer
from tessera.evaluation.metrics.vqa import yes_no

Marks = list[dict[str, float]]
BENCHMARKS = 1000


def shares(chance: np.random.Generator, count: int, p: float) -> Marks:
    return [{"accuracy": float(right)} for right in chance.random(count) < p]


def anls(chance: np.random.Generator, count: int, p: float) -> Marks:
    """Half the answers of a model are wrong, most others are exact, and some are nearly right."""
    right, exact, near = chance.random(count) < p, chance.random(count) < 0.85, chance.uniform(0.5, 1, count)
    return [{"anls": float(value)} for value in np.where(right, np.where(exact, 1.0, near), 0.0)]


def yes_and_no(chance: np.random.Generator, count: int, p: float) -> Marks:
    """Half the questions expect yes; the model says yes to 70 % of them, and to the share `p` of the others."""
    expected, drawn = chance.random(count) < 0.5, chance.random(count)
    said = np.where(expected, drawn < 0.7, drawn < p)
    return [
        {"tp": float(e and s), "fp": float(not e and s), "fn": float(e and not s)}
        for e, s in zip(expected, said, strict=True)
    ]


def f1(means: Mapping[str, float]) -> dict[str, float]:
    total = 2 * means["tp"] + means["fp"] + means["fn"]
    return {"f1": 2 * means["tp"] / total if total else 0.0}


def words(chance: np.random.Generator, count: int, p: float) -> Marks:
    lengths = chance.integers(3, 20, count)
    return [{"errors": float(chance.binomial(n, p)), "length": float(n)} for n in lengths]


Case = tuple[Callable[[np.random.Generator, int, float], Marks], Callable[..., Mapping[str, float]], int, float, float]
CASES: list[Case] = [
    *((shares, dict, count, p, p) for count in (50, 100, 300, 1000) for p in (0.3, 0.5, 0.75, 0.9)),
    *((anls, dict, count, p, p * 0.9625) for count in (50, 100, 300) for p in (0.3, 0.6, 0.9)),
    *((yes_and_no, f1, count, p, 0.7 / (0.7 + 0.15 + p / 2)) for count in (100, 300) for p in (0.1, 0.3)),
    *((words, wer().summary, count, p, p) for count in (50, 300) for p in (0.1, 0.4)),
]


def covered(case: Case, benchmarks: int) -> float:
    """Return the share of simulated benchmarks whose interval contains the truth."""
    draw, summary, count, p, truth = case
    chance, hits = np.random.default_rng([count, round(1000 * p)]), 0
    for _ in range(benchmarks):
        figure = next(iter(estimates(draw(chance, count, p), summary).values()))
        hits += figure.low <= truth <= figure.high
    return hits / benchmarks


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[2]}-{case[3]}")
def test_intervals_cover_the_truth_in_93_to_97_of_100_benchmarks(case: Case) -> None:
    # The share of 1,000 benchmarks varies by 0.7 %. Wilson's interval of 50 shares at p = 0.5 covers exactly 93.5 %.
    share = covered(case, BENCHMARKS)
    print(f"{case[0].__name__} n={case[2]} p={case[3]}: {share:.3f}")
    assert 0.93 - 0.01 <= share <= 0.97 + 0.01, share


def test_an_interval_of_shares_is_that_of_wilson() -> None:
    (figure,) = estimates([{"accuracy": float(n < 8)} for n in range(10)], dict).values()
    assert (figure.value, figure.low, figure.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    (single,) = estimates([{"accuracy": 1.0}], dict).values()
    assert (single.value, single.low, single.high) == pytest.approx((1.0, 0.2065, 1.0), abs=1e-4)
    (wrong,) = estimates([{"accuracy": 0.0}], dict).values()
    assert (wrong.low, wrong.high) == pytest.approx((0.0, 0.7935), abs=1e-4)
    (alike,) = estimates([{"anls": 0.5}] * 4, dict).values()
    assert (alike.low, alike.high) == pytest.approx((0.15, 0.85), abs=1e-3)
    (perfect,) = estimates([{"accuracy": 1.0}] * 20, dict).values()
    assert (perfect.low, perfect.high) == pytest.approx((0.8389, 1.0), abs=1e-4)


def test_intervals_are_the_same_each_time() -> None:
    marks = anls(np.random.default_rng(0), 40, 0.5)
    assert estimates(marks, dict) == estimates(marks, dict)


def test_a_figure_above_one_gets_quantiles() -> None:
    marks = [{"errors": float(n % 5), "length": 1.0} for n in range(60)]
    (figure,) = estimates(marks, wer().summary).values()
    assert figure.value == 2.0
    assert 1.5 < figure.low < 2 < figure.high < 2.5


def test_mcnemar_is_exact() -> None:
    assert mcnemar(3, 0) == 0.25
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert mcnemar(5000, 5000) == 1.0
    assert mcnemar(5300, 4700) < 1e-8


def test_marks_between_are_compared_by_a_bootstrap() -> None:
    chance = np.random.default_rng(0)
    first = [{"anls": float(value)} for value in chance.uniform(0, 0.8, 200)]
    second = [{"anls": mark["anls"] + float(chance.uniform(0, 0.1))} for mark in first]
    test = paired_test(first, second, dict, "anls")
    assert test.test == "paired permutation"
    assert 0.04 < test.low < test.value < test.high < 0.06
    assert test.p < 0.01
    same = paired_test(first, first, dict, "anls")
    assert (same.value, same.p, same.better, same.worse) == (0, 1, 0, 0)


def test_few_questions_do_not_show_a_difference() -> None:
    """Of the 8 exchanges of the answers to 3 questions, 2 are as far apart as the answers themselves."""
    first, second = [{"anls": 0.1}] * 3, [{"anls": value} for value in (0.2, 0.3, 0.5)]
    assert paired_test(first, second, dict, "anls").p == pytest.approx(0.25, abs=0.04)  # 4 sd of 2,000 draws


def test_paired_intervals_of_ratios_use_both_sides() -> None:
    metric = yes_no()
    chance = np.random.default_rng(1)
    first, second = yes_and_no(chance, 300, 0.4), yes_and_no(chance, 300, 0.1)
    test = paired_test(first, second, f1, "f1")
    assert test.low < test.value < test.high
    assert metric.higher_is_better
