"""Sampling follows the options of each request, and a row gets the same tokens in any company."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.engine.request import Constraint, Request, Sampling
from tessera.engine.sampler import (
    Sampled,
    Sampler,
    log_exponentials,
    prompt_logprobs,
    random_bits,
    token_keys,
)
from tests.errors import raises
from tests.quick import quick

CPU = torch.device("cpu")
JSON = Constraint("json_object")


def request_of(prompt: Sequence[int] = (1, 2), sampling: Sampling | None = None, **options: Any) -> Request:
    batch = Batch({"tokens": torch.tensor(list(prompt))})
    return Request(batch, sampling or Sampling(), **options)


def sampler_of(requests: Sequence[Request], vocabulary: int, device: torch.device = CPU) -> Sampler:
    sampler = Sampler(len(requests), vocabulary, device)
    for row, request in enumerate(requests):
        sampler.join(row, request)
    return sampler


def draws(sampling: Sampling, logits: Tensor, count: int, prompt: Sequence[int] = ()) -> Tensor:
    """Return how often each token is sampled by `count` requests that differ in their seeds alone."""
    requests = [request_of(prompt, Sampling(**{**vars(sampling), "seed": seed})) for seed in range(count)]
    sampled = sampler_of(requests, len(logits)).sample(logits.expand(count, -1), range(count))
    return sampled.tokens.bincount(minlength=len(logits))


def assert_distributed(counts: Tensor, chances: Tensor) -> None:
    """Compare counts with probabilities by chi-square. The limit is exceeded with probability e**-14 at most (Laurent
    and Massart). Tokens with fewer than 5 expected draws are one class."""
    assert counts[chances == 0].sum() == 0, "a token outside of the limits"
    expected = chances.double() * counts.sum()
    assert (counts[expected > 20] > 0).all(), "a token inside of the limits is missing"
    many = expected >= 5
    observed = torch.cat([counts[many].double(), counts[~many].sum()[None].double()])
    expected = torch.cat([expected[many], expected[~many].sum()[None]])
    used = expected > 0
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = max(int(used.sum()) - 1, 1)
    assert chi_square < freedom + 2 * math.sqrt(freedom * 14) + 28


OPTIONS = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.15, "repetition_penalty": 1.6},
    {"temperature": 0.8, "top_p": 0.02},
    {"temperature": 0.8, "top_p": 0.0},
)


@pytest.mark.parametrize("options", quick(OPTIONS, OPTIONS[0], OPTIONS[6], OPTIONS[7]))
def test_distributions_equal_those_of_transformers(options: dict[str, Any]) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = 2 * torch.randn(32, generator=torch.Generator().manual_seed(5))
    prompt = [3, 4, 5, 3]
    scores = logits[None].clone()
    if "repetition_penalty" in options:
        scores = process.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"])(torch.tensor([prompt]), scores)
    for name, kind in (
        ("temperature", process.TemperatureLogitsWarper),
        ("top_k", process.TopKLogitsWarper),
        ("top_p", process.TopPLogitsWarper),
        ("min_p", process.MinPLogitsWarper),
    ):
        if name in options:
            scores = kind(options[name])(torch.tensor([prompt]), scores)
    assert_distributed(draws(Sampling(**options), logits, 2000, prompt), scores[0].softmax(-1))


def test_top_k_and_top_p_treat_equal_scores_alike() -> None:
    """Which of several equal scores a search returns first depends on the device and on the other rows."""
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6), Sampling(1.0, top_k=3, top_p=0.5)):
        counts = draws(sampling, logits, 600)
        assert (counts > 0).tolist() == [True, True, True, True, False], sampling


def test_a_large_top_k_sorts_and_gives_the_same_distribution() -> None:
    logits = torch.linspace(3, 0, 1100)
    counts = draws(Sampling(1.0, top_k=1050, top_p=0.5), logits, 1000)
    inside = logits[:1050].softmax(-1)
    assert int(counts.nonzero().max()) <= int((inside.cumsum(-1) < 0.5).sum())


def test_random_bits_are_the_same_on_every_device() -> None:
    """The reference is the same hash in Python's integers."""

    def expected(key: int, token: int) -> int:
        x = (token * 0x9E3779B1 + (key >> 32)) % 2**32
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x + key) % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return (x ^ x >> 16) % 2**31

    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    bits = random_bits(torch.tensor(keys), 300)
    assert bits.tolist() == [[expected(key, token) for token in range(300)] for key in keys]


