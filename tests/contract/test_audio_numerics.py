"""Families that hear against transformers, in fp32: features, logits, loss and every gradient; theirs sample by sample,
ours packed. Thinkers, which also see, are compared here with float64 as the judge."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from audio_cases import HEARING, AudioCase, packed, sound
from parity import compare_gradients, compare_outputs, from_foreign, relative, spread, to_foreign
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor
from vision_language_families import VISION_LANGUAGE

from tessera.core.batch import IGNORE, Batch
from tessera.core.spec import ModelSpec
from tessera.models.audio.features import LogMel
from tessera.ops.loss import linear_cross_entropy
from tests.close import assert_as_close, rounding

NAMES = list(HEARING)
SHAPES = [
    pytest.param(name, number, marks=[] if number < 2 else [pytest.mark.slow])
    for name, case in HEARING.items()
    for number in range(len(case.shapes))
]


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("samples", [401, 1_000, 16_000, 16_001, 48_160])
def test_features_are_those_of_transformers(samples: int, bins: int) -> None:
    extractor, ours, heard = WhisperFeatureExtractor(feature_size=bins), LogMel(bins), sound(samples)
    alone = extractor(heard, sampling_rate=16_000, padding=False, return_tensors="np")["input_features"][0].T
    # A logarithm turns the relative error of a sum of squares over 201 frequencies into an absolute one.
    limit = rounding(201) / np.log(10) / 4
    np.testing.assert_allclose(ours(heard), alone, atol=limit)
    filled = extractor(heard, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    frames = int(filled["attention_mask"].sum())
    assert ours.frames(samples) == frames
    whole = filled["input_features"][0].T
    np.testing.assert_allclose(ours(heard, ours.longest), whole, atol=limit)
    np.testing.assert_allclose(ours(heard, ours.longest, frames + 2), whole[: frames + 2], atol=limit)


def test_features_of_silence_and_of_the_longest_clip() -> None:
    extractor, ours = WhisperFeatureExtractor(chunk_length=2), LogMel(seconds=2)
    for heard in (np.zeros(5_000, dtype=np.float32), sound(32_000)):
        theirs = extractor(heard, sampling_rate=16_000, return_tensors="np")["input_features"][0].T
        np.testing.assert_allclose(ours(heard, 32_000), theirs, atol=rounding(201) / np.log(10) / 4)


def compare(case: AudioCase, number: int, counts: list[int], seed: int, padding: int) -> None:
    config, reference, model = case.pair(number, seed)
    heard = [case.heard(number, clips, seed + at) for at, clips in enumerate(counts)]
    logits = [case.theirs(reference, number, one) for one in heard]
    batch = packed(case, number, heard, padding)
    compare_outputs(model, batch, logits, [one.encoded.labels for one in heard], case.tolerance)
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    compare_gradients(case.spec, config, model, theirs, case.tolerance, case.beside)


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_packed_batches(name: str, number: int) -> None:
    compare(HEARING[name], number, [1, 0, 2], seed=number, padding=number)


def in_double(reference: nn.Module) -> nn.Module:
    """A copy in float64 of transformers' model, which takes the same inputs."""
    exact = copy.deepcopy(reference).double()
    exact.set_experts_implementation("eager")  # grouped products know no float64

    def cast(
        _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        floats = {n: x.double() for n, x in named.items() if isinstance(x, Tensor) and x.is_floating_point()}
        return positional, {**named, **floats}

    exact.register_forward_pre_hook(cast, with_kwargs=True)
    return exact


def loss_of(logits: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    shifted = torch.cat([torch.cat([wanted[1:], torch.tensor([IGNORE])]) for wanted in labels])
    return torch.nn.functional.cross_entropy(torch.cat(list(logits)), shifted, ignore_index=IGNORE, reduction="sum")


def judge(spec: ModelSpec, config: Any, model: nn.Module, batch: Batch, peers: Sequence[Any]) -> None:
    """`peers`: transformers' model, and its copy in float64, each with its logits and labels of every sample."""
    out = model(batch, logits=True)["logits"]
    hidden, head = model(batch)["logits"]
    loss, _ = linear_cross_entropy(hidden, head.weight, batch["labels"], implementation="eager")
    loss.backward()
    losses = [loss_of(logits, labels) for _, logits, labels in peers]
    for total in losses:
        total.backward()
    peer, exact = (torch.cat(list(logits)) for _, logits, _ in peers)
    assert_as_close(out[: len(peer)], peer, exact, k=4, what="logits")
    assert_as_close(loss, *losses, k=4, what="loss", roundings=4)
    canonical = spec.main.weight_map(config).canonical
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    theirs, exactly = (
        {
            canonical(n): grad
            for n, grad in spread({n: p.grad for n, p in m.named_parameters() if p.grad is not None}).items()
        }
        for m, _, _ in peers
    )
    for name, grad in to_foreign(spec, config, gradients).items():
        if name in theirs:
            # Gradients of scores are small differences of terms as large as those of values.
            terms = exactly[re.sub(r"\.[qk]_proj\.", ".v_proj.", name)]
            assert_as_close(grad, theirs[name], exactly[name], k=4, what=name, roundings=8, terms=terms)


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_no_further_from_float64_than_transformers(name: str, number: int) -> None:
    case = HEARING[name]
    config, reference, model = case.pair(number, 20 + number)
    heard = [case.heard(number, clips, 30 + at) for at, clips in enumerate((1, 0, 2))]
    labels = [each.encoded.labels for each in heard]
    peers = [(m, [case.theirs(m, number, each) for each in heard], labels) for m in (reference, in_double(reference))]
    judge(case.spec, config, model, packed(case, number, heard, 3), peers)


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3))])
@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni"])
def test_thinkers_are_no_further_from_float64_than_transformers(name: str, number: int) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, 40 + number)
    cases = family.cases(pair, number, sorted(family.media(number)), 7)
    labels = [case.labels for case in cases]
    models = (pair.reference, in_double(pair.reference))
    peers = [(m, [m(**family.inputs(pair, case)).logits[0] for case in cases], labels) for m in models]
    judge(family.spec, pair.config, pair.model, family.pack(pair.config, cases, 3), peers)


@pytest.mark.parametrize("name", NAMES)
def test_one_clip_alone(name: str) -> None:
    compare(HEARING[name], 0, [1], seed=3, padding=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_every_attention_gives_the_same_logits(name: str, implementation: str) -> None:
    case = HEARING[name]
    _, reference, model = case.pair(1, 1)
    batch = packed(case, 1, [case.heard(1, 2, 1), case.heard(1, 0, 2)], 3)
    config = case.config(1, attention=implementation)
    other = from_foreign(case.spec, config, dict(reference.state_dict()))
    assert relative(other(batch, logits=True)["logits"], model(batch, logits=True)["logits"]) < case.tolerance


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_encoder_changes_nothing_and_gets_zero_gradients(name: str) -> None:
    case = HEARING[name]
    _, _, model = case.pair(0, 5)
    batch = packed(case, 0, [case.heard(0, 0, 1)])
    hidden = model(batch)["logits"].hidden
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(hidden, plain)
    hidden.sum().backward()
    for path, parameter in model.named_parameters():
        if path.startswith("audio"):
            assert (parameter.grad is not None) == parameter.requires_grad, path
            assert parameter.grad is None or not parameter.grad.any(), path
