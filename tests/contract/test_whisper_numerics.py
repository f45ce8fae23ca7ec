"""Whisper against transformers' class: logits, loss and all gradients, with float64 as the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import compare_gradients, to_foreign
from torch import Tensor, nn
from whisper_cases import SHAPES, config_of, in_double, packed, pair, sounds, theirs, transcripts

from tessera.core.batch import Batch, Segments
from tessera.nn.encoder_decoder import MEMORY
from tessera.ops.loss import linear_cross_entropy
from tests.close import assert_as_close

NUMBERS = range(len(SHAPES))


def ours(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    out = model(batch, logits=True)
    hidden, head = model(batch)["logits"]
    total, count = linear_cross_entropy(hidden, head.weight, batch["labels"], implementation="eager")
    return out["logits"], total / count


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_loss_and_gradients_are_those_of_transformers(number: int) -> None:
    spec, config, reference, model = pair(number)
    clips, labels = sounds(number), transcripts(number)
    batch = packed(config, clips, labels, padding=6)
    logits, loss = ours(model, batch)
    loss.backward()
    expected, their_loss = theirs(config, reference, clips, labels)
    their_loss.backward()
    _, _, exact_reference, exact_model = pair(number, torch.float64)
    exact, exact_loss = theirs(config, exact_reference, clips, labels)
    exact_loss.backward()
    count = sum(map(len, labels))
    assert_as_close(logits[:count], torch.cat(expected), torch.cat(exact), what="logits")
    assert_as_close(loss, their_loss, exact_loss, what="loss", roundings=4)
    mine = to_foreign(spec, config, gradients(model))
    peer, judge = gradients(reference), gradients(exact_reference)
    assert sorted(mine) == sorted(peer)
    for name, grad in mine.items():
        # Gradients of scores are small differences of terms as large as those of values: each row of them sums to zero.
        # The norm before cross-attention feeds queries alone.
        beside = judge[
            re.sub(r"\.[qk]_proj\.", ".v_proj.", name.replace("encoder_attn_layer_norm", "final_layer_norm"))
        ]
        assert_as_close(grad, peer[name], judge[name], what=name, roundings=8, terms=beside)
    # In float64 both compute the same function: what is left is rounding of float64 and of float32 features.
    double_logits, double_loss = ours(exact_model, in_double(batch))
    double_loss.backward()
    torch.testing.assert_close(double_logits[:count], torch.cat(exact), rtol=1e-4, atol=1e-5)
    compare_gradients(spec, config, exact_model, gradients(exact_reference), 1e-5)


def test_packed_transcripts_are_those_of_single_ones() -> None:
    _, config, _, model = pair(1, torch.float64)
    clips, labels = sounds(5), transcripts(5)
    whole = model(in_double(packed(config, clips, labels, padding=3)), logits=True)["logits"]
    alone = [
        model(in_double(packed(config, [clip], [words])), logits=True)["logits"]
        for clip, words in zip(clips, labels, strict=True)
    ]
    torch.testing.assert_close(whole[: sum(map(len, labels))], torch.cat(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "auto"])
def test_every_implementation_of_attention_computes_the_same(attention: str) -> None:
    spec, config, _, model = pair(0, torch.float64)
    other: Any = spec.main.build(config_of(0, attention=attention)[1]).double()
    other.load_state_dict(model.state_dict())
    batch = in_double(packed(config, sounds(2), transcripts(2), padding=6))
    torch.testing.assert_close(
        other(batch, logits=True)["logits"], model(batch, logits=True)["logits"], rtol=1e-10, atol=1e-10
    )


def test_a_batch_without_recordings_gives_every_parameter_a_gradient_of_zero_from_the_encoder() -> None:
    """Other ranks may have recordings, and wait for this rank's gradients."""
    _, config, _, model = pair(0)
    batch = packed(config, sounds(0), transcripts(0))
    tensors: Mapping[str, Tensor] = {n: t for n, t in batch.tensors.items() if not n.startswith("mel")}
    silent = replace(batch, tensors=dict(tensors), segments={**batch.segments, MEMORY: Segments.of([0, 0, 0])})
    del silent.segments["audio"]
    ours(model, silent)[1].backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            if name.startswith("audio."):
                assert not parameter.grad.any(), name