def test_random_numbers_are_finite_and_exponential() -> None:
    seeds, indices = torch.arange(64) // 8, torch.arange(64) % 8  # neighbours
    numbers = log_exponentials(token_keys(seeds, indices), 4096).double().exp()
    assert numbers.isfinite().all()
    count = numbers.numel()
    for power, moment, variance in ((1, 1, 1), (2, 2, 20)):  # of the exponential distribution
        error = float((numbers**power).mean()) - moment
        assert abs(error) < 6 * math.sqrt(variance / count)
    rows = numbers - 1
    correlation = rows @ rows.T / rows.shape[1]
    apart = correlation[~torch.eye(64, dtype=torch.bool)]
    assert float(apart.abs().max()) < 6 / math.sqrt(rows.shape[1])


def test_answers_of_one_prompt_do_not_repeat_each_other_later() -> None:
    """`Sampling.nth` adds multiples of a constant to the seed. Answer 1 must not be answer 0, one token later."""
    requests = [request_of(sampling=Sampling(1.0, seed=7).nth(n)) for n in range(3)]
    sampler = sampler_of(requests, 1000)
    answers = torch.stack([sampler.sample(torch.zeros(3, 1000), [0, 1, 2]).tokens for _ in range(20)])
    assert len(set(answers.flatten().tolist())) > 50


# ---------------------------------------------------------------------------------------------- rows in company

VOCABULARY = 60


def mixed_requests() -> list[Request]:
    choose = random.Random(3)
    requests = []
    for seed in range(12):
        sampling = Sampling(
            temperature=choose.choice([0.0, 0.7, 1.5]),
            top_k=choose.choice([0, 5, 20]),
            top_p=choose.choice([1.0, 0.7]),
            min_p=choose.choice([0.0, 0.05]),
            seed=seed * 10**12 - 5,
            repetition_penalty=choose.choice([1.0, 1.4]),
            presence_penalty=choose.choice([0.0, 0.5]),
            frequency_penalty=choose.choice([0.0, 0.3]),
            logit_bias=choose.choice([{}, {3: 2.0, 4: -100.0}]),
            allowed_tokens=choose.choice([None, frozenset(range(0, 60, 2))]),
        )
        stops = {"stop_tokens": frozenset({0, 1}), "min_new_tokens": choose.choice([0, 3])}
        requests.append(request_of([seed, seed + 1, seed + 1], sampling, **stops))
    return requests


def logits_after(request: Request, answer: Sequence[int]) -> Tensor:
    """Return logits as of a bf16 model, with many ties."""
    prompt = int(request.prompt["tokens"][0])
    generator = torch.Generator().manual_seed(hash((prompt, *answer)) % 2**31)
    return (3 * torch.randn(VOCABULARY, generator=generator)).round(decimals=1).to(torch.bfloat16)


def test_tokens_are_the_same_alone_in_company_and_after_preemption() -> None:
    requests = mixed_requests()
    alone = []
    for request in requests:
        sampler, answer = sampler_of([request], VOCABULARY), list[int]()
        for _ in range(8):
            answer.append(int(sampler.sample(logits_after(request, answer)[None], [0]).tokens))
        alone.append(answer)
    choose, sampler = random.Random(1), Sampler(5, VOCABULARY, CPU)
    answers: list[list[int]] = [[] for _ in requests]
    rows: dict[int, int] = {}  # row: request
    preempted = 0
    while unfinished := [n for n, answer in enumerate(answers) if len(answer) < 8]:
        for row in [row for row, n in rows.items() if len(answers[n]) == 8 or choose.random() < 0.1]:
            preempted += len(answers[rows.pop(row)]) < 8
            sampler.leave(row)
        waiting = [n for n in unfinished if n not in rows.values()]
        for row in set(range(5)) - set(rows):
            if waiting and choose.random() < 0.6:
                rows[row] = waiting.pop(choose.randrange(len(waiting)))
                sampler.join(row, requests[rows[row]], answers[rows[row]])
        batch = choose.sample(sorted(rows), choose.randint(0, len(rows)))
        if batch:
            logits = torch.stack([logits_after(requests[rows[row]], answers[rows[row]]) for row in batch])
            for row, token in zip(batch, sampler.sample(logits, batch).tokens.tolist(), strict=True):
                answers[rows[row]].append(token)
    assert answers == alone
    assert preempted > 3
    assert len({tuple(answer) for answer in alone}) == len(requests)


