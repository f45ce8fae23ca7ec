"""Generation gives what transformers gives, row by row, and refuses options without effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.inference.sampling_options import sampling_of
from tests.errors import raises
from tests.quick import quick
from tests.toys.engine_models import Counter, new_tokens

cases = pytest.importorskip("qwen2_vl_cases", reason="needs transformers, the reference")


@pytest.mark.parametrize("number", quick(range(3), 0))
def test_greedy_equals_transformers(number: int) -> None:
    family = cases.Qwen2VL()
    pair = family.pair(number, number)
    config, reference, model = pair.config, pair.reference.eval(), pair.model.eval()
    merge = config.vision.spatial_merge_size
    media: list[list[tuple[str, tuple[int, int, int]]]] = [
        [],
        [("image", (1, 2 * merge, 3 * merge))],
        [("image", (1, merge, 2 * merge)), ("image", (1, 3 * merge, merge))],
    ]
    prompts = [family.case(pair, wanted, seed=10 + i) for i, wanted in enumerate(media)]
    expected = []
    for case in prompts:
        inputs = family.inputs(pair, case)
        inputs.pop("position_ids")
        out = reference.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        new = out[0, case.tokens.numel() :].tolist()
        expected.append(new[: new.index(1)] if 1 in new else new)
    alone = [generate_greedy(model, family.pack(config, [case])) for case in prompts]
    assert [rows[0] for rows in alone] == expected
    assert generate_greedy(model, family.pack(config, prompts)) == expected
    assert len({tuple(row) for row in expected}) > 1, "the prompts matter"


def generate_greedy(model: Any, batch: Batch) -> list[list[int]]:
    return new_tokens(model, batch, 12, [1])


class Flat(Counter):
    """Give all tokens the same probability."""

    vocabulary = 1000

    def logits(self, tokens: Tensor) -> Tensor:
        return torch.zeros(len(tokens), self.vocabulary)


def prompt(*lengths: int) -> Batch:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch({"tokens": torch.arange(len(positions)), "positions": positions}, {"text": Segments.of(lengths)})


def test_a_seed_gives_the_same_again_whoever_is_in_the_next_row() -> None:
    def run(batch: Batch, seed: int) -> list[list[int]]:
        return new_tokens(Flat(), batch, 8, sampling=Sampling(1.0, seed=seed))

    first = run(prompt(2, 3), 1)
    assert run(prompt(2, 3), 1) == first
    assert run(prompt(4), 1)[0] == first[0]
    assert run(prompt(2, 3), 2) != first
    assert first[0] != first[1]


def test_nan_is_an_error_not_a_token() -> None:
    class Broken(Counter):
        def logits(self, tokens: Tensor) -> Tensor:
            return torch.full((len(tokens), self.vocabulary), float("nan"))

    with raises("generation.output-not-finite"):
        new_tokens(Broken(), prompt(2), 2)


def test_no_prompts_and_no_tokens_need_no_call() -> None:
    assert new_tokens(Counter(), prompt(2, 3), 0) == [[], []]
    assert new_tokens(Counter(), Batch({"tokens": torch.empty(0)}, {"text": Segments.of([])}), 5) == []
    with raises("generation.max-tokens-too-small", "max_new_tokens"):
        new_tokens(Counter(), prompt(2), -1)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": -0.1}, {"top_p": 1.5}])
def test_senseless_settings_are_refused(bad: dict[str, Any]) -> None:
    with raises("generation.sampling-out-of-range", next(iter(bad))):
        sampling_of(**bad)


@pytest.mark.parametrize("unused", [{"top_k": 5}, {"top_p": 0.9}])
def test_limits_without_a_temperature_are_refused(unused: dict[str, Any]) -> None:
    with pytest.raises(TesseraError) as caught:
        sampling_of(**unused)
    assert caught.value.code == "generation.option-without-effect"
    assert next(iter(unused)) in caught.value.what
    sampling_of(0.5, **unused)
