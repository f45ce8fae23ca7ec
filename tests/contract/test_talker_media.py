"""Questions with images, videos and sound: the talker reads hidden states of the frozen thinker in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omni_cases import rope_index_of
from parity import from_foreign, spread, to_foreign
from PIL import Image
from qwen3_omni_cases import Qwen3Omni
from talker_cases import (
    NEWLINE,
    SHAPES,
    Conversation,
    Heard,
    config_of,
    config_with_words,
    conversation,
    hearing,
    packed,
    reference_of,
    sequence_of,
    theirs,
    weights_of,
)
from torch import Tensor
from vision_language import Case

from tessera.core.batch import Batch
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.inference.frozen import frozen_module
from tessera.models.processing.streams import media_size
from tessera.models.qwen3_omni_talker import SPEC
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.processor import MediaTalkerProcessor, TalkerProcessor, TalkerSample
from tessera.models.qwen3_omni_talker.sequence import SpokenTurns, TalkerIds
from tessera.models.qwen3_omni_talker.thinker import HEARD, HEARD_FROM, WORDS, as_question, encode
from tests.close import assert_as_close
from tests.errors import raises

OMNI = Qwen3Omni()


@dataclass(frozen=True)
class Asked:
    """A conversation whose question has media, and what transformers' thinker gets of it."""

    talk: Conversation
    case: Case


def question_of(config: TalkerConfig, reference: Any, media: list[Any], seed: int) -> Asked:
    pair: Any = SimpleNamespace(config=config.thinker, reference=reference.thinker)
    case = OMNI.case(pair, media, seed)
    talk = conversation(config, seed, 5)
    start = talk.tokens.index(NEWLINE) + 1
    tokens = (*talk.tokens[:start], *case.tokens.tolist(), *talk.tokens[start:])
    return Asked(Conversation(tokens, talk.codes), positioned(reference.thinker, torch.tensor(tokens), case.media))


def positioned(model: Any, tokens: Tensor, media: Any) -> Case:
    """The tokens with their positions by transformers' rule."""
    inputs = OMNI.shown_to(media.items)
    sounds = torch.tensor([len(sound) for sound in media.sounds], dtype=torch.int64)
    positions, _ = rope_index_of(model)(
        tokens[None],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(tokens[None]),
        media.with_sound,
        sounds,
        inputs.get("video_second_per_grid"),
    )
    return Case(tokens, tokens, positions[:, 0], media)


def media_mask(config: TalkerConfig, tokens: Tensor) -> Tensor:
    marks = (config.thinker.image_token_id, config.thinker.video_token_id, config.thinker.audio_token_id)
    return torch.isin(tokens, torch.tensor(marks))


def heard_by(config: TalkerConfig, model: Any, question: Asked) -> Heard:
    """The thinker's states by transformers, and the positions of the talker's sequence by the thinker's rule: that of
    the talker looks for `audio_config` in the talker's configuration, which has none (transformers 5.22)."""
    case, talk = question.case, question.talk
    pair: Any = SimpleNamespace(config=config.thinker, reference=model.thinker)
    with torch.no_grad():
        out = model.thinker(**in_dtype(OMNI.inputs(pair, case), model.dtype), output_hidden_states=True)
    length = len(sequence_of(config, talk).tokens) - 1
    read = SpokenTurns.of(talk.tokens, TalkerIds.of_model(config)).read
    ids = torch.full((length,), config.tts_pad_token_id)
    ids[: len(read)] = case.tokens[list(read)]
    positions = positioned(model.thinker, ids, case.media).positions
    return Heard(media_mask(config, case.tokens), out.hidden_states[config.accept_hidden_layer][0], positions)


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}


def ours(config: TalkerConfig, model: Any, questions: list[Asked], folder: Path, positions: list[Tensor]) -> Tensor:
    """Our logits of all conversations in one row."""
    assert SPEC.frozen_input is not None
    thinker = frozen_module(SPEC.frozen_input.component(config), SPEC, config, folder)
    batch = packed(config, [question.talk for question in questions], torch.nn.Embedding(400, 1), padding=3)
    heard, heard_from, at, before = [], [], 0, 0
    for question in questions:
        read = torch.tensor(SpokenTurns.of(question.talk.tokens, TalkerIds.of_model(config)).read)
        inside = media_mask(config, question.case.tokens[read])
        heard.append(inside.nonzero().flatten() + at)
        heard_from.append(read[inside] + before)
        at += len(sequence_of(config, question.talk).tokens)
        before += len(question.case.tokens)
    thought = OMNI.pack(config.thinker, [question.case for question in questions])
    whole = torch.cat([torch.nn.functional.pad(p, (0, 1)) for p in positions] + [torch.zeros(3, 3)], 1)
    tensors = {HEARD: torch.cat(heard), HEARD_FROM: torch.cat(heard_from), "positions": whole}
    read_batch = as_question(thought)
    batch = batch.with_tensors(**tensors, **read_batch.tensors)
    batch = Batch(batch.tensors, {**batch.segments, **read_batch.segments}, seeds=(0,))
    with torch.no_grad():
        batch = encode(thinker, batch)
    hidden, head = model(batch)["logits"]
    logits: Tensor = head(hidden)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_logits_and_gradients_are_those_of_transformers_with_the_states_of_its_thinker(
    number: int, tmp_path: Path
) -> None:
    config = config_of(number, **hearing(number))
    reference = reference_of(config, 7 + number)
    reference.save_pretrained(tmp_path)
    kinds = OMNI.media(SHAPES[number].thinker)
    questions = [question_of(config, reference, kinds[name], seed) for seed, name in enumerate(("mixed", "sound"))]
    questions.insert(1, question_of(config, reference, [], 5))
    exact = reference_of(config, 7 + number, torch.float64)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    heards = [heard_by(config, reference, question) for question in questions]
    for model, each in ((reference, heards), (exact, [heard_by(config, exact, question) for question in questions])):
        pairs = zip(questions, each, strict=True)
        spoken = [theirs(config, model, question.talk, heard=heard) for question, heard in pairs]
        torch.stack([one.logits.square().sum() for one in spoken]).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((torch.cat([one.logits for one in spoken]), spread(gradients)))
    model = from_foreign(SPEC, config, weights_of(reference))
    logits = ours(config, model, questions, tmp_path, [heard.positions for heard in heards])
    rows, at = [], 0
    for question in questions:
        length = len(sequence_of(config, question.talk).tokens)
        rows += range(at, at + length - 1)
        at += length
    logits = logits[rows]
    logits.square().sum().backward()
    (peer, peer_gradients), (judge, judge_gradients) = results
    assert_as_close(logits, peer, judge, what="logits", roundings=8)
    named = {name: p.grad for name, p in model.named_parameters() if "_projection" in name}
    for name, gradient in to_foreign(SPEC, config, named).items():
        assert_as_close(gradient, peer_gradients[name], judge_gradients[name], what=name, roundings=16)


