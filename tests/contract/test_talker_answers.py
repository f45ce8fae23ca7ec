"""Questions with images, videos and sound are answered and spoken as by `generate` of transformers: text, codes and
sound, greedily and with random weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from qwen3_omni_cases import Qwen3Omni
from talker_cases import config_with_words, reference_of
from test_talker_media import positioned
from torch import Tensor
from vision_language import Case

from tessera.core.batch import Batch
from tessera.inference.speech import SpeechSampling
from tessera.inference.spoken_answers import AnswerSpeaker, load_answer_speaker
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tests.close import assert_as_close
from tests.errors import raises

OMNI = Qwen3Omni()
WORDS = ("red", "blue", "tall", "small")
FRAMES, TOKENS = 9, 5


@dataclass(frozen=True)
class Omni:
    """A tiny full model, ours and that of transformers."""

    config: TalkerConfig
    stock: Any
    ours: AnswerSpeaker
    folder: Path

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = load_tokenizer(self.folder).encode(text, add_special_tokens=False).ids
        return ids

    def conversation(self, media: Sequence[list[Any]], seed: int) -> Case:
        """A conversation with one question for each list of media, answers between them, and a system message."""
        pair: Any = SimpleNamespace(config=self.config.thinker, reference=self.stock.thinker)
        tokens, items, sounds = self.tokens("<|im_start|>system\nred<|im_end|>\n"), [], []
        for number, listed in enumerate(media):
            case = OMNI.case(pair, listed, seed + number)
            tokens += self.tokens("<|im_start|>user\n") + case.tokens.tolist()
            tokens += self.tokens("<|im_end|>\n<|im_start|>assistant\n")
            tokens += self.tokens("tall<|im_end|>\n") if number < len(media) - 1 else []
            items += case.media.items
            sounds += case.media.sounds
        seen = type(case.media)(items, sounds, case.media.with_sound)
        return positioned(self.stock.thinker, torch.tensor(tokens), seen)

    def prompt(self, case: Case) -> Batch:
        return OMNI.pack(self.config.thinker, [case])

    @torch.no_grad()
    def by_transformers(self, case: Case) -> tuple[list[int], Tensor, Tensor]:
        """Tokens of the answer, codes [frames, codebooks] and sound."""
        pair: Any = SimpleNamespace(config=self.config.thinker, reference=self.stock.thinker)
        inputs = {name: value for name, value in OMNI.inputs(pair, case).items() if name != "position_ids"}
        decode, codes = self.stock.code2wav.chunked_decode, list[Tensor]()

        def listening(values: Tensor, **options: Any) -> Tensor:
            codes.append(values)
            return decode(values, **options)

        self.stock.code2wav.chunked_decode = listening
        control = range(self.config.depth.vocab_size, self.config.text.vocab_size)
        try:
            sequences, sound = self.stock.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                speaker="chelsie",
                # The last token of an answer without an end is not spoken, and the last frame of such a speech has no
                # codes of the other codebooks.
                thinker_max_new_tokens=TOKENS + 1,
                thinker_do_sample=False,
                thinker_eos_token_id=self.config.im_end_token_id,
                talker_max_new_tokens=FRAMES + 1,
                talker_do_sample=False,
                talker_suppress_tokens=[code for code in control if code != self.config.codec_eos_token_id],
            )
        finally:
            del self.stock.code2wav.chunked_decode
        return sequences[0, len(case.tokens) :].tolist(), codes[0][0].T, sound[0, 0]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Omni:
    folder = tmp_path_factory.mktemp("omni")
    config = config_with_words(folder, WORDS, media=True)
    stock = reference_of(config, 3).eval()
    stock.save_pretrained(folder)
    return Omni(config, stock, load_answer_speaker(folder, "cpu"), folder)


def check(omni: Omni, case: Case) -> None:
    words, codes, sound = omni.by_transformers(case)
    speaker = omni.ours.speaker
    sampling = SpeechSampling(temperature=0, max_seconds=FRAMES * speaker.codec.stride / speaker.codec.rate)
    heard: list[np.ndarray] = []
    answer = omni.ours.answer(omni.prompt(case), TOKENS, speaker="chelsie", speech=sampling, on_sound=heard.append)
    inner: Any = omni.ours.processor.processor
    assert answer.text == inner.decode([token for token in words[:TOKENS] if token != omni.config.im_end_token_id])
    assert answer.speech.codes.tolist() == codes.tolist()
    assert len(answer.speech.codes.unique(dim=0)) > 2
    with torch.no_grad():
        exact = copy.deepcopy(omni.stock.code2wav).double()(codes.T[None])[0, 0]
    assert_as_close(torch.from_numpy(answer.speech.sound), sound, exact, what="sound", roundings=8)
    assert np.array_equal(np.concatenate(heard), answer.speech.sound)


KINDS = OMNI.media(0)
SOUND = [("audio", 128)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "media",
    [[KINDS["one"]], [KINDS["sound"]], [KINDS["video"]], [KINDS["several"], [], KINDS["video"]], [[]]],
    ids=["image", "sound", "video", "turns", "text"],
)
def test_answers_to_questions_with_media_are_spoken_as_by_transformers(omni: Omni, media: list[list[Any]]) -> None:
    check(omni, omni.conversation(media, len(media)))


@pytest.mark.slow
def test_images_and_sound_in_one_question_are_spoken_as_by_transformers(omni: Omni) -> None:
    """transformers raises an error for such questions unless its talker has the thinker's `audio_config`."""
    case = omni.conversation([KINDS["sounds"], KINDS["one"]], 1)
    try:
        omni.stock.talker.config.audio_config = omni.stock.config.thinker_config.audio_config
        check(omni, case)
    finally:
        del omni.stock.talker.config.audio_config


def test_the_voice_is_checked_before_the_answer_is_generated(omni: Omni, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.inference.spoken_answers.answers_to", lambda *_: pytest.fail("text is generated"))
    with raises("data.unknown-speaker"):
        omni.ours.ask("red", speaker="Ann")


def test_the_talker_loads_no_copy_of_the_thinker(omni: Omni) -> None:
    """Prompts have the states of the loaded thinker in place of media. Media outside of questions are refused."""
    case = omni.conversation([KINDS["one"]], 1)
    prompts = omni.ours.speaker.answer_prompt(omni.prompt(case), omni.tokens("red"), "ethan")
    before = [tensor.data_ptr() for tensor in omni.ours.model.parameters()]
    read = omni.ours.speaker.encoded(prompts).batch
    held = {tensor.data_ptr() for tensor in omni.ours.speaker.model.parameters()}
    assert not held & set(before)
    assert omni.ours.speaker.model.module.text.embed is None  # type: ignore[union-attr]
    words = omni.ours.model.module.text.embed(read["tokens"])
    same = (read["thinker_embeddings"] == words).all(1)
    assert torch.equal((~same).nonzero().flatten(), read["heard"])
    marks = torch.tensor([omni.config.thinker.image_token_id])
    assert torch.equal(read["heard"], torch.isin(read["tokens"], marks).nonzero().flatten())
    moved = omni.prompt(case)
    tokens = moved["tokens"].clone()
    tokens[tokens == omni.config.user_token_id] = omni.config.system_token_id
    with raises("data.media-outside-question"):
        omni.ours.speaker.answer_prompt(moved.with_tensors(tokens=tokens), omni.tokens("red"), "ethan")
    with raises("data.unknown-speaker"):
        omni.ours.speaker.answer_prompt(omni.prompt(case), omni.tokens("red"), "Ann")
