"""A tiny talker learns ten sentences: its greedy codes are theirs, transformers generates the same codes from its
export, and the stock vocoder makes the same sound of them."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from talker_cases import config_with_words, reference_of, spoken_by_transformers
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration

import tessera
from tessera.core.sample import Message, Part, Sample
from tessera.inference.frozen import frozen_module
from tessera.inference.load import load
from tessera.inference.speech import SpeechSampling, load_speaker
from tessera.models.qwen3_omni_talker import SPEC
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.processor import TalkerProcessor
from tessera.models.qwen3_omni_talker.thinker import encode
from tessera.models.speech.generation import generate_codes
from tessera.tools.data_codes import write_codes
from tests.contract.codecs import mimi_folder

NAMES = ("red", "blue", "tall", "small", "old", "new", "soft", "hard", "warm", "cold")


def likeliest(logits: Tensor, rows: Any) -> Tensor:
    return logits.argmax(-1)


def sentences(config: TalkerConfig) -> list[tuple[str, str, np.ndarray]]:
    """Texts, voices and codes. A code of the first codebook is not repeated at once, as greedy speech would have it."""
    chance = np.random.default_rng(5)
    rows = []
    for number in range(10):
        words = " ".join(NAMES[(number + shift) % 10] for shift in range(1 + number % 3))
        frames = 6 + number % 4
        codes = chance.integers(0, config.depth.vocab_size, (frames, config.num_code_groups))
        rows.append((words, ("ethan", "chelsie")[number % 2], codes))
    return rows


@pytest.mark.slow
def test_ten_sentences_are_learned_and_transformers_speaks_them_too(tmp_path: Path) -> None:
    config = config_with_words(tmp_path / "full", NAMES)
    reference_of(config, 1).save_pretrained(tmp_path / "full")
    rows = sentences(config)
    lines = [{"text": text, "audio_codes": codes.tolist(), "speaker": voice} for text, voice, codes in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tessera.train(
        {
            "name": "voice",
            "out": str(tmp_path),
            "model": {"family": "qwen3_omni_talker", "path": str(tmp_path / "full")},
            "data": {"train": str(tmp_path / "rows.jsonl"), "length": 300, "workers": 0},
            "train": {"steps": 120, "global_batch": 1, "device": "cpu"},
            "optim": {"lr": 5e-3, "weight_decay": 0.0, "schedule": {"kind": "cosine", "warmup": 5}},
            "checkpoint": {"export": True},
        }
    )
    assert run.metrics[-1]["loss"] < 0.06, run.metrics
    model, processor = load(run.folder / "hf", family="qwen3_omni_talker")
    speaks: Any = processor.processor
    assert isinstance(speaks, TalkerProcessor)
    samples = [
        Sample(str(number), (Message("assistant", (Part("text", text),), voice),))
        for number, (text, voice, _) in enumerate(rows)
    ]
    assert SPEC.frozen_input is not None
    words = frozen_module(SPEC.frozen_input.component(config), SPEC, config, run.folder / "hf")
    spoken = generate_codes(
        model.module,  # type: ignore[arg-type]
        speaks.speech_prompts(samples),
        max_frames=20,
        first=likeliest,
        others=likeliest,
        encode=lambda batch: encode(words, batch),
    )
    stock = Qwen3OmniMoeForConditionalGeneration.from_pretrained(run.folder / "hf", dtype=torch.float32)
    for (_, voice, codes), ours, sample in zip(rows, spoken, samples, strict=True):
        assert ours.tolist() == codes.tolist()
        tokens = tokens_of(speaks, sample)
        assert spoken_by_transformers(config, stock, tokens, voice, 20).tolist() == codes.tolist()
        sound, expected = (stock.code2wav(torch.as_tensor(each).T[None]) for each in (ours, codes))
        assert torch.equal(sound, expected)
        assert sound.numel() > 0

    speaker, greedy = load_speaker(run.folder), SpeechSampling(temperature=0.0, max_seconds=2.0)
    for text, voice, codes in rows:
        speech = speaker.say(text, speaker=voice, sampling=greedy)
        assert speech.codes.tolist() == codes.tolist()
        assert speech.complete
        expected = stock.code2wav(torch.from_numpy(codes).T[None])[0, 0]
        torch.testing.assert_close(torch.from_numpy(speech.sound), expected, rtol=1e-4, atol=1e-5)


def tokens_of(processor: TalkerProcessor, sample: Sample) -> list[int]:
    """The tokens of a conversation to the end of its last text."""
    tokens, _, _ = processor.encoder.encode(processor.template.render(sample.messages), [])
    return tokens[:-2]


@pytest.mark.slow
def test_codes_are_made_of_recorded_answers_and_questions_stay_recordings(tmp_path: Path) -> None:
    """From recordings to a run: the thinker hears the question, and the talker learns the answer."""
    config = config_with_words(tmp_path / "full", NAMES, media=True)
    reference_of(config, 1).save_pretrained(tmp_path / "full")
    codec = mimi_folder(tmp_path / "mimi", codebook_size=16)
    write_recording(tmp_path / "question.wav", 16_000, 0.9)
    write_recording(tmp_path / "answer.wav", 24_000, 1.5)
    question = {"role": "user", "content": [{"type": "audio", "audio": "question.wav"}]}
    content = [{"type": "audio", "audio": "answer.wav"}, {"type": "text", "text": "red blue"}]
    row = {"messages": [question, {"role": "assistant", "content": content}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = {
        "name": "voice",
        "out": str(tmp_path),
        "model": {"family": "qwen3_omni_talker", "path": str(tmp_path / "full"), "config": {"reads_media": True}},
        "data": {"train": str(tmp_path / "rows.jsonl"), "length": 300, "workers": 0},
        "train": {"steps": 2, "global_batch": 1, "device": "cpu"},
    }
    write_codes(recipe, tmp_path / "codes", codec=codec)
    (shard,) = (tmp_path / "codes").glob("*.jsonl")
    question, answer = json.loads(shard.read_text())["messages"]
    assert question["content"][0]["type"] == "audio"
    (codes,) = [part["codes"] for part in answer["content"] if part["type"] == "codes"]
    assert len(codes[0]) == config.num_code_groups
    run = tessera.train(recipe, {"data.train": [{"path": str(tmp_path / "codes"), "root": str(tmp_path)}]})
    first, *_ = run.metrics
    assert first["depth_loss"] > 0


def write_recording(path: Path, rate: int, seconds: float) -> None:
    samples = (8000 * np.sin(np.arange(int(rate * seconds)) / 9)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
