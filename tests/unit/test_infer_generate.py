"""Generation gives what transformers gives, row by row, and sampling does what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tessera.inference.generate import Sampling, TextStream, generate_tokens, pick
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheStep
from tessera.errors import TesseraError
from tests.errors import raises

cases = pytest.importorskip("qwen2_vl_cases", reason="needs transformers, the reference")

GREEDY = Sampling()


@pytest.mark.parametrize("number", range(3))
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
    return generate_tokens(model, batch, max_new_tokens=12, stop_tokens=[1], sampling=GREEDY)


# ---------------------------------------------------------------------------------------------- a model of our own


class Counter:
    """Says (last token + 1) in each row; remembers what it was asked."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def new_cache(self, blocks: int, block_size: int) -> None:
        """It has none."""

    def __call__(self, batch: Batch, logits: str, cache: None, step: CacheStep) -> dict[str, Tensor]:
        self.batches.append(batch)
        return {"logits": 10.0 * torch.nn.functional.one_hot(batch["tokens"][step.last] + 1, 20)}


def prompt() -> Batch:
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 7, 0, 1, 2], [0, 1, 0, 1, 2]])
    return Batch({"tokens": torch.tensor([3, 5, 1, 1, 10]), "positions": positions}, {"text": Segments.of([2, 3])})


def test_each_row_stops_for_itself() -> None:
    heard: list[tuple[int, int]] = []
    model = Counter()
    out = generate_tokens(
        model,
        prompt(),
        max_new_tokens=5,
        stop_tokens=(8, 99),
        sampling=GREEDY,
        on_token=lambda row, token: heard.append((row, token)),
    )
    assert out == [[6, 7], [11, 12, 13, 14, 15]]
    assert heard == [(0, 6), (1, 11), (0, 7), (1, 12), (1, 13), (1, 14), (1, 15)]
    assert len(model.batches) == 5, "nothing is asked for after the last token"
    assert model.batches[1]["positions"].tolist() == [[8, 3]] * 3
    assert model.batches[4]["positions"].tolist() == [[6]] * 3, "a finished row leaves"


def test_all_done_ends_early_and_nothing_asked_is_nothing_done() -> None:
    model = Counter()
    assert generate_tokens(model, prompt(), max_new_tokens=50, stop_tokens=(7, 12), sampling=GREEDY) == [[6], [11]]
    assert len(model.batches) == 2
    assert generate_tokens(model, prompt(), max_new_tokens=0, stop_tokens=(), sampling=GREEDY) == [[], []]
    with raises("generation.max-tokens-too-small", "max_new_tokens"):
        generate_tokens(model, prompt(), max_new_tokens=-1, stop_tokens=(), sampling=GREEDY)


def test_nan_is_an_error_not_a_token() -> None:
    class Broken(Counter):
        def __call__(self, batch: Batch, logits: str, cache: None, step: CacheStep) -> dict[str, Tensor]:
            return {"logits": torch.full((step.rows, 20), float("nan"))}

    with raises("generation.output-not-finite"):
        generate_tokens(Broken(), prompt(), max_new_tokens=2, stop_tokens=(), sampling=GREEDY)


def test_a_seed_gives_the_same_again_whoever_is_in_the_next_row() -> None:
    def run(batch: Batch, seed: int) -> list[list[int]]:
        class Flat(Counter):
            def __call__(self, batch: Batch, logits: str, cache: None, step: CacheStep) -> dict[str, Tensor]:
                return {"logits": torch.zeros(step.rows, 1000)}

        return generate_tokens(Flat(), batch, max_new_tokens=8, stop_tokens=(), sampling=Sampling(1.0, seed=seed))

    first = run(prompt(), 1)
    alone = Batch({"tokens": torch.tensor([3]), "positions": torch.tensor([0])}, {"text": Segments.of([1])})
    assert run(prompt(), 1) == first
    assert run(alone, 1)[0] == first[0]
    assert run(prompt(), 2) != first
    assert first[0] != first[1]


# ---------------------------------------------------------------------------------------------- sampling

LOGITS = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
DRAWS = 2000
SQUARES = [share / 0.345 for share in (0.01, 0.25, 0.0225, 0.0625)]  # half the temperature squares the shares


def shares(sampling: Sampling, logits: Tensor = LOGITS) -> list[float]:
    """How often each token is chosen, over evenly spaced draws."""
    chosen = pick(logits.expand(DRAWS, -1), sampling, (torch.arange(DRAWS) + 0.5) / DRAWS)
    return [float((chosen == token).float().mean()) for token in range(logits.shape[-1])]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.1, 0.5, 0.15, 0.25]),
        (Sampling(1.0, top_k=2), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(1.0, top_k=99), [0.1, 0.5, 0.15, 0.25]),
        (Sampling(1.0, top_p=0.6), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(1.0, top_p=0.01), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=3, top_p=0.5), [0, 1, 0, 0]),  # of the three, the first has more than half already
        (Sampling(0.5), SQUARES),
        (Sampling(1e-4), [0, 1, 0, 0]),
    ],
)
def test_shares(sampling: Sampling, expected: list[float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=2 / DRAWS)  # a draw at either border


def test_the_highest_draw_stays_among_the_allowed() -> None:
    almost_one = torch.tensor([1.0])
    assert pick(LOGITS, Sampling(1.0, top_k=2), almost_one).item() == 3
    assert pick(torch.full((1, 50_000), -3.0), Sampling(1.0), almost_one).item() == 49_999


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_senseless_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(TesseraError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("unused", [{"top_k": 5}, {"top_p": 0.9}])
def test_limits_without_a_temperature_are_refused(unused: dict[str, Any]) -> None:
    with pytest.raises(TesseraError) as caught:
        Sampling(**unused)
    assert caught.value.code == "generation.option-without-effect"
    assert next(iter(unused)) in caught.value.what
    Sampling(0.5, **unused)


def test_a_stream_never_shows_half_a_character() -> None:
    data = "grün 😀!".encode()
    texts: list[str] = []
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"), texts.append)
    for byte in data:
        stream.add(0, byte)
    stream.close()
    assert "".join(texts) == "grün 😀!"
    assert "�" not in "".join(texts)
    assert len(texts) == len("grün 😀!")