def test_nothing_is_read_from_the_device() -> None:
    """Tensors of the meta device have no values: reading one on the host, or a shape that depends on one, raises."""
    meta = torch.device("meta")
    requests = [
        *mixed_requests(),
        request_of(logprobs=3, constraint=JSON),
        request_of(sampling=Sampling(1.0, top_p=0.9)),
    ]
    sampler = sampler_of(requests, VOCABULARY, meta)
    for _ in range(5):  # stop tokens are allowed after the third token
        masks = torch.empty(len(requests), 2, dtype=torch.int32, device=meta)
        logits = torch.empty(len(requests), VOCABULARY, dtype=torch.bfloat16, device=meta)
        sampled = sampler.sample(logits, range(len(requests)), masks)
    assert sampled.tokens.shape == sampled.not_finite.shape == (len(requests),)
    assert sampled.top_tokens is not None
    assert sampled.top_tokens.shape == (len(requests), 3)


def test_greedy_rows_need_one_maximum() -> None:
    class Recorder(torch.overrides.TorchFunctionMode):
        names: set[str] = set()  # noqa: RUF012

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    sampler = sampler_of([request_of(), request_of()], 50)
    logits = torch.randn(2, 50).to(torch.bfloat16)
    sampler.sample(logits, [0, 1])
    with Recorder() as recorder:
        tokens = sampler.sample(logits, [0, 1]).tokens
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert not recorder.names & {"sort", "topk", "argmax", "float", "index_select", "log_", "scatter_add_"}
    assert "max" in recorder.names


# ---------------------------------------------------------------------------------------------- penalties and masks


def test_penalties_count_tokens_of_prompt_and_answer() -> None:
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.25)
    prompt, answer = [5, 6, 6], [7]
    sampler = Sampler(3, 12, CPU)
    sampler.join(1, request_of(prompt, sampling), answer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        logits = torch.randn(12, generator=generator)
        expected = []
        for token, value in enumerate(logits.tolist()):
            if token in prompt + answer:
                value = value * 1.3 if value < 0 else value / 1.3
            expected.append(value - 0.25 * answer.count(token) - 0.4 * (token in answer))
        answer.append(int(sampler.sample(logits[None], [1]).tokens))
        assert answer[-1] == max(range(12), key=expected.__getitem__)
    sampler.leave(1)
    sampler.join(1, request_of([1], Sampling(presence_penalty=2.0)))
    logits = torch.zeros(1, 12)
    logits[0, answer[-1]] = 1.0
    assert sampler.sample(logits, [1]).tokens.tolist() == [answer[-1]], "the row has forgotten the earlier request"


def test_bias_and_allowed_tokens() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 3)
    options = ({"logit_bias": {3: 3.5}}, {"allowed_tokens": frozenset({2, 3})}, {})
    sampler = sampler_of([request_of(sampling=Sampling(**option)) for option in options], 4)
    assert sampler.sample(logits, [0, 1, 2]).tokens.tolist() == [3, 2, 0]
    assert sampler.sample(logits, [2, 1, 0]).tokens.tolist() == [0, 2, 3]


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0, 0.0]])
    request = request_of(stop_tokens=frozenset({0, 1, 77}), min_new_tokens=2, sampling=Sampling(logit_bias={2: 1.0}))
    sampler = sampler_of([request], 4)
    assert [int(sampler.sample(logits, [0]).tokens) for _ in range(4)] == [2, 2, 0, 0]
    sampler.leave(0)
    sampler.join(0, request, [2])
    assert [int(sampler.sample(logits, [0]).tokens) for _ in range(2)] == [2, 0]
    only_stops = request_of(
        stop_tokens=frozenset({0, 1}), min_new_tokens=2, sampling=Sampling(allowed_tokens=frozenset({1}))
    )
    assert sampler_of([only_stops], 4).sample(logits, [0]).tokens.tolist() == [1]


