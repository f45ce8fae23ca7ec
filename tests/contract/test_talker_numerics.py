"""The talker of Qwen3-Omni against transformers' modules: logits, losses and all gradients, float64 as the judge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity import spread, to_foreign
from talker_cases import SHAPES, conversations, packed, pair, sequence_of, theirs
from torch import Tensor

from tessera.core.batch import Batch
from tessera.models.qwen3_omni_talker import SPEC
from tessera.nn.codes import code_output
from tessera.tasks.speech import CODE_LOSS, DEPTH_LOSS, SpeechTask
from tests.close import assert_as_close

NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 0)) for number in range(len(SHAPES))]


@dataclass(frozen=True)
class Result:
    outputs: dict[str, Tensor]  # logits and losses
    gradients: dict[str, Tensor]  # by the names in folders


def ours(number: int, dtype: torch.dtype) -> Result:
    config, reference, model = pair(number, dtype)
    talks = conversations(config)
    batch = packed(config, talks, reference.thinker.get_input_embeddings(), padding=4)
    outputs = computed(model, batch)
    (outputs[CODE_LOSS] + 0.5 * outputs[DEPTH_LOSS]).backward()
    count = sum(len(sequence_of(config, talk).tokens) for talk in talks)
    outputs["logits"] = outputs["logits"][:count]
    return Result(outputs, to_foreign(SPEC, config, {name: p.grad for name, p in model.named_parameters()}))


def as_large(name: str) -> str:
    """The name of a gradient as large as the terms that a gradient of scores is the small difference of."""
    name = re.sub(r"\.[qk]_proj\.", ".v_proj.", name)
    return name.replace("shared_expert_gate.", "shared_expert.down_proj.")


def computed(model: Any, batch: Batch) -> dict[str, Tensor]:
    outputs = model(batch)
    others = [outputs[code_output(number)] for number in range(1, len(model.codes.starts))]
    terms = {term.name: term.sum for term in SpeechTask().losses(outputs, batch).terms}
    hidden, head = outputs["logits"]
    return {"logits": head(hidden), "others": torch.stack([head(states) for states, head in others]), **terms}


def transformers_result(number: int, dtype: torch.dtype) -> Result:
    config, reference, _ = pair(number, dtype)
    results = [theirs(config, reference, talk) for talk in conversations(config)]
    loss, other = (torch.stack([getattr(r, name) for r in results]).sum() for name in ("loss", "other_loss"))
    (loss + 0.5 * other).backward()
    # Their answers end with the last frame; ours have one more position, the end of speech, which predicts nothing.
    logits = torch.cat([result.logits for result in results])
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    outputs = {
        "logits": logits,
        "others": torch.cat([r.others for r in results], 1),
        CODE_LOSS: loss,
        DEPTH_LOSS: other,
    }
    return Result(outputs, spread(gradients))


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_losses_and_gradients_are_those_of_transformers(number: int) -> None:
    mine, peer = ours(number, torch.float32), transformers_result(number, torch.float32)
    exact = transformers_result(number, torch.float64)
    config, _, _ = pair(number)
    rows, at = [], 0
    for talk in conversations(config):
        length = len(sequence_of(config, talk).tokens)
        rows += range(at, at + length - 1)
        at += length
    mine.outputs["logits"] = mine.outputs["logits"][rows]
    for name, output in mine.outputs.items():
        assert_as_close(output, peer.outputs[name], exact.outputs[name], what=name, roundings=4)
    unused = "talker.hidden_projection."  # no conversation has media
    assert sorted(peer.gradients) == sorted(name for name in mine.gradients if not name.startswith(unused))
    for name, grad in mine.gradients.items():
        if name.startswith(unused):
            assert not grad.any(), name
            continue
        beside = exact.gradients[as_large(name)]
        assert_as_close(grad, peer.gradients[name], exact.gradients[name], what=name, roundings=8, terms=beside)
    double = ours(number, torch.float64)
    double.outputs["logits"] = double.outputs["logits"][rows]
    for name, output in double.outputs.items():
        torch.testing.assert_close(output, exact.outputs[name], rtol=1e-5, atol=1e-6, check_dtype=False)
