"""Families that see against transformers, in fp32: logits, loss and every gradient; theirs sample by sample, ours
packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity import compare_gradients, compare_outputs, from_foreign, relative
from vision_language_families import VISION_LANGUAGE

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tests.close import assert_as_close

NAMES = list(VISION_LANGUAGE)
SHAPES = [
    pytest.param(name, number, marks=[] if number in family.quick else [pytest.mark.slow])
    for name, family in VISION_LANGUAGE.items()
    for number in range(len(family.shapes))
]
ALONE = [(name, number) for name, family in VISION_LANGUAGE.items() for number in family.alone]
RICHEST = {(name, number): list(VISION_LANGUAGE[name].media(number))[-1] for name, number in ALONE}
# Packed batches contain a sample of every kind. Alone, `make test` compares text without media and the sample that has
# the most media.
SAMPLES = [
    pytest.param(name, number, media, marks=[] if media in ("text", RICHEST[name, number]) else [pytest.mark.slow])
    for name, number in ALONE
    for media in VISION_LANGUAGE[name].media(number)
]


def compare(name: str, number: int, seed: int, media: list[str], padding: int) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, seed)
    cases = family.cases(pair, number, media, seed)
    logits = [pair.reference(**family.inputs(pair, case)).logits[0] for case in cases]
    batch = family.pack(pair.config, cases, padding)
    compare_outputs(pair.model, batch, logits, [case.labels for case in cases], family.tolerance)
    theirs = family.gradients(pair)
    compare_gradients(family.spec, pair.config, pair.model, theirs, family.tolerance, family.beside)


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_packed_batches_of_everything(name: str, number: int) -> None:
    compare(name, number, 10 * number, sorted(VISION_LANGUAGE[name].media(number)), padding=number)


@pytest.mark.parametrize(("name", "number", "media"), SAMPLES)
def test_single_samples(name: str, number: int, media: str) -> None:
    compare(name, number, 3, [media], padding=5)


@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_every_attention_gives_the_same_logits(name: str, implementation: str) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(2, 1)
    media = [one for one in ("mixed", "text", "one") if one in family.media(2)]
    batch = family.pack(pair.config, family.cases(pair, 2, media, 7), 3)
    config = family.config(2, attention=implementation)
    other = from_foreign(family.spec, config, family.state(pair.reference))
    assert relative(other(batch, logits=True)["logits"], pair.model(batch, logits=True)["logits"]) < family.tolerance


@pytest.mark.parametrize(("name", "number"), ALONE)
def test_cached_decoding_equals_the_full_forward(name: str, number: int) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, 5)
    model = pair.model.eval()
    media = [one for one in ("one", "text", "video", "several") if one in family.media(number)][:3]
    cases = family.cases(pair, number, media, 20)
    steps = 3  # every sample ends with at least four words, none of them a picture
    prompts = [
        replace(c, tokens=c.tokens[:-steps], labels=c.labels[:-steps], positions=c.positions[..., :-steps])
        for c in cases
    ]
    lengths = [case.tokens.numel() for case in cases]
    with torch.no_grad():
        full = model(family.pack(pair.config, cases), logits=True)["logits"]
        cache = model.new_cache(len(cases), max(lengths))
        rows = [CacheRow([row], 0, length - steps) for row, length in enumerate(lengths)]
        step = CacheStep.of(rows, max(lengths), "cpu")
        got = [model(family.pack(pair.config, prompts), logits="last", cache=cache, step=step)["logits"]]
        for at in range(-steps, 0):
            tokens = torch.stack([case.tokens[at] for case in cases])
            positions = torch.stack([case.positions[..., at] for case in cases], dim=-1)
            rows = [CacheRow([row], length + at, 1) for row, length in enumerate(lengths)]
            step = CacheStep.of(rows, max(lengths), "cpu")
            batch = Batch({"tokens": tokens, "positions": positions})
            got.append(model(batch, logits=True, cache=cache, step=step)["logits"])
    ends = torch.tensor(lengths).cumsum(0)
    for number, logits in enumerate(got):
        assert relative(logits, full[ends - 1 - steps + number]) < family.tolerance


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "number"), ALONE)
def test_an_idle_encoder_changes_nothing_and_gets_zero_gradients(name: str, number: int, training: bool) -> None:
    family = VISION_LANGUAGE[name]
    pair = family.pair(number, 5)
    model = pair.model.train(training)
    batch = family.pack(pair.config, family.cases(pair, number, ["text"], 1))
    hidden = model(batch)["logits"].hidden
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(hidden, plain)
    hidden.sum().backward()
    for path, parameter in model.named_parameters():
        if path != "head.weight":  # what no part of an answer reads is not trained, and has no gradient
            assert (parameter.grad is not None) == parameter.requires_grad, path
        if path.startswith(("vision.", "projector.", "audio")) and parameter.requires_grad:
            assert not parameter.grad.any(), path


@pytest.mark.parametrize("name", NAMES)
def test_bf16_weights_take_fp32_pixels_and_stay_near_fp32(name: str) -> None:
    """As near as transformers' own model is in bf16: rounded weights move the logits of such small models by some
    per cent, on some machines by 10."""
    family = VISION_LANGUAGE[name]
    pair = family.pair(0, 5)
    media = "mixed" if "mixed" in family.media(0) else "several"
    (case,) = family.cases(pair, 0, [media], 1)
    batch = family.pack(pair.config, [case])
    with torch.no_grad():
        wide = pair.model(batch, logits=True)["logits"]
        narrow = pair.model.bfloat16()(batch, logits=True)["logits"]
        inputs = family.inputs(pair, case)
        inputs = {key: x.bfloat16() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}
        theirs = pair.reference.bfloat16()(**inputs).logits[0]
    assert narrow.dtype == theirs.dtype == torch.bfloat16
    assert_as_close(narrow, theirs, wide.double())