def test_the_processor_places_media_where_transformers_does(tmp_path: Path) -> None:
    """Media of two turns of the user, with an answer between them that only the thinker reads."""
    config = config_with_words(tmp_path, ("red", "blue"), media=True)
    processor = TalkerProcessor.load(config, tmp_path, min_pixels=64, max_pixels=1024)
    image, sound = Image.new("RGB", (30, 20), (200, 30, 30)), np.linspace(-0.5, 0.5, 20_000, dtype=np.float32)
    codes = np.arange(3 * config.num_code_groups).reshape(3, -1)
    turns = (
        Message("user", (Part("audio", sound), Part("text", "red"))),
        Message("assistant", (Part("text", "blue"), Part("codes", codes))),
        Message("user", (Part("text", "blue"), Part("image", image))),
        Message("assistant", (Part("text", "red"), Part("codes", codes))),
    )
    sample = Sample("row", turns)
    media = [part.value for part in sample.media()]
    item = processor.encode(sample, media)
    assert isinstance(processor, MediaTalkerProcessor)
    assert isinstance(item, TalkerSample)
    assert item.question is not None
    sizes = [MediaSize(0, 0, 3) if each is codes else media_size(each) for each in media]
    assert processor.measure(sample, sizes)["tokens"] == len(item.tokens)
    marks = torch.tensor([config.thinker.image_token_id, config.thinker.audio_token_id])
    assert torch.equal(item.heard, torch.isin(item.tokens, marks).nonzero().flatten())
    assert torch.equal(item.tokens[item.heard], item.question.tokens[item.heard_from])
    assert int(item.heard_from[-1]) == len(item.question.tokens) - 1
    reference = reference_of(config, 1)
    (layout,) = processor.thinker.layouts(["image"], [media_size(image)])
    positions, _ = rope_index_of(reference.thinker)(
        item.tokens[None],
        torch.tensor([layout.grid]),
        None,
        torch.ones_like(item.tokens[None]),
        False,
        torch.tensor([len(sound) // 160]),  # mel frames
        None,
    )
    assert torch.equal(positions[:, 0], item.positions)
    between = replace(item, positions=item.positions + 0.5)  # as after a video, whose times may be fractions
    assert torch.equal(processor.collate([[between]], len(item.tokens))["positions"], between.positions)
    batch = processor.collate([[item]], len(item.tokens) + 4)
    thinker = frozen_module(SPEC.frozen_input.component(config), SPEC, config, None)  # type: ignore[union-attr]
    encoded = encode(thinker, batch)
    assert encoded[WORDS].shape == (len(item.tokens) + 4, config.thinker.text.hidden_size)
    words = thinker.text.embed(batch["tokens"])  # type: ignore[union-attr]
    assert (encoded[WORDS] != words).any(1).nonzero().flatten().tolist() == item.heard.tolist()
    assert not [name for name in encoded.tensors if name.startswith("thinker.")]


def test_media_that_the_talker_cannot_read_are_set_aside(tmp_path: Path) -> None:
    config = config_with_words(tmp_path, ("red",), media=True)
    image, codes = Image.new("RGB", (30, 20)), np.zeros((3, config.num_code_groups), dtype=np.int64)
    answer = Message("assistant", (Part("text", "red"), Part("codes", codes)))
    before = (Message("system", (Part("image", image),)), Message("user", (Part("text", "red"),)))
    in_system = Sample("row", (*before, answer))
    hears = TalkerProcessor.load(config, tmp_path, min_pixels=64, max_pixels=1024)
    with raises("data.media-outside-question"):
        hears.encode(in_system, [image, codes])
    deaf = TalkerProcessor.load(config.model_copy(update={"reads_media": False}), tmp_path)
    question = Sample("row", (Message("user", (Part("image", image),)), answer))
    with raises("media.kind-not-supported"):
        deaf.measure(question, [media_size(image), MediaSize(0, 0, 3)])


def test_layers_that_the_talker_reads_are_between_those_of_images_and_the_last() -> None:
    fields = hearing(0)
    layers = fields["thinker"]["text"]["num_hidden_layers"]
    for wrong in (1, layers):
        with pytest.raises(ValueError, match="accept_hidden_layer"):
            config_of(0, **{**fields, "accept_hidden_layer": wrong})
