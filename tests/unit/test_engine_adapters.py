"""Requests of one engine with different adapters give the tokens that each gives alone, with its adapter merged."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tessera.checkpoint.state import model_tensors
from tessera.engine.engine import Engine
from tessera.engine.request import Request
from tessera.engine.scheduler import EngineLimits
from tests.errors import raises
from tests.toys.banked import NEW, Banked, alone, linear_layers, mixture, prompt, vision_language
from tests.toys.engine_models import BareModel


def adapters(banked: Banked, folder: Path) -> dict[str, Path]:
    layers = linear_layers(banked.model, "text.")
    tower = [*linear_layers(banked.model, "vision.blocks"), *linear_layers(banked.model, "projector")]
    experts = [f"text.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return {
        "a": banked.write(folder / "a", [*layers, *tower], 1),
        "b": banked.write(folder / "b", layers[::2], 2, rank=9),
        "c": banked.write(folder / "c", experts if banked is mixture() else layers, 3),
    }


@pytest.mark.parametrize(
    "banked", [vision_language(), pytest.param(mixture(), marks=pytest.mark.slow)], ids=["images", "experts"]
)
def test_each_request_gives_the_tokens_of_its_merged_adapter(banked: Banked, tmp_path: Path) -> None:
    """Requests join and leave; some have equal prompts and images; adapters come and go."""
    folders = adapters(banked, tmp_path)
    served = Banked(banked.spec, banked.config, copy.deepcopy(banked.model))
    models = {None: banked.model, **{name: banked.merged(folder) for name, folder in folders.items()}}
    images = banked is vision_language()
    prompts = [prompt(banked, seed, image=images and seed % 2 == 1) for seed in range(3)]
    expected = {(name, n): alone(model, batch) for name, model in models.items() for n, batch in enumerate(prompts)}
    assert sum(certain for _, certain in expected.values()) > 0.8 * NEW * len(expected), "few tokens are compared"
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(expected), "adapters and prompts matter"

    bank = served.bank(slots=3)
    engine = Engine(BareModel.of(served.model), EngineLimits(block_size=4, tokens=17, rows=5), bank)
    engine.load_adapter("a", folders["a"])
    engine.load_adapter("b", folders["b"])
    answers: dict[int, list[int]] = {}
    asked_for: dict[int, tuple[str | None, int]] = {}
    waiting = [(name, n) for n in range(3) for name in (None, "a", "b", "c")]
    steps = 0
    while waiting or engine.busy:
        for name, n in waiting[:1] if steps % 2 == 0 else []:
            if name == "c" and "c" not in engine.adapters:
                engine.load_adapter("c", folders["c"])
            number = engine.add(Request(prompts[n], max_new_tokens=NEW, adapter=name))
            asked_for[number] = waiting.pop(0)
        for delta in engine.step():
            answers.setdefault(delta.request, []).extend(delta.tokens)
            assert delta.finish is None or delta.finish.reason == "length", delta
        steps += 1
    for number, key in asked_for.items():
        tokens, certain = expected[key]
        assert answers[number][:certain] == tokens[:certain], key
    assert engine.stats().blocks_used == 0


def test_an_unloaded_adapter_serves_its_requests_to_the_end(tmp_path: Path) -> None:
    banked = vision_language()
    folders = adapters(banked, tmp_path)
    served = Banked(banked.spec, banked.config, copy.deepcopy(banked.model))
    engine = Engine(BareModel.of(served.model), EngineLimits(block_size=4), served.bank(slots=1))
    batch = prompt(banked, 1)
    before, certain = alone(banked.merged(folders["a"]), batch)
    after, also = alone(banked.merged(folders["b"]), batch)
    engine.load_adapter("x", folders["a"])
    request = Request(batch, max_new_tokens=NEW, adapter="x")
    running, prepared = engine.add(request), engine.prepare(request)
    deltas = engine.step()
    engine.unload_adapter("x")
    assert engine.adapters == []
    for call in (lambda: engine.add(request), lambda: engine.enqueue(prepared), lambda: engine.unload_adapter("x")):
        with raises("adapter.not-loaded"):
            call()
    with raises("adapter.name-in-use", "being unloaded"):  # the slot is free when the last request has ended
        engine.load_adapter("x", folders["b"])
    while engine.busy:
        deltas += engine.step()
    tokens = [token for delta in deltas if delta.request == running for token in delta.tokens]
    assert tokens[:certain] == before[:certain]
    # The same name with other weights: blocks of the first are not reused.
    engine.load_adapter("x", folders["b"])
    (answer,) = engine.run([request])
    assert list(answer.tokens)[:also] == after[:also]


def test_an_adapter_that_is_replaced_before_a_prepared_request_runs_shares_no_block(tmp_path: Path) -> None:
    """Requests are prepared in other threads: between that and their turn, a name may have got other weights."""
    banked = vision_language()
    folders = adapters(banked, tmp_path)
    served = Banked(banked.spec, banked.config, copy.deepcopy(banked.model))
    engine = Engine(BareModel.of(served.model), EngineLimits(block_size=4), served.bank(slots=1))
    batch = prompt(banked, 1)
    expected, certain = alone(banked.merged(folders["b"]), batch)
    engine.load_adapter("x", folders["a"])
    request = Request(batch, max_new_tokens=NEW, adapter="x")
    engine.run([request])  # its blocks remain for others
    state = engine.prepare(request)
    engine.unload_adapter("x")
    engine.load_adapter("x", folders["b"])
    number, tokens = engine.enqueue(state), []
    while engine.busy:
        deltas = engine.step()
        tokens += [token for delta in deltas for token in delta.tokens]
        finishes = [delta.finish for delta in deltas if delta.finish is not None and delta.request == number]
    assert tokens[:certain] == expected[:certain]
    assert finishes[0].cached_tokens == 0


def test_a_damaged_adapter_changes_nothing_for_others_and_loads_keep_memory_flat(tmp_path: Path) -> None:
    banked = vision_language()
    folder = banked.write(tmp_path / "a", linear_layers(banked.model, "text.layers.0.mlp"), 1)
    served = Banked(banked.spec, banked.config, copy.deepcopy(banked.model))
    bank = served.bank(slots=2)
    engine = Engine(BareModel.of(served.model), EngineLimits(block_size=4), bank)
    batch = prompt(banked, 2)
    tokens, certain = alone(banked.model, batch)
    engine.load_adapter("kept", folder)
    engine.load_adapter("changing", folder)
    number = engine.add(Request(batch, max_new_tokens=NEW))
    answer = [token for delta in engine.step() for token in delta.tokens]
    engine.unload_adapter("changing")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with raises("weights.unreadable-file"):
        engine.load_adapter("changing", folder)
    weights.write_bytes(whole)
    version = bank.version
    for _ in range(50):
        engine.load_adapter("changing", folder)
        engine.unload_adapter("changing")
        answer += [token for delta in engine.step() for token in delta.tokens if delta.request == number]
    assert answer[:certain] == tokens[:certain]
    assert bank.version == version, "no storage was allocated"
    assert len(answer) == NEW


def test_replaced_weights_answer_like_a_fresh_model() -> None:
    banked = vision_language()
    served = copy.deepcopy(banked.model)
    other = copy.deepcopy(banked.model)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=chance) if weight.dim() > 1 else 0.0)
    engine = Engine(BareModel.of(served), EngineLimits(block_size=4))
    request = Request(prompt(banked, 1, image=True), max_new_tokens=NEW)
    (before,) = engine.run([request])
    pointers = {name: tensor.data_ptr() for name, tensor in model_tensors(served).items()}
    for name, tensor, code in (("nothing", torch.ones(1), "name-not-in-model"),
                               ("text.norm.weight", torch.ones(3), "shape-not-of-model")):  # fmt: skip
        with raises(f"weights.{code}"):
            engine.replace_weights([(name, tensor)])
    engine.replace_weights(model_tensors(other).items())
    assert {name: tensor.data_ptr() for name, tensor in model_tensors(served).items()} == pointers
    (after,) = engine.run([request])
    (fresh,) = Engine(BareModel.of(other), EngineLimits(block_size=4)).run([request])
    assert after.tokens == fresh.tokens != before.tokens
    assert after.finish.cached_tokens == 0, "blocks of the weights before are not reused"
