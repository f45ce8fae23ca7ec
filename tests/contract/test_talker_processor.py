"""Conversations with speech as sequences of a talker: tokens, codes, labels and packed batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_words

from tessera.config.run_config import ModelSection
from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.models import resolve
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.processor import TalkerProcessor
from tessera.models.speech.family import CODED_FRAMES
from tessera.nn.codes import CODED, CODES, NEXT_CODES
from tests.errors import raises

WORDS = ["<|endoftext|>", "<tts_pad>", "<tts_bos>", "<tts_eos>", *QWEN3_OMNI.special_words()]
TEXTS = ["assistant", "user", "system", "say red blue tall"]
SPEECH = np.arange(24).reshape(6, 4)  # six frames


def processor_of(folder: Path, **options: Any) -> tuple[TalkerConfig, TalkerProcessor]:
    write_words(folder, 512, WORDS, TEXTS)
    tokenizer = load_tokenizer(folder)
    names = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "user": "user", "assistant": "assistant"}
    names |= {"system": "system", **{f"tts_{name}": f"<tts_{name}>" for name in ("pad", "bos", "eos")}}
    ids = {f"{name}_token_id": tokenizer.encode(word).ids[0] for name, word in names.items()}
    _, config = resolve(ModelSection(family="qwen3_omni_talker", preset="quickstart", config=ids))
    assert isinstance(config, TalkerConfig)
    return config, TalkerProcessor.load(config, folder, **options)


def turn(role: str, text: str, speech: np.ndarray | None = None, speaker: str = "") -> Message:
    parts = [Part("text", text), *([] if speech is None else [Part("codes", speech)])]
    return Message(role, tuple(parts), speaker)


def sample_of(*turns: Message) -> tuple[Sample, list[Any], list[MediaSize]]:
    media = [part.value for message in turns for part in message.parts if part.kind == "codes"]
    return Sample("row", tuple(turns)), media, [MediaSize(0, 0, len(codes)) for codes in media]


def tokens_of(processor: TalkerProcessor, message: Message) -> list[int]:
    """The tokens of a turn, without a system message before it."""
    return processor.encoder.encode(processor.template.render([message]), [])[0]


ANSWER = (turn("user", "say red"), turn("assistant", "red blue", SPEECH))
HISTORY = (
    turn("system", "tall"),
    turn("user", "say blue"),
    turn("assistant", "blue", SPEECH[:2]),
    turn("user", "say red"),
    turn("assistant", "red blue", SPEECH, "Chelsie"),
)


def test_turns_of_the_user_come_before_the_answer_and_its_text_runs_beside_the_frames(tmp_path: Path) -> None:
    config, processor = processor_of(tmp_path)
    sample, media, sizes = sample_of(*HISTORY)
    encoded = processor.encode(sample, media, sizes)
    turns = [token for text in ("say blue", "say red") for token in tokens_of(processor, turn("user", text))]
    start, pad = config.im_start_token_id, config.tts_pad_token_id
    newline = turns[-1]
    words = tokens_of(processor, turn("text", "red blue"))[:-1]
    header = [*turns, start, config.assistant_token_id, newline]
    beside = [*[pad] * 4, config.tts_bos_token_id, *words, config.tts_eos_token_id]
    first = len(header) + 6
    rest = first + len(SPEECH) + 1 - len(header) - len(beside)
    assert encoded.tokens.tolist() == [*header, *beside, *[pad] * rest]
    control = [
        config.codec_nothink_id,
        config.codec_think_bos_id,
        config.codec_think_eos_id,
        config.speaker_id["chelsie"],
        config.codec_pad_id,
        config.codec_bos_id,
    ]
    end = config.codec_eos_token_id
    codes = encoded.codes
    assert (codes[:, : len(header)] == IGNORE).all()
    assert codes[0].tolist()[len(header) :] == [*control, *SPEECH[:, 0], end]
    assert codes[1:, first:-1].T.tolist() == SPEECH[:, 1:].tolist()
    assert (codes[1:, :first] == IGNORE).all()
    assert encoded.labels.tolist() == [*[IGNORE] * first, *SPEECH[:, 0], end]
    assert encoded.targets[:, first:-1].T.tolist() == SPEECH.tolist()
    assert (encoded.targets[:, :first] == IGNORE).all()
    assert (encoded.targets[:, -1] == IGNORE).all()


def test_a_talker_speaks_as_ethan_unless_told_otherwise(tmp_path: Path) -> None:
    _, processor = processor_of(tmp_path)
    published = replace(processor.ids, speakers=(("chelsie", 71), ("ethan", 70)))
    assert published.speaker("") == 70
    assert published.speaker("Chelsie") == 71
    assert replace(processor.ids, speakers=(("anna", 72), ("chelsie", 71))).speaker("") == 72


def test_measures_are_those_of_the_encoded_sample(tmp_path: Path) -> None:
    _, processor = processor_of(tmp_path)
    for turns in (ANSWER, HISTORY):
        sample, media, sizes = sample_of(*turns)
        encoded, measured = processor.encode(sample, media, sizes), processor.measure(sample, sizes)
        assert measured["tokens"] == len(encoded.tokens)
        assert measured["trained"] == int((encoded.labels != IGNORE).sum()) == len(SPEECH) + 1
        assert measured[CODED_FRAMES] == len(SPEECH)


def test_packed_rows_predict_the_next_frame_within_each_sample(tmp_path: Path) -> None:
    _, processor = processor_of(tmp_path)
    items = [processor.encode(*sample_of(*turns)) for turns in (ANSWER, HISTORY)]
    lengths = [len(item.tokens) for item in items]
    batch = processor.collate([items], sum(lengths) + 3)
    starts = [0, lengths[0]]
    coded = torch.cat([torch.arange(at + size - 8, at + size - 2) for at, size in zip(starts, lengths, strict=True)])
    assert torch.equal(batch[CODED], coded)
    assert torch.equal(batch[NEXT_CODES][:, coded], torch.from_numpy(SPEECH).T.repeat(1, 2))
    assert torch.equal(batch["labels"][coded], batch[NEXT_CODES][0, coded])
    assert torch.equal(batch[CODES][:, coded + 1], batch[NEXT_CODES][:, coded])
    assert batch["positions"].shape == (3, sum(lengths) + 3)
    assert batch["trained"].shape[0] == 2 * (len(SPEECH) + 1)


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        ([turn("user", "red"), turn("assistant", "red")], "data.no-codes"),
        ([turn("assistant", "red", SPEECH), turn("user", "red")], "data.no-codes"),
        ([turn("user", "red"), turn("assistant", "red", SPEECH[:, :3])], "data.other-codebooks"),
        ([turn("user", "red"), turn("assistant", "red", SPEECH + 60)], "data.other-codebooks"),
        ([turn("user", "red"), turn("assistant", "red", SPEECH, "nobody")], "data.unknown-speaker"),
        ([turn("user", "red"), turn("assistant", "red blue tall say " * 9, SPEECH)], "data.speech-too-short"),
        ([turn("user", "red"), turn("assistant", "", SPEECH)], "data.no-text"),
    ],
)
def test_what_cannot_be_spoken_is_set_aside(turns: list[Message], code: str, tmp_path: Path) -> None:
    _, processor = processor_of(tmp_path)
    sample, media, sizes = sample_of(*turns)
    with raises(code):
        processor.measure(sample, sizes)
    with raises(code):
        processor.encode(sample, media, sizes)


def test_an_unknown_voice_and_other_ids_of_roles_are_errors(tmp_path: Path) -> None:
    config, _ = processor_of(tmp_path)
    with raises("data.unknown-speaker"):
        TalkerProcessor.load(config, tmp_path, speaker="nobody")
    with raises("tokenizer.token-id-mismatch"):
        TalkerProcessor.load(config.model_copy(update={"user_token_id": 0}), tmp_path)


def test_voices_are_named_in_any_case_and_have_codes_of_their_own(tmp_path: Path) -> None:
    config, processor = processor_of(tmp_path)
    code = config.speaker_id["chelsie"]
    assert replace(processor.ids, speakers=(("Anna", code),)).speaker("anna") == code
    fields = config.model_dump()
    for taken in (config.depth.vocab_size - 1, config.codec_eos_token_id):
        with pytest.raises(ValueError, match=r"speaker_id\.anna"):
            TalkerConfig.model_validate({**fields, "speaker_id": {"anna": taken}})
    with pytest.raises(ValueError, match="except for case"):
        TalkerConfig.model_validate({**fields, "speaker_id": {"anna": code, "Anna": code + 1}})
