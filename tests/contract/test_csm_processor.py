"""The processor of CSM against that of transformers: tokens, labels, and the files of a folder."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from csm_cases import BEGIN, END, END_OF_SPEECH, FRAME, config_of, processor_of
from transformers import CsmProcessor, EncodecFeatureExtractor

from tessera.core.batch import IGNORE
from tessera.core.sample import Message, Part, Sample
from tessera.models.csm.processor import CSMProcessor
from tessera.models.processing.streams import media_size
from tessera.nn.codes import CODED, CODES, NEXT_CODES
from tests.errors import raises

FRAMES = 1920  # samples of a frame, of the published codec


def text(value: str) -> Part:
    return Part("text", value)


def codes(frames: int, seed: int = 0) -> Part:
    config = config_of(0)
    shape = (frames, config.num_codebooks)
    return Part("codes", np.random.default_rng(seed).integers(0, config.codec_codes, shape))


def encode(processor: CSMProcessor, *messages: Message) -> Any:
    sample = Sample("one", messages)
    return processor.encode(sample, [part.value for part in sample.media()])


def test_tokens_and_labels_are_those_of_transformers(tmp_path: Path) -> None:
    ours = processor_of(config_of(0))
    ours.save(tmp_path)
    theirs = CsmProcessor.from_pretrained(tmp_path)
    assert isinstance(theirs.feature_extractor, EncodecFeatureExtractor)
    turns = [("0", "hello there", 5), ("1", "été 中文", 1), ("0", "<|AUDIO|>?", 0)]
    conversation, sounds = [], []
    for speaker, said, frames in turns:
        sounds += [np.zeros(FRAMES * frames, dtype=np.float32)] if frames else []
        parts = [{"type": "text", "text": said.replace("<|AUDIO|>", "hello")}]
        conversation.append({"role": speaker, "content": [*parts, *([{"type": "audio"}] if frames else [])]})
    prompt = theirs.apply_chat_template(conversation)
    inputs = theirs(text=prompt, audio=sounds, output_labels=True, sampling_rate=24_000)
    messages = [
        Message("assistant", (text(said.replace("<|AUDIO|>", "hello")), *([codes(n)] if n else [])), speaker)
        for speaker, said, n in turns
    ]
    encoded = encode(ours, *messages)
    assert encoded.tokens.tolist() == inputs["input_ids"][0].tolist()
    trained = inputs["labels"][0] != IGNORE
    assert torch.equal(encoded.labels != IGNORE, trained)
    assert torch.equal((encoded.targets != IGNORE).all(0), trained)
    assert (encoded.codes[:, encoded.tokens == END_OF_SPEECH] == 0).all()


def test_codes_are_at_the_positions_of_frames() -> None:
    part = codes(3, 1)
    encoded = encode(processor_of(config_of(0)), Message("assistant", (text("hello"), part)))
    assert encoded.tokens.tolist()[0] == BEGIN
    assert encoded.tokens.tolist()[-5:] == [END, FRAME, FRAME, FRAME, END_OF_SPEECH]
    assert torch.equal(encoded.codes[:, -4:-1], torch.from_numpy(part.value).T)
    assert (encoded.codes[:, :-4] == IGNORE).all()
    assert torch.equal(encoded.labels[-4:], encoded.codes[0, -4:])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message("assistant", (text("hello"), codes(1))), "[0]hello"),
        (Message("assistant", (text("hello"), codes(1)), "7"), "[7]hello"),
        (Message("user", (text("hello"), codes(1))), "[1]hello"),
        (Message("user", (text("hello"),)), "[0]hello"),
        (Message("user", (text("[3]hello"),)), "[3]hello"),
    ],
)
def test_every_text_has_the_number_of_its_speaker(message: Message, said: str) -> None:
    processor = processor_of(config_of(0))
    assert processor.decode(encode(processor, message).tokens.tolist()) == said


def test_the_default_speaker_is_an_option() -> None:
    processor = processor_of(config_of(0), speaker=4)
    assert processor.decode(encode(processor, Message("user", (text("hello"),))).tokens.tolist()) == "[4]hello"


def test_speech_of_a_user_is_read_and_not_trained_on() -> None:
    processor = processor_of(config_of(0))
    talk = (Message("user", (text("hello"), codes(2))), Message("assistant", (text("well"), codes(4))))
    encoded = encode(processor, *talk)
    assert int((encoded.labels != IGNORE).sum()) == 5
    assert int((encoded.codes[0] != IGNORE).sum()) == 8
    batch = processor.collate([[encoded]], len(encoded.tokens) + 3)
    assert batch[CODED].tolist() == batch["trained"].tolist()
    assert len(batch[CODED]) == 5
    assert torch.equal(batch[NEXT_CODES][:, batch[CODED]], batch[CODES][:, batch[CODED] + 1])
    assert torch.equal(batch["labels"][batch[CODED]], batch[NEXT_CODES][0, batch[CODED]])
    measured = processor.measure(Sample("one", talk), [media_size(part.value) for m in talk for part in m.parts[1:]])
    assert (measured["coded_frames"], measured["tokens"]) == (5, len(encoded.tokens))
    both = processor.training_on(("user", "assistant"))
    assert int((encode(both, *talk).labels != IGNORE).sum()) == 8
    last = both.training_on(("user", "assistant"), last_only=True)
    assert int((encode(last, *talk).labels != IGNORE).sum()) == 5


def test_prompts_end_with_the_text_to_speak() -> None:
    processor = processor_of(config_of(0))
    context = Message("user", (text("hello"), codes(2)))
    question = Message("assistant", (text("well"),))
    samples = [
        Sample("a", (context, Message("assistant", (text("well"), codes(4))))),
        Sample("b", (context, question)),
        Sample("c", (context, Message("user", (text("[0]well"),)), Message("assistant", (codes(4),)))),
    ]
    batch = processor.prompt(samples, [[part.value for part in sample.media()] for sample in samples])
    bounds = batch.segments["text"].bounds.tolist()
    prompts = [batch["tokens"][a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0][-1] == END
    assert prompts[0].count(FRAME) == 2
    assert CODES in batch
    assert CODED not in batch


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message("system", (text("hello"),)), "data.role-without-voice"),
        (Message("assistant", (text("hello"),), "Ana"), "data.speaker-without-number"),
        (Message("assistant", (text("hello"),), "\u0661"), "data.speaker-without-number"),  # a digit of another script
        (Message("assistant", (text("hello"), Part("codes", np.zeros((2, 3), dtype=int)))), "data.other-codebooks"),
        (Message("user", (Part("image", None), text("hello"))), "media.kind-not-supported"),
    ],
)
def test_what_the_model_cannot_speak_is_refused(message: Message, code: str) -> None:
    with raises(code):
        processor = processor_of(config_of(0))
        processor.encode(Sample("one", (message,)), [np.zeros((2, 3), dtype=int) for p in message.parts[1:]])


@pytest.mark.parametrize(("of_codec", "code", "fits"), [(16, 15, True), (16, 16, False), (19, 18, False)])
def test_control_and_padding_codes_are_refused(of_codec: int, code: int, fits: bool) -> None:
    """Codes of the model beyond those of the codec, and the last one, with which rows are padded."""
    config = config_of(0).model_copy(update={"codebook_pad_token_id": 18, "codec_codes": of_codec})
    message = Message("assistant", (text("hello"), Part("codes", np.full((2, config.num_codebooks), code))))
    with nullcontext() if fits else raises("data.other-codebooks"):
        encode(processor_of(config), message)