def test_masks_restrict_rows_with_a_constraint() -> None:
    logits = torch.arange(40.0).expand(4, -1)
    masks = torch.zeros(4, 2, dtype=torch.int32)
    masks[0, 0] = 1 << 5 | -(1 << 31)  # tokens 5 and 31
    masks[1, 1] = 0b11  # tokens 32 and 33
    masks[2, 0] = 0b10  # token 1, a stop token
    constrained = request_of(constraint=JSON, sampling=Sampling(2.0))
    ends = request_of(constraint=JSON, stop_tokens=frozenset({1}), min_new_tokens=5)
    sampler = sampler_of([request_of(constraint=JSON), constrained, ends, request_of()], 40)
    tokens = sampler.sample(logits, [0, 1, 2, 3], masks).tokens.tolist()
    assert tokens[0] == 31
    assert tokens[1] in (32, 33)
    assert tokens[2] == 1, "a complete answer ends before min_new_tokens"
    assert tokens[3] == 39, "rows without a constraint ignore their mask"


def test_unknown_tokens_are_refused_before_they_reach_the_device() -> None:
    for sampling in (Sampling(logit_bias={4: 1.0}), Sampling(allowed_tokens=frozenset({1, -1}))):
        with raises("generation.token-out-of-range"):
            Sampler(1, 4, CPU).check(request_of(sampling=sampling))
    Sampler(1, 4, CPU).check(request_of(sampling=Sampling(logit_bias={3: 1.0})))


# ---------------------------------------------------------------------------------------------- what else is returned


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    bent = Sampling(0.1, logit_bias={4: 50.0}, seed=3)
    sampler = sampler_of([request_of(sampling=bent, logprobs=2), request_of(), request_of(logprobs=0)], 20)
    sampled = sampler.sample(logits, [0, 1, 2])
    expected = logits.float().log_softmax(-1)
    assert sampled.tokens[0] == 4
    assert sampled.logprobs is not None
    assert sampled.top_values is not None
    assert sampled.top_tokens is not None
    assert sampled.logprobs.isnan().tolist() == [False, True, False]
    assert sampled.ranks is not None
    assert sampled.ranks[::2].tolist() == [
        1 + int((row > row[t]).sum()) for row, t in ((logits[0], 4), (logits[2], int(sampled.tokens[2])))
    ]
    close = {"rtol": 0, "atol": 8 * torch.finfo(torch.float32).eps * 20}
    torch.testing.assert_close(sampled.logprobs[0], expected[0, 4], **close)
    assert sampled.top_tokens[0].tolist() == expected[0].topk(2).indices.tolist()
    torch.testing.assert_close(sampled.top_values[0], expected[0].topk(2).values, **close)
    assert sampler_of([request_of()], 20).sample(logits[:1], [0]).logprobs is None


def test_logprobs_of_prompts_of_any_length() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, tokens = torch.randn(150, 30, generator=generator), torch.randint(30, (150,), generator=generator)
    sampled: Sampled = prompt_logprobs(logits, tokens, 40)
    expected = logits.log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.top_values is not None
    torch.testing.assert_close(sampled.logprobs, expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    assert sampled.top_values.shape == (150, 30), "no more than there are"
    assert sampled.top_tokens is not None
    assert sampled.ranks is not None
    assert sampled.top_tokens.gather(1, sampled.ranks.long()[:, None] - 1).flatten().tolist() == tokens.tolist()
    assert prompt_logprobs(logits, tokens, 0).top_values is None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5, min_p=0.1)])
def test_rows_that_are_not_finite_are_reported_and_others_go_on(sampling: Sampling) -> None:
    logits = torch.zeros(5, 8)
    logits[:, 6] = 40.0
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 1] = torch.inf
    logits[3, :6] = -torch.inf  # tokens that the model never samples
    sampled = sampler_of([request_of(sampling=sampling, logprobs=1)] * 5, 8).sample(logits, range(5))
    assert sampled.not_finite.tolist() == [True, True, True, False, False]
    assert sampled.tokens[3:].tolist() == [6, 6]
    assert ((sampled.tokens >= 0) & (sampled.tokens < 8)).all()
