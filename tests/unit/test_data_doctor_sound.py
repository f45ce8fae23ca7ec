"""The data doctor and recordings: what it finds, draws and plays."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import write_jsonl
from PIL import Image

from tessera.config.run_config import SourceSection
from tessera.core.sample import MediaSize, Message, Part, Sample, VideoWithSound
from tessera.data.media.sound_preview import PREVIEW_SECONDS, draw, play
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.examine import examine
from tessera.tools.data_doctor.look import show
from tessera.tools.data_doctor.sound import Sound, odd_lengths
from tests.toys import speech
from tests.toys.media_zoo import tone
from tests.toys.two_encoders.processor import two_encoder_processor

pytest.importorskip("av")
RATE = 16_000


def noise(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(np.float32)


def upsampled(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return a recording at twice its rate, without frequencies above the old half."""
    spectrum = np.fft.rfft(sound)
    full = np.zeros(len(sound) + 1, complex)
    full[: len(spectrum)] = spectrum
    return (2 * np.fft.irfft(full, 2 * len(sound))).astype(np.float32)


def kinds(sound: np.ndarray, rate: int = RATE) -> set[str]:
    return {kind for kind, _ in Sound(sound, rate, len(sound) / rate).problems()}


def test_problems_of_a_recording() -> None:
    assert kinds(noise(1)) == set()
    assert kinds(np.zeros(RATE, np.float32)) == {"silent"}
    assert kinds(noise(1) * 1e-3) == {"silent"}
    assert kinds(np.clip(noise(1) * 20, -1, 1)) == {"clipped"}
    # Tones of full scale are not clipped, down to the lowest that is heard.
    for hertz in (30, 100, 440):
        assert "clipped" not in kinds(np.round(2 * tone(1, RATE, hertz) * 32767).astype(np.float32) / 32768)
    assert kinds(upsampled(noise(1, RATE // 2), RATE // 2)) == {"narrow-band"}
    assert kinds(noise(0.1)[:1]) == set()


def test_texts_that_do_not_fit_their_recordings() -> None:
    seconds = np.linspace(1, 20, 50)
    characters = (12 * seconds * np.linspace(0.7, 1.4, 50)).astype(np.int64)
    assert not np.any(odd_lengths(characters, seconds))
    characters[7], characters[30] = characters[7] * 12, characters[30] // 12
    long, short = odd_lengths(characters, seconds)
    assert (np.flatnonzero(long).tolist(), np.flatnonzero(short).tolist()) == ([7], [30])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twenty-four good transcripts, and one row for each problem."""
    sounds = {
        "good.wav": (noise(2), RATE),
        "silent.wav": (np.zeros(2 * RATE, np.float32), RATE),
        "clipped.wav": (np.clip(noise(2, 44_100) * 20, -1, 1), 44_100),
        "narrow.wav": (upsampled(noise(2, 8000), 8000), RATE),
        "long.wav": (noise(25), RATE),
    }
    for name, (sound, rate) in sounds.items():
        (tmp_path / name).write_bytes(speech.wav(sound, rate))
    text = "twenty-six characters long"
    listed: list[dict[str, Any]] = [
        {"id": f"good {number}", "audio_filepath": "good.wav", "offset": 0.01 * number, "duration": 1.5, "text": text}
        for number in range(24)
    ]
    listed += [{"id": name, "audio_filepath": f"{name}.wav", "text": text} for name in ("silent", "clipped", "narrow")]
    listed += [
        {"id": "too little", "audio_filepath": "long.wav", "text": text},
        {"id": "too much", "audio_filepath": "good.wav", "text": text * 20},
        {"id": "<b>missing</b>", "audio_filepath": "none.wav", "text": text},
    ]
    return write_jsonl(tmp_path / "rows.jsonl", listed)


@pytest.mark.parametrize(("rate", "hertz"), [(192_000, 440), (44_100, 50), (16_000, 1000)])
@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5])
def test_smooth_crests_are_not_clipped_and_flat_ones_are(rate: int, hertz: int, bits: int, shift: float) -> None:
    wave = np.sin(2 * np.pi * hertz * (np.arange(rate // 4) + shift) / rate)
    smooth, flat = 0.3 * wave, np.clip(0.4 * wave, -0.3, 0.3)
    as_stored = [np.round(sound * 2 ** (bits - 1)) / 2 ** (bits - 1) for sound in (smooth, flat)]
    problems = [dict(Sound(sound.astype(np.float32), rate, 0.25).problems()) for sound in as_stored]
    assert ["clipped" in kinds for kinds in problems] == [False, True]


def test_samples_far_above_full_scale_are_reported() -> None:
    ((kind, detail),) = Sound(noise(0.4) * 3e5, RATE, 0.4).problems()
    assert kind == "clipped"
    assert detail.endswith("times full scale")


def locations(diagnosis: Diagnosis) -> dict[str, list[str]]:
    return {kind: [location.id for location in finding.locations] for kind, finding in diagnosis.findings.items()}


def test_findings(rows: Path) -> None:
    section = SourceSection(path=rows)
    by_headers = {
        "missing-file": ["<b>missing</b>"],
        "long-transcript": ["too much"],
        "short-transcript": ["too little"],
    }
    assert {k: v for k, v in locations(examine([section], workers=0)).items() if k != "one-answer"} == by_headers
    decoded = examine([section], workers=0, decode=True)
    assert {k: v for k, v in locations(decoded).items() if k != "one-answer"} == {
        **by_headers,
        "silent": ["silent"],
        "clipped": ["clipped"],
        "narrow-band": ["narrow"],
    }
    details = {kind: finding.locations[0].detail for kind, finding in decoded.findings.items()}
    assert details["silent"] == "no sound"
    assert "% of the samples are at a flat top" in details["clipped"]
    assert details["narrow-band"] == "nothing above 4 kHz in a file of 16 kHz"
    assert details["long-transcript"] == "520 characters in 2.00 s: 260.0 per second"
    assert {"Recordings of a sample", "Text of a second of sound"} <= {one.title for one in decoded.histograms}


@pytest.mark.slow
def test_page_draws_and_plays_recordings(rows: Path, tmp_path: Path) -> None:
    processor = two_encoder_processor(tmp_path / "tokenizer", ["user assistant twenty-six characters long"] * 9)
    diagnosis = examine([SourceSection(path=rows)], processor, length=256, workers=0, samples=30)
    page = diagnosis.html()
    assert "media-src data:" in page
    assert page.count("<audio controls") == page.count('class="thumb sound"') >= 29
    assert "2.00 s at 16,000 Hz; silent: no sound" in page
    assert "2.00 s at 44,100 Hz; clipped: " in page
    assert "<b>missing</b>" not in page
    for uri in re.findall(r'src="data:audio/mpeg;base64,([^"]+)"', page)[:2]:
        assert len(base64.b64decode(uri)) < 60_000
    assert len(page) < 30 * 100_000
    assert len(diagnosis.json()) < 100_000  # without drawings
    assert {"Recordings of a sample", "Sound of a sample"} <= {one.title for one in diagnosis.histograms}


def test_videos_with_sound_have_a_thumbnail() -> None:
    frames = np.full((2, 20, 30, 3), 200, np.uint8)
    part, size = Part("video", "tour.mp4"), MediaSize(30, 20, 2, samples=RATE)
    sample = Sample("s", (Message("user", (part,)),))
    view = show("a.jsonl:1", sample, [VideoWithSound(frames, noise(1))], [size], None)
    assert str(view.media[0].uri).startswith("data:image/jpeg")


def test_drawing_and_preview() -> None:
    import av

    sound = np.concatenate([tone(15, RATE, 1000), np.zeros(15 * RATE, np.float32)])
    image = Image.open(io.BytesIO(base64.b64decode(draw(sound).partition(",")[2])))
    pixels = np.asarray(image.convert("L")).astype(int)
    assert pixels.shape == (144, 288)
    # The tone is a line at an eighth of the height of the spectrogram, in the left half; the right half is empty.
    assert abs(int(pixels[48:, :140].mean(axis=1).argmax()) - 96 * 7 // 8) <= 2
    assert pixels[48:, 150:].max() < 60
    uri = play(sound, RATE)
    assert uri is not None
    with av.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as held:
        decoded = np.concatenate([frame.to_ndarray()[0] for frame in held.decode(audio=0)])
        assert len(decoded) / held.streams.audio[0].rate == pytest.approx(PREVIEW_SECONDS, abs=0.2)
    assert speech.pitch(decoded, RATE) == pytest.approx(1000, abs=2)
    for short in (1, 2, 100):
        assert draw(noise(1)[:short])
        assert play(noise(1)[:short], RATE)


def test_speech_as_codes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def row(name: str, frames: int, codebooks: int = 4, text: str = "twenty-six characters long") -> dict[str, Any]:
        return {"id": name, "text": text, "audio_codes": rng.integers(0, 9, (frames, codebooks)).tolist()}

    rows = [row(f"good {number}", 20 + number) for number in range(24)]
    rows += [row("too much", 25, text="a" * 900), row("too little", 900), row("others", 25, 3)]
    rows += [
        {"id": "ragged", "text": "a", "audio_codes": [[1], [1, 2]]},
        {"id": "none", "text": "a", "audio_codes": None},
    ]
    section = SourceSection(path=write_jsonl(tmp_path / "rows.jsonl", rows))
    findings = locations(examine([section], workers=0))
    assert {kind: names for kind, names in findings.items() if kind != "one-answer"} == {
        "bad-codes": ["ragged", "none"],
        "long-transcript": ["too much"],
        "short-transcript": ["too little"],
        "other-codebooks": ["others"],
    }
