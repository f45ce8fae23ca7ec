"""Processors of families that hear against transformers: features and tokens are identical."""

from __future__ import annotations

import pickle
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio_cases import HEARING, AudioCase, conversation, sound

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tessera.models.audio.features import LogMel
from tests.errors import raises

NAMES = list(HEARING)


def reference(case: AudioCase, folder: Path) -> Any:
    """Transformers' processor of a folder that ours has written."""
    case.processor(0).save(folder)
    return case.processor_class.from_pretrained(folder)


def spoken(sample: Sample, sounds: list[np.ndarray]) -> list[dict[str, Any]]:
    """The conversation in transformers' spelling."""
    remaining = iter(sounds)
    return [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.value}
                if part.kind == "text"
                else {"type": "audio", "audio": next(remaining)}
                for part in message.parts
            ],
        }
        for message in sample.messages
    ]


@pytest.mark.parametrize("clips", [0, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_references(name: str, clips: int, tmp_path: Path) -> None:
    case = HEARING[name]
    theirs, ours = reference(case, tmp_path), case.processor(0)
    sounds = [sound(case.lengths[at], at) for at in range(clips)]
    sample = conversation(clips)
    words = theirs.apply_chat_template(spoken(sample, sounds), tokenize=False)
    if name == "qwen3_asr":  # its processor takes one clip, and pads clips to the longest of a batch
        for heard in sounds:
            count = theirs(text=[theirs.audio_token], audio=[heard])["input_ids"].numel()
            words = words.replace("<|audio_pad|>", "<|placeholder|>" * count, 1)
        words = words.replace("<|placeholder|>", "<|audio_pad|>")
        tokens = theirs.tokenizer(words)["input_ids"]
    else:
        more = {"audio": sounds, "sampling_rate": 16_000} if sounds else {}
        tokens = theirs(text=words, **more)["input_ids"][0]
    encoded = ours.encode(sample, sounds)
    assert encoded.tokens.tolist() == list(tokens)
    assert ours.measure(sample, [MediaSize(0, 0, 0, len(heard)) for heard in sounds]) | encoded.counts == (
        ours.measure(sample, [MediaSize(0, 0, 0, len(heard)) for heard in sounds])
    )
    question = Sample("one", sample.messages[:-1])
    prompted = theirs.apply_chat_template(spoken(question, sounds), tokenize=False, add_generation_prompt=True)
    prompt = ours.prompt([sample], [sounds])
    assert ours.spell(prompt["tokens"].tolist()).count("<|im_start|>") == prompted.count("<|im_start|>")
    assert prompted.endswith("<|im_start|>assistant\n")


def test_conversations_are_those_of_the_template_in_transformers(tmp_path: Path) -> None:
    theirs = reference(HEARING["qwen2_audio"], tmp_path)
    sample, sounds = conversation(3), [sound(16_000)] * 3
    for messages in (sample.messages, sample.messages[:-1]):
        spelled = spoken(Sample("one", messages), sounds)
        answer = messages[-1].role == "user"
        ours, published = (
            theirs.apply_chat_template(spelled, chat_template=template, tokenize=False, add_generation_prompt=answer)
            for template in (theirs.chat_template, theirs.default_chat_template)
        )
        assert ours == published
        assert "Audio 3: <|audio_bos|><|AUDIO|><|audio_eos|>" in ours


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_travels_and_comes_back_from_its_files(name: str, tmp_path: Path) -> None:
    case = HEARING[name]
    ours = case.processor(0)
    ours.save(tmp_path)
    assert case.spec.processor is not None
    again: Any = case.spec.processor(case.config(0), tmp_path)
    assert again.fingerprint == ours.fingerprint
    travelled = pickle.loads(pickle.dumps(ours))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == ours.fingerprint
    assert case.processor(2).fingerprint != ours.fingerprint
    # As transformers writes them: all settings in one file.
    both = tmp_path / "both"
    reference(case, tmp_path / "ours").save_pretrained(both)
    assert not (both / "preprocessor_config.json").exists()
    read: Any = case.spec.processor(case.config(0), both)
    assert (read.clips, read.template.system) == (ours.clips, ours.template.system)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_read_as_arrays_are(name: str, tmp_path: Path) -> None:
    processor = HEARING[name].processor(0)
    values = np.round(sound(16_000) * 32_767).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(values.tobytes())
    heard = values.astype(np.float32) / 32_768
    sample = Sample("one", (Message("user", (Part("audio", "a.wav"),)), Message("assistant", (Part("text", "Yes."),))))
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert sizes == [MediaSize(0, 0, 0, samples=16_000)]
    encoded, plain = processor.encode(sample, media, sizes), processor.encode(sample, [heard])
    for name, tensor in encoded.streams["audio"].tensors.items():
        torch.testing.assert_close(tensor, plain.streams["audio"].tensors[name])
    assert processor.measure(sample, sizes)["tokens"] == len(encoded.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_collate_packs_clips_of_several_samples(name: str) -> None:
    case = HEARING[name]
    processor = case.processor(0)
    heard = [case.heard(0, clips, clips) for clips in (2, 0, 1)]
    lengths = [len(one.encoded.tokens) for one in heard]
    batch = processor.collate([[one.encoded for one in heard]], sum(lengths) + 3)
    word = processor.template.media["audio"].word
    assert torch.equal(batch["audio_slots"], (batch["tokens"] == processor.encoder.id_of(word)).nonzero()[:, 0])
    inputs = [heard[0].encoded.streams["audio"], heard[2].encoded.streams["audio"]]
    for key in ("mel", "mel_positions"):
        assert torch.equal(batch[key], torch.cat([one.tensors[key] for one in inputs]))
    assert batch.segments["audio"].lengths == inputs[0].lengths + inputs[1].lengths
    assert batch.counts["audio_frames"] == len(batch["mel"])
    trained = heard[0].encoded.labels != IGNORE
    assert processor.decode(heard[0].encoded.tokens[trained].tolist()).startswith("Seven of them.")


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_are_explained(name: str, tmp_path: Path) -> None:
    case = HEARING[name]
    config = case.config(0)
    assert case.spec.processor is not None
    with raises("recipe.unknown-key"):
        case.spec.processor(config, case.words_folder, fps=5)
    with raises("tokenizer.token-id-mismatch"):
        case.spec.processor(case.config(0, audio_token_id=5), case.words_folder)
    with raises("media.kind-not-supported"):
        pictures = Sample("one", (Message("user", (Part("image", None),)),))
        case.processor(0).measure(pictures, [MediaSize(8, 8)])
    case.processor(0).save(tmp_path)
    with raises("media.audio-features-differ"):
        case.spec.processor(case.config(3), tmp_path)


def test_recordings_beyond_the_positions_and_shorter_than_a_token_are_refused() -> None:
    processor = HEARING["qwen2_audio"].processor(0)  # its encoder has positions for one second
    with raises("media.audio-too-short"):
        processor.measure(conversation(1), [MediaSize(0, 0, 0, samples=320)])
    with raises("media.audio-too-long"):
        processor.measure(conversation(1), [MediaSize(0, 0, 0, samples=16_001)])
    assert processor.measure(conversation(1), [MediaSize(0, 0, 0, samples=16_000)])["audio_frames"] == 50


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"feature_size": 0}, "media.preprocessor-value"),
        ({"hop_length": 1.5}, "media.preprocessor-value"),
        ({"sampling_rate": True}, "media.preprocessor-value"),
        ({"n_fft": 65_536, "chunk_length": 2}, "media.preprocessor-value"),
        ({"dither": 0.1}, "media.audio-dither"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], error: str) -> None:
    with raises(error):
        LogMel.read(settings, "preprocessor_config.json")
