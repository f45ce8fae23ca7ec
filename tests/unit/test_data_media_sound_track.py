"""Sound tracks of videos, for models that read frames and sound together."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tessera.core.sample import Part, VideoWithSound
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tests.errors import raises
from tests.quick import quick
from tests.toys.media_zoo import CLIPS, TRACKS, clip, scene, tone

RATE = 16_000
LIMITS = Limits()
BOTH = MediaSampling(audio=AudioSampling(RATE, max_seconds=20.0), video_sound=True)
FRAMES_ALONE = MediaSampling(audio=AudioSampling(RATE))
NAMES = ("mpeg4.mp4", "mpeg4.avi", "mpeg2.ts", "mpeg1.mpg", "h264.flv", "h264-one-key.mov", "h264-part.mp4",
         "vp9.webm", "ffv1.mkv")  # fmt: skip


def written(folder: Path, name: str, seconds: float, frames: int = 50) -> Part:
    form, codec, _ = CLIPS[name]
    if not {codec, TRACKS.get(form, "aac")} <= av.codecs_available:
        pytest.skip(f"PyAV cannot write {name}")
    (folder / name).write_bytes(clip(name, frames, sound_seconds=seconds))
    return Part("video", name)


@pytest.mark.parametrize("seconds", [1.1, 2.0, 2.15])
@pytest.mark.parametrize("name", quick(NAMES, "mpeg4.mp4", "mpeg1.mpg", "vp9.webm"))
def test_frames_come_with_their_sound(name: str, seconds: float, tmp_path: Path) -> None:
    """Two seconds of frames, with a track that is shorter, as long, or longer."""
    part = written(tmp_path, name, seconds)
    size, video = probe(part, tmp_path, LIMITS, BOTH), decode(part, tmp_path, LIMITS, BOTH)
    assert isinstance(video, VideoWithSound)
    assert size.samples == len(video.sound)
    assert abs(size.samples / RATE - seconds) < 0.15  # encoders add silence at both ends
    assert video.sound.dtype == np.float32
    middle = video.sound[RATE // 4 : RATE]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(int(spectrum.argmax()) * RATE / len(middle) - 440) < 2 * RATE / len(middle)
    alone = decode(part, tmp_path, LIMITS, FRAMES_ALONE)
    assert np.array_equal(video.frames, alone)
    assert probe(part, tmp_path, LIMITS, FRAMES_ALONE).samples == 0
    assert np.abs(middle).max() == pytest.approx(np.abs(tone(1.0, RATE)).max(), rel=0.1)


def test_videos_without_a_track_are_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "silent.mp4").write_bytes(clip("mpeg4.mp4", 20))
    first, *others = [Image.fromarray(scene(20, 30, number)) for number in range(3)]
    first.save(tmp_path / "moving.gif", save_all=True, append_images=others)
    (tmp_path / "frames").mkdir()
    for number, image in enumerate([first, *others]):
        image.save(tmp_path / "frames" / f"{number}.png")
    for name in ("silent.mp4", "moving.gif", "frames"):
        part = Part("video", name)
        assert probe(part, tmp_path, LIMITS, BOTH).samples == 0
        assert isinstance(decode(part, tmp_path, LIMITS, BOTH), np.ndarray)


def test_a_track_above_the_limit_is_refused(tmp_path: Path) -> None:
    part = written(tmp_path, "mpeg4.mp4", 2.0)
    short = MediaSampling(audio=AudioSampling(RATE, max_seconds=1.0), video_sound=True)
    for read in (probe, decode):
        with raises("media.audio-too-long"):
            read(part, tmp_path, LIMITS, short)
