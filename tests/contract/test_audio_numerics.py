"""Families that hear against transformers, in fp32: features, logits, loss and every gradient; theirs sample by sample,
ours packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from audio_cases import HEARING, AudioCase, packed, sound
from parity import compare_gradients, compare_outputs, from_foreign, relative
from transformers import WhisperFeatureExtractor

from tessera.models.audio.features import LogMel
from tests.close import rounding

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
