"""What is particular to the processors of thinkers: sound, and sound tracks that alternate with frames of videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import clip, conversation, picture
from grid_processors import OMNI3_IDS, OMNI_IDS, OmniCase
from processor_families import PROCESSORS
from transformers import WhisperFeatureExtractor

from tessera.core.sample import MediaSize, Sample, VideoWithSound
from tessera.models.processing.streams import media_size
from tessera.models.qwen2_5_omni.processor import Qwen25OmniProcessor
from tests.errors import raises
from tests.quick import quick

case, later = PROCESSORS["qwen2_5_omni"], PROCESSORS["qwen3_omni"]
assert isinstance(case, OmniCase)
assert isinstance(later, OmniCase)
CASE: OmniCase = case
LATER: OmniCase = later
RATE = 16_000


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    count = max(1, round(seconds * RATE))
    return (0.1 * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def film(frames: int, seconds: float, width: int = 70, height: int = 90) -> VideoWithSound:
    return VideoWithSound(clip(frames, width, height), sound(seconds))


# By name: what is shown, and frames per second of clips (None: unknown).
SHOWN: dict[str, tuple[list[tuple[str, Any]], float | None]] = {
    "sound": ([("audio", sound(1.3))], None),
    "two sounds": ([("audio", sound(0.4)), ("audio", sound(7.77))], None),
    "sound and a picture": ([("audio", sound(0.5)), ("image", picture(61, 87))], None),
    "sound between pictures": ([("image", picture(61, 87)), ("audio", sound(2.0)), ("image", picture(30, 90))], None),
    "everything, silent clips": (
        [("video", clip(6)), ("audio", sound(3.1)), ("image", picture(61, 87)), ("video", clip(4))],
        3.0,
    ),
    "a clip with sound": ([("video", film(12, 6.0))], None),
    "sound that ends before its clip": ([("video", film(16, 3.3))], None),
    "sound that goes on after its clip": ([("video", film(4, 9.2))], None),
    "wide frames": ([("video", film(6, 2.9, 560, 30))], None),
    "a slow clip": ([("video", film(8, 40.0))], 0.3),
    "a fast clip": ([("video", film(40, 5.0))], 8.0),
    "a clip at a third": ([("video", film(30, 10.0))], 3.0),
    "everything": (
        [
            ("audio", sound(1.0)),
            ("video", film(10, 5.0)),
            ("image", picture(61, 87)),
            ("video", film(6, 2.5, 90, 60)),
            ("audio", sound(0.3)),
        ],
        2.4,
    ),
}


def sizes_at(media: list[Any], rate: float | None) -> list[MediaSize]:
    """Sizes as in headers of clips whose frames are all taken."""
    sizes = [media_size(item) for item in media]
    return [MediaSize(s.width, s.height, s.frames, s.samples, s.frames, rate) if s.width else s for s in sizes]


@pytest.mark.parametrize(
    "name", quick(SHOWN, "two sounds", "sound and a picture", "sound that ends before its clip", "everything")
)
@pytest.mark.parametrize(("case", "ids"), [(CASE, OMNI_IDS), (LATER, OMNI3_IDS)], ids=["qwen2_5_omni", "qwen3_omni"])
def test_tokens_and_positions_of_mixtures_are_the_references(case: OmniCase, ids: dict[str, int], name: str) -> None:
    items, rate = SHOWN[name]
    kinds, media = [kind for kind, _ in items], [item for _, item in items]
    sample, sizes = conversation(*kinds), sizes_at(media, rate)
    ours = case.processor.encode(sample, media, sizes)
    assert ours.tokens.tolist() == case.tokens(sample, media, sizes, answer=False)
    assert torch.equal(ours.positions, case.reference_positions(ours, sample, media, sizes))
    question = Sample("one", sample.messages[:-1])
    prompt = case.processor.prompt([sample], [media], [sizes])
    assert prompt["tokens"].tolist() == case.tokens(question, media, sizes, answer=True)
    measured = case.processor.measure(sample, sizes)
    assert {count: measured[count] for count in ours.counts} == ours.counts
    for name, stream in ours.streams.items():
        placed = ours.tokens[stream.slots]
        words = case.processor.template.media
        expected = {"audio": ("audio",), "vision": ("image", "video")}[name]
        assert set(placed.tolist()) <= {ids[words[kind].word] for kind in expected}
        assert len(stream.slots.unique()) == len(stream.slots)
    slots = torch.cat([stream.slots for stream in ours.streams.values()])
    assert sorted(slots.tolist()) == case.is_media(ours.tokens).nonzero()[:, 0].tolist()


def test_a_silent_clip_beside_one_with_sound_is_written_as_before() -> None:
    """Transformers takes the option for all clips of a sample."""
    media = [clip(6), film(6, 3.0)]
    both = CASE.processor.encode(conversation("video", "video"), media)
    silent = CASE.processor.encode(conversation("video"), media[:1])
    first = int((silent.tokens == OMNI_IDS["<|vision_eos|>"]).nonzero()[0])
    assert torch.equal(both.tokens[: first + 1], silent.tokens[: first + 1])
    assert torch.equal(both.positions[:, : first + 1], silent.positions[:, : first + 1])
    assert both.counts["frames"] == 12


@pytest.mark.parametrize("seconds", quick([0.0301, 0.4, 2.005, 4.0, 11.1], 0.0301, 2.005))
def test_elements_contain_the_frames_of_the_references_features(seconds: float) -> None:
    """The middle frame of each element is every second frame of the reference."""
    waves = sound(seconds)
    extractor = WhisperFeatureExtractor.from_pretrained(CASE.exported)
    theirs = extractor(waves, sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="np")
    mel = theirs["input_features"][0][:, theirs["attention_mask"][0].astype(bool)]
    encoded = CASE.processor.encode(conversation("audio"), [waves])
    stream = encoded.streams["audio"]
    assert mel.shape[1] == -(-len(waves) // 160)
    assert sum(stream.lengths) == (mel.shape[1] + 1) // 2
    middle = stream.tensors["mel"].view(sum(stream.lengths), 16, 5)[:, :, 2]
    np.testing.assert_allclose(middle.T.numpy(), mel[:, ::2], rtol=1e-4, atol=1e-4)
    assert stream.tensors["mel_positions"][:, 0].max() < 20


def test_a_track_of_a_few_samples_is_silence() -> None:
    """It has no two elements that could be averaged to a token."""
    frames = clip(4)
    ours = CASE.processor.encode(conversation("video"), [VideoWithSound(frames, sound(0.01))])
    assert torch.equal(ours.tokens, CASE.processor.encode(conversation("video"), [frames]).tokens)
    with raises("media.audio-too-short"):
        CASE.processor.measure(conversation("audio"), [MediaSize(0, 0, 0, 300)])


@pytest.mark.parametrize("samples", [160, 200, 201])
def test_clip_shorter_than_half_a_window(samples: int) -> None:
    """The STFT reflects half a window at each end, which takes more samples than that."""
    if samples == 201:
        assert LATER.processor.encode(conversation("audio"), [sound(samples / RATE)]).counts["audio_frames"] == 1
        return
    with raises("media.audio-too-short"):
        LATER.processor.measure(conversation("audio"), [MediaSize(0, 0, 0, samples)])


def test_a_folder_with_all_settings_in_one_file(tmp_path: Path) -> None:
    """As published: settings of images and of features in one preprocessor_config.json."""
    CASE.write_tokenizer(tmp_path)
    stored = json.loads((CASE.exported / "preprocessor_config.json").read_text())
    assert (stored["feature_extractor_type"], stored["image_processor_type"]) == (
        "WhisperFeatureExtractor",
        "Qwen2VLImageProcessor",
    )
    changed = {**stored, "chunk_length": 20}
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": changed}))
    loaded = Qwen25OmniProcessor.load(CASE.config, tmp_path)
    assert (loaded.clips.mel.seconds, loaded.sampling.audio.max_seconds) == (20, 20.0)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "feature_size": 80}))
    with raises("media.audio-features-differ", "mel bins"):
        Qwen25OmniProcessor.load(CASE.config, tmp_path)


@pytest.mark.parametrize("seconds", [0.301, 1.0, 2.005, 4.0, 11.1])
def test_chunks_contain_the_frames_of_the_references_features(seconds: float) -> None:
    """The middle frame of each element is every eighth frame of the reference, in chunks of a second. Windows of
    attention have eight of them."""
    waves = sound(seconds)
    extractor = WhisperFeatureExtractor.from_pretrained(LATER.exported)
    theirs = extractor(waves, sampling_rate=RATE, padding=True, truncation=False, return_tensors="np")
    mel = theirs["input_features"][0]
    encoded = LATER.processor.encode(conversation("audio"), [waves])
    stream = encoded.streams["audio"]
    assert mel.shape[1] == len(waves) // 160
    assert stream.lengths == ((104, 41) if seconds > 11 else (LATER.heard(mel.shape[1]),))
    middle = stream.tensors["mel"].view(-1, 16, 15)[:, :, 7]
    at = [
        chunk + frame for chunk in range(0, mel.shape[1], 100) for frame in range(0, min(100, mel.shape[1] - chunk), 8)
    ]
    np.testing.assert_allclose(middle.T.numpy(), mel[:, at], rtol=1e-4, atol=1e-4)
    assert stream.tensors["mel_positions"][:, 0].max() <= 12
    assert stream.tensors["mel_positions"][:, 1].unique().tolist() == [100]  # a last chunk is filled up


def test_positions_between_frames_of_an_odd_rate_are_fractions() -> None:
    media = [clip(30)]
    encoded = LATER.processor.encode(conversation("video"), media, sizes_at(media, 3.0))
    assert encoded.positions.dtype == torch.float32
    assert (encoded.positions % 1).any()
    assert LATER.processor.collate([[encoded]], len(encoded.tokens) + 3)["positions"].dtype == torch.float32
    text = LATER.processor.encode(conversation(), [])
    assert text.positions.dtype == torch.float32
