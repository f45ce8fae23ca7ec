"""Sampled answers are the same alone, in any company and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from engine_cases import MOST_NEW, main_shape, models_of

from tessera.engine.engine import Engine
from tessera.engine.request import Request, Sampling
from tests.dist.spawn import end_ranks, run_ranks
from tests.toys.engine_models import BareModel
from tests.toys.random_times import Run, limits_for, run_at_random_times

Tokens = tuple[int, ...]
MOST_ANSWERS = 3  # to one prompt (`n`)
# Main shapes, and one of Qwen3-VL with experts.
SHAPES = {name: main_shape(name) for name in ("llama", "qwen3 with experts", "qwen2_5_vl", "internvl")} | {
    "qwen3_vl": 6
}


def sampled_requests(name: str, count: int) -> list[Request]:
    """Return requests that sample in different ways. Some prompts are answered several times."""
    chance, models = Random(name), models_of(name, SHAPES[name])
    requests: list[Request] = []
    while len(requests) < count:
        _, prompt, _ = models.case(len(requests))
        sampling = Sampling(
            temperature=chance.choice([0.0, 0.6, 1.0, 1.0, 1.6]),
            top_k=chance.choice([0, 0, 4, 20]),
            top_p=chance.choice([1.0, 0.9, 0.6]),
            min_p=chance.choice([0.0, 0.0, 0.05]),
            seed=chance.getrandbits(40),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
            presence_penalty=chance.choice([0.0, 0.0, 0.7]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.4]),
            logit_bias=chance.choice([{}, {}, {chance.randrange(70): 2.0}]),
        )
        stops = frozenset(chance.sample(range(70), 3)) if chance.random() < 0.3 else frozenset()
        for index in range(chance.randint(1, MOST_ANSWERS)):
            requests.append(Request(prompt, sampling.nth(index), MOST_NEW, min_new_tokens=2, stop_tokens=stops))
    return requests[:count]


def alone(name: str, requests: Sequence[Request]) -> list[Tokens]:
    """Return the answers of a new engine for each request."""
    model = BareModel.of(models_of(name, SHAPES[name]).model)
    return [Engine(model).run([request])[0].tokens for request in requests]


def in_company(name: str, requests: Sequence[Request], seed: int) -> tuple[list[Tokens], Run]:
    """Return the answers of an engine whose requests come in another order, join and leave, and are preempted."""
    order = Random(seed).sample(range(len(requests)), len(requests))
    engine = Engine(BareModel.of(models_of(name, SHAPES[name]).model), limits_for(requests))
    run = run_at_random_times(engine, [requests[number] for number in order], seed)
    answers = {number: answer.tokens for number, answer in zip(order, run.answers, strict=True)}
    return [answers[number] for number in range(len(requests))], run


def after_a_restart(rank: int, world: int, name: str, count: int) -> tuple[list[Tokens], list[Tokens]]:
    """Return the answers of a process that has made the model and the requests again."""
    requests = sampled_requests(name, count)
    return alone(name, requests), in_company(name, requests, 3)[0]


def compare(name: str, count: int) -> list[Tokens]:
    requests = sampled_requests(name, count)
    expected = alone(name, requests)
    for seed in (1, 2):
        answers, run = in_company(name, requests, seed)
        assert answers == expected
        assert run.forced > 0
        assert run.chunked > 0
        assert run.reusing > 0
    sampled = [number for number, request in enumerate(requests) if request.sampling.temperature >= 1]
    assert len({expected[number] for number in sampled}) > 0.8 * len(sampled), "seeds and prompts matter"
    return expected


def test_sampled_answers_are_those_of_each_request_alone() -> None:
    compare("qwen3 with experts", 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_answers_are_the_same_alone_in_company_and_after_a_restart(name: str) -> None:
    expected = compare(name, 40)
    end_ranks(1)  # a process that has not seen these requests
    ((again, in_other_company),) = run_ranks(after_a_restart, 1, name, 40)
    assert again == expected
    assert in_other_company == expected
