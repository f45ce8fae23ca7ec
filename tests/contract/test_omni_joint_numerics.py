"""The thinker and the talker of Qwen3-Omni trained together, against transformers' modules: logits of text and speech,
losses and all gradients, also those of the thinker through the talker. Float64 is the judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import from_foreign, spread, to_foreign
from talker_cases import SHAPES, Heard, config_of, hearing, packed, reference_of, sequence_of, theirs, weights_of
from test_talker_media import OMNI, Asked, in_dtype, media_mask, positioned, question_of
from test_talker_numerics import as_large
from torch import Tensor, nn
from vision_language import labels_of

from tessera.core.batch import IGNORE, Batch
from tessera.models.processing.conversation import trained_positions
from tessera.models.qwen3_omni_talker import SPEC
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.sequence import SpokenTurns, TalkerIds
from tessera.models.qwen3_omni_talker.thinker import HEARD, HEARD_FROM, WORDS, as_question
from tessera.nn.codes import TEXT_LOGITS, code_output
from tessera.tasks.speech import CODE_LOSS, DEPTH_LOSS, TEXT_LOSS, SpeechTask
from tests.close import assert_as_close, queries_for_keys

NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 0)) for number in range(len(SHAPES))]
WORD_IDS = 80  # ids below it are words
WEIGHTS = {CODE_LOSS: 1.0, DEPTH_LOSS: 0.5, TEXT_LOSS: 2.0}


@dataclass(frozen=True)
class Result:
    outputs: dict[str, Tensor]  # logits and losses
    gradients: dict[str, Tensor]  # by the names in folders


def joint(number: int) -> TalkerConfig:
    return config_of(number, **{**hearing(number), "reads_media": False, "trains_thinker": True})


def questions_of(config: TalkerConfig, reference: Any, number: int) -> list[Asked]:
    kinds = OMNI.media(SHAPES[number].thinker)
    questions = [question_of(config, reference, kinds[name], seed) for seed, name in enumerate(("mixed", "sound"))]
    questions.insert(1, question_of(config, reference, [], 5))
    return [replace(a, case=replace(a.case, labels=labels_of(a.case.tokens, WORD_IDS))) for a in questions]


def transformers_result(config: TalkerConfig, number: int, dtype: torch.dtype) -> Result:
    model = reference_of(config, 7 + number, dtype)
    pair: Any = SimpleNamespace(config=config.thinker, reference=model.thinker)
    texts, spoken, text_loss = [], [], torch.zeros((), dtype=dtype)
    for question in questions_of(config, model, number):
        case = question.case
        out = model.thinker(**in_dtype(OMNI.inputs(pair, case), dtype), output_hidden_states=True)
        states = out.hidden_states[config.accept_hidden_layer][0]
        heard = Heard(media_mask(config, case.tokens), states, positions_of(config, model, question), trained=True)
        spoken.append(theirs(config, model, question.talk, heard=heard))
        texts.append(out.logits[0])
        text_loss = text_loss + nn.functional.cross_entropy(
            out.logits[0, :-1], case.labels[1:], ignore_index=IGNORE, reduction="sum"
        )
    losses = {
        CODE_LOSS: torch.stack([result.loss for result in spoken]).sum(),
        DEPTH_LOSS: torch.stack([result.other_loss for result in spoken]).sum(),
        TEXT_LOSS: text_loss,
    }
    sum(weight * losses[name] for name, weight in WEIGHTS.items()).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    outputs = {
        "logits": torch.cat([result.logits for result in spoken]),
        "others": torch.cat([result.others for result in spoken], 1),
        "texts": torch.cat(texts),
        **losses,
    }
    table = SPEC.main.weight_map(config)
    by_name = {table.canonical(name): gradient for name, gradient in spread(gradients).items()}
    return Result({name: tensor.detach() for name, tensor in outputs.items()}, by_name)


def positions_of(config: TalkerConfig, model: Any, question: Asked) -> Tensor:
    """Positions of the talker's sequence, by the thinker's rule (see `test_talker_media.heard_by`)."""
    length = len(sequence_of(config, question.talk).tokens) - 1
    read = SpokenTurns.of(question.talk.tokens, TalkerIds.of_model(config)).read
    ids = torch.full((length,), config.tts_pad_token_id)
    ids[: len(read)] = question.case.tokens[list(read)]
    return positioned(model.thinker, ids, question.case.media).positions


def batch_of(config: TalkerConfig, questions: list[Asked], positions: list[Tensor]) -> Batch:
    """All conversations in one row, with padding in both sequences."""
    batch = packed(config, [a.talk for a in questions], nn.Embedding(400, 1), padding=3)
    heard, heard_from, at, before = [], [], 0, 0
    for a in questions:
        read = torch.tensor(SpokenTurns.of(a.talk.tokens, TalkerIds.of_model(config)).read)
        inside = media_mask(config, a.case.tokens[read])
        heard.append(inside.nonzero().flatten() + at)
        heard_from.append(read[inside] + before)
        at += len(sequence_of(config, a.talk).tokens)
        before += len(a.case.tokens)
    read = OMNI.pack(config.thinker, [a.case for a in questions], padding=5)
    question = as_question(read.with_tensors(trained=trained_positions(read["labels"])))
    whole = torch.cat([nn.functional.pad(p, (0, 1)) for p in positions] + [torch.zeros(3, 3)], 1)
    tensors = {name: tensor for name, tensor in batch.tensors.items() if name != WORDS}
    tensors |= {**question.tensors, HEARD: torch.cat(heard), HEARD_FROM: torch.cat(heard_from), "positions": whole}
    return Batch(tensors, {**batch.segments, **question.segments}, seeds=(0,))


def ours(config: TalkerConfig, number: int) -> Result:
    reference = reference_of(config, 7 + number)
    questions = questions_of(config, reference, number)
    model: Any = from_foreign(SPEC, config, weights_of(reference)).train()
    batch = batch_of(config, questions, [positions_of(config, reference, a) for a in questions])
    outputs = model(batch)
    terms = {term.name: term for term in SpeechTask(depth_weight=0.5, text_weight=2.0).losses(outputs, batch).terms}
    assert {name: term.weight for name, term in terms.items()} == WEIGHTS
    sum(term.weight * term.sum for term in terms.values()).backward()  # type: ignore[union-attr]
    rows, at = [], 0
    for a in questions:  # the end of speech is one more position than theirs
        length = len(sequence_of(config, a.talk).tokens)
        rows += range(at, at + length - 1)
        at += length
    read = sum(len(a.case.tokens) for a in questions)

    def logits(name: str) -> Tensor:
        hidden, head = outputs[name]
        result: Tensor = head(hidden).detach()
        return result

    results = {
        "logits": logits("logits")[rows],
        "others": torch.stack([logits(code_output(n)) for n in range(1, config.num_code_groups)]),
        "texts": logits(TEXT_LOGITS)[:read],
        **{name: term.sum.detach() for name, term in terms.items()},
    }
    return Result(results, to_foreign(SPEC, config, {name: p.grad for name, p in model.named_parameters()}))


@pytest.mark.parametrize("number", NUMBERS)
def test_logits_losses_and_gradients_are_those_of_transformers(number: int) -> None:
    config = joint(number)
    mine, peer = ours(config, number), transformers_result(config, number, torch.float32)
    exact = transformers_result(config, number, torch.float64)
    for name, output in mine.outputs.items():
        assert_as_close(output, peer.outputs[name], exact.outputs[name], what=name, roundings=8)
    assert sorted(peer.gradients) == sorted(mine.gradients)
    for name, gradient in mine.gradients.items():
        beside = exact.gradients[queries_for_keys(as_large(name))]
        assert_as_close(gradient, peer.gradients[name], exact.gradients[name], what=name, roundings=16, terms=beside)
