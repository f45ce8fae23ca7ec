"""Mixed requests of every family join and leave the engine at random times, and get the tokens of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from engine_cases import FAMILIES, MOST_NEW, Reference, Tie, main_shape, models_of, references_of, shapes_of

from tessera.engine.engine import Engine
from tessera.engine.request import Request, Sampling
from tests.dist.spawn import run_ranks
from tests.toys.engine_models import BareModel
from tests.toys.random_times import Run, limits_for, run_at_random_times, run_over_ranks

Recorder = Callable[[str, object], None]
SEED = 1
ABORTS = 0.03  # share of the steps
SPREAD = 5  # how many other prompts come between two requests for one


@dataclass(frozen=True)
class Turn:
    """Hold a request for a prompt whose answer has a number of tokens already."""

    reference: Reference
    start: int
    request: Request


def mixed_turns(name: str, shape: int, prompts: int, count: int) -> list[Turn]:
    """Return requests for prompts of all kinds of media, in random order. Each prompt is sent several times within a
    short time: alone, and with a part of its answer, as in the next turns of a conversation."""
    chance, references = Random(f"{name} {shape}"), references_of(name, shape, prompts)
    turns = []
    for number in range(count):
        reference, start = references[number % prompts], chance.randrange(MOST_NEW) if number >= prompts else 0
        new = chance.randint(1, MOST_NEW - start)
        turns.append(Turn(reference, start, Request(reference.continued(start), max_new_tokens=new)))
    at = [number % prompts + chance.uniform(0, SPREAD) for number in range(count)]
    kinds = models_of(name, shape).kinds
    assert {turn.reference.kind for turn in turns} == set(kinds[:prompts]), "no, one and many images; videos"
    assert len({tuple(reference.tokens) for reference in references}) > prompts // 4, "the prompts matter"
    return [turns[number] for number in sorted(range(count), key=at.__getitem__)]


QUICK = ("qwen3 with experts", "internvl", "qwen3_omni")  # the others have the decoder or the encoders of one of these


def compare(turns: Sequence[Turn], run: Run, record: Recorder) -> None:
    """Check the tokens of all answers, and that everything happened that could have changed them."""
    ties: list[Tie] = []
    for turn, answer in zip(turns, run.answers, strict=True):
        aborted = answer.finish.reason == "aborted"
        assert aborted or len(answer.tokens) == turn.request.max_new_tokens
        ties += turn.reference.ties(turn.start, answer.tokens)
    record("requests", len(turns))
    record("ties", [(tie.margin, tie.limit) for tie in ties])
    record("least margin", min(min(turn.reference.margins) for turn in turns))
    record("run", {name: value for name, value in vars(run).items() if name != "answers"} | {"aborted": run.aborted})
    assert run.forced > 0
    assert run.chunked > 0
    assert run.reusing > 0
    assert run.steps > len(turns)
    assert run.aborted < len(turns) // 5, "most answers are compared to their end"
    if len(turns) >= 200:
        assert run.preemptions > 0, "blocks run out"
        assert run.aborted > 0


def compare_one_rank(name: str, shape: int, prompts: int, count: int, record: Recorder) -> None:
    turns = mixed_turns(name, shape, prompts, count)
    requests = [turn.request for turn in turns]
    engine = Engine(BareModel.of(models_of(name, shape).model), limits_for(requests))
    compare(turns, run_at_random_times(engine, requests, SEED, ABORTS), record)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES]
)
def test_requests_at_random_times_get_the_tokens_of_transformers(name: str, record_property: Recorder) -> None:
    compare_one_rank(name, 0, 7, 14, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_many_requests_get_the_tokens_of_transformers(name: str, record_property: Recorder) -> None:
    compare_one_rank(name, main_shape(name), 64, 200, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name in FAMILIES for shape in shapes_of(name) if shape != main_shape(name)]
)
def test_requests_of_every_shape_get_the_tokens_of_transformers(
    name: str, shape: int, record_property: Recorder
) -> None:
    compare_one_rank(name, shape, 16, 40, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_over_two_ranks_get_the_tokens_of_transformers(
    name: str, tmp_path: Path, record_property: Recorder
) -> None:
    shape = main_shape(name)
    turns = mixed_turns(name, shape, 64, 200)
    requests = [turn.request for turn in turns]
    models_of(name, shape).reference.save_pretrained(tmp_path)
    limits = limits_for(requests)
    first, second = run_ranks(run_over_ranks, 2, tmp_path, {"tp": 2}, requests, limits, SEED, ABORTS, timeout=900)
    assert [answer.tokens for answer in first.answers] == [answer.tokens for answer in second.answers]
    compare(turns, first, record_property)


def test_a_token_that_differs_is_a_tie_only_within_rounding() -> None:
    """The comparison itself: of two equal rows of the head either may be chosen, of others only the likelier one."""
    models, reference = copy.deepcopy(models_of("llama")), references_of("llama", 0, 1)[0]
    token = reference.tokens[0]
    twin, other = [number for number in range(2, 12) if number not in reference.tokens][:2]
    for head in (models.reference.lm_head.weight, models.model.head.weight):
        head.data[twin] = head.data[token]
    reference = replace(reference, model=models.reference)
    engine = Engine(BareModel.of(models.model))

    def answer(favoured: int, bias: float) -> tuple[int, ...]:
        sampling = Sampling(logit_bias={favoured: bias})
        return engine.run([Request(reference.prompt, sampling, max_new_tokens=MOST_NEW)])[0].tokens

    assert answer(twin, 1e-3)[0] == twin
    ties = reference.ties(0, answer(twin, 1e-3))
    assert ties
    assert all(tie.margin == 0 for tie in ties)
    with pytest.raises(AssertionError, match="less likely"):
        reference.ties(0, answer(other, 90.0))
