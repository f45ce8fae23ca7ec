"""Mixed requests of every family join and leave the engine at random times, and get the tokens of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from language_cases import VOCAB, experts_of, text
from parity import from_foreign, reference_model, saved
from torch import Tensor
from vision_language import Case, packed_text
from vision_language_families import VISION_LANGUAGE

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.inference.engine.engine import Engine
from tessera.inference.engine.request import Answer, Delta, Request
from tessera.inference.engine.scheduler import EngineLimits
from tessera.models import resolve
from tests.close import rounding, size
from tests.toys.engine_models import BareModel

TEXT: dict[str, dict[str, Any]] = {
    "llama": text(2, 4, 2, 8),
    "qwen2": text(2, 4, 2, 8),
    "qwen3": text(2, 4, 2, 8, head_dim=8),
    "qwen3 with experts": text(2, 4, 2, 8, head_dim=8, experts=experts_of(6, 2)),
}
PROMPTS = 7  # each is asked twice, so that prefixes are reused
MOST_NEW = 6


@dataclass(frozen=True)
class Reference:
    """Hold a prompt with the tokens that transformers generates, and how far its two largest logits are apart."""

    prompt: Batch
    tokens: list[int]
    margins: list[float]
    scale: float  # size of its logits


def prompts_of(name: str, count: int, shape: int = 0) -> tuple[Any, list[Reference]]:
    """Return our model, and prompts with transformers' answers."""
    chance = Random(name)
    if name in TEXT:
        spec, config = resolve(ModelSection(family=name.split()[0], config={"text": TEXT[name], "attention": "eager"}))
        reference = reference_model(config, 4).eval()
        model = from_foreign(spec, config, saved(reference)).eval()
        references = []
        for number in range(count):
            tokens = torch.randint(2, VOCAB, (chance.randint(3, 30),), generator=torch.Generator().manual_seed(number))
            case = Case(tokens, tokens, torch.arange(len(tokens)), None)
            references.append(answer_of(reference, Batch(*packed_text([case], 0)), {"input_ids": tokens[None]}))
        return model, references
    family = VISION_LANGUAGE[name]
    pair = family.pair(shape, 4)
    reference, model = pair.reference.eval(), pair.model.eval()
    media, references = family.media(shape), []
    for number in range(count):
        case = family.case(pair, media[list(media)[number % len(media)]], 100 + number)
        inputs = family.inputs(pair, case)
        if "input_ids" in inputs:  # transformers' GLM-4.1V does not generate from images and videos together
            inputs.pop("position_ids", None)
            references.append(answer_of(reference, family.pack(pair.config, [case]), inputs))
    assert len(references) > count // 2
    return model, references


@torch.no_grad()
def answer_of(reference: Any, batch: Batch, inputs: dict[str, Tensor]) -> Reference:
    out = reference.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=MOST_NEW,
        do_sample=False,
        eos_token_id=10**6,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    largest = logits.topk(2).values
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Reference(batch, tokens, (largest[:, 0] - largest[:, 1]).tolist(), size(logits))


def answers_at_random_times(engine: Engine, requests: list[Request], chance: Random) -> list[Answer]:
    """Add the requests between random steps, preempt running ones, and return the answers."""
    waiting, numbers = list(requests), []
    deltas: dict[int, list[Delta]] = {}
    while waiting or engine.busy:
        while waiting and chance.random() < 0.6:
            numbers.append(engine.add(waiting.pop(0)))
        if engine._scheduler.running and chance.random() < 0.2:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
        for delta in engine.step():
            deltas.setdefault(delta.request, []).append(delta)
    return [Answer.of(deltas[number]) for number in numbers]


def compare(name: str, prompts: int, requests: int, shape: int = 0) -> None:
    model, references = prompts_of(name, prompts, shape)
    chance = Random(1)
    cases = [(references[number % len(references)], chance.randint(1, MOST_NEW)) for number in range(requests)]
    longest = max(reference.prompt["tokens"].numel() for reference, _ in cases) + MOST_NEW
    # Blocks for some requests: their prefixes are evicted now and then. Prompts are read in chunks.
    engine = Engine(BareModel.of(model), EngineLimits(blocks=longest, block_size=3, rows=6, tokens=longest // 3))
    answers = answers_at_random_times(
        engine, [Request(reference.prompt, max_new_tokens=new) for reference, new in cases], chance
    )
    ties = 0
    for (reference, new), answer in zip(cases, answers, strict=True):
        expected = reference.tokens[:new]
        differing = [at for at, pair in enumerate(zip(answer.tokens, expected, strict=True)) if pair[0] != pair[1]]
        if differing:
            # Two tokens are equally likely within the rounding of sums in another order.
            assert reference.margins[differing[0]] < rounding(64) * reference.scale, (name, differing)
            ties += 1
    assert ties <= requests // 20
    assert len({tuple(reference.tokens) for reference in references}) > len(references) // 2, "the prompts matter"
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.steps > requests
    assert stats.blocks_used == 0


@pytest.mark.parametrize("name", [*TEXT, *VISION_LANGUAGE])
def test_requests_at_random_times_get_the_tokens_of_transformers(name: str) -> None:
    compare(name, PROMPTS, 14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, 0) for name in TEXT), *((name, n) for name, f in VISION_LANGUAGE.items() for n in range(len(f.shapes)))],
)
def test_many_requests_of_every_shape_get_the_tokens_of_transformers(name: str, shape: int) -> None:
    compare(name, 100, 200, shape)
