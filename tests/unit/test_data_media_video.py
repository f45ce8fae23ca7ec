"""Clips and sound from files: frames that decoding everything would give, and what is refused."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import pictures
from PIL import Image

from tessera.core.sample import MediaSize, Part
from tessera.data.media import video
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import ArchiveMember, Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tests.errors import raises
from tests.quick import quick
from tests.toys import media_zoo
from tests.toys.media_zoo import saved, scene

LIMITS = Limits()
SAMPLING = VideoSampling()
SOUND = MediaSampling(audio=AudioSampling(16_000))


def size(root: Path, name: str, sampling: VideoSampling = SAMPLING) -> MediaSize:
    return probe(Part("video", name), root, LIMITS, sampling)


def test_frames_are_taken_evenly() -> None:
    sampling = VideoSampling(fps=2, min_frames=4, max_frames=12)
    assert sampling.count(300, 30.0) == 12  # 20 wanted
    assert sampling.count(100, 30.0) == 6  # 6.7 wanted, two to a patch
    assert sampling.count(30, 30.0) == 4
    assert sampling.count(3, 30.0) == 2
    assert sampling.count(1, 30.0) == 1
    assert sampling.count(9, None) == 8  # a folder: all, two to a patch
    assert sampling.choose(100, 30.0) == [0, 16, 33, 50, 66, 83]
    assert sampling.choose(1, 30.0) == [0]
    fixed = VideoSampling(frames=6)
    assert [fixed.count(total, 30.0) for total in (1000, 6, 5, 1)] == [6, 6, 4, 1]
    assert VideoSampling(frames=7).count(1000, None) == 6
    assert fixed.choose(60, 30.0) == [0, 10, 20, 30, 40, 50]


def write_clip(path: Path, frames: int, rate: int = 10, noise: bool = False) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            shade = np.full((48, 64, 3), 10 * number, dtype=np.uint8)
            if noise:
                shade = np.random.default_rng(number).integers(0, 256, shade.shape, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize("form", ["mp4", "mkv", "avi"])
def test_a_clip(tmp_path: Path, form: str) -> None:
    write_clip(tmp_path / f"clip.{form}", 20)
    probed = size(tmp_path, f"clip.{form}")
    assert probed == MediaSize(64, 48, 4, total=20, rate=10.0)
    assert probed.fps == 2.0
    frames = decode(Part("video", f"clip.{form}"), tmp_path, LIMITS, SAMPLING)
    assert frames.shape == (4, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert np.abs(frames.mean((1, 2, 3)) - [0, 50, 100, 150]).max() < 6
    part = Part("video", f"clip.{form}")
    with raises("media.too-many-pixels"):
        probe(part, tmp_path, Limits(max_image_pixels=64 * 48 - 1), SAMPLING)


def test_what_is_kept_of_a_clip_is_limited(tmp_path: Path) -> None:
    """Without a size to bring frames to nobody knows yet how much that will be."""
    write_clip(tmp_path / "clip.mp4", 20)
    part, tight = Part("video", "clip.mp4"), Limits(max_video_pixels=4 * 16 * 12)
    assert probe(part, tmp_path, tight, SAMPLING) == MediaSize(64, 48, 4, total=20, rate=10.0)
    with raises("media.video-too-large", "64x48"):
        decode(part, tmp_path, tight, SAMPLING)
    with raises("media.video-too-large", "17x12"):
        probe(part, tmp_path, tight, SAMPLING, lambda kind, size: (17, 12))
    probed = probe(part, tmp_path, tight, SAMPLING, lambda kind, size: (16, 12))
    assert probed == MediaSize(64, 48, 4, total=20, rate=10.0)
    assert decode(part, tmp_path, tight, SAMPLING, lambda kind, size: (16, 12)).shape == (4, 12, 16, 3)


def test_a_clip_that_ends_early(tmp_path: Path) -> None:
    """A frame that the header promised and the file lacks is filled up; a clip that was cut is damaged."""
    write_clip(tmp_path / "whole.avi", 20, noise=True)
    data = (tmp_path / "whole.avi").read_bytes()
    every = VideoSampling(fps=10, min_frames=20)
    place = data.rindex(b"00dc", 0, data.rindex(b"idx1"))  # where the last frame begins
    (tmp_path / "short.avi").write_bytes(data[:place])
    assert size(tmp_path, "short.avi", every) == MediaSize(64, 48, 20, total=20, rate=10.0)
    frames = decode(Part("video", "short.avi"), tmp_path, LIMITS, every)
    assert len(frames) == 20
    assert np.array_equal(frames[18], frames[19])
    assert not np.array_equal(frames[17], frames[18])
    (tmp_path / "cut.avi").write_bytes(data[: int(len(data) * 0.6)])
    with raises("media.damaged-file", "cut.avi", "20"):
        decode(Part("video", "cut.avi"), tmp_path, LIMITS, every)


def test_a_clip_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n")
    for name in ("noise.mp4", "list.m3u8"):
        with raises("media.unreadable-file"):
            size(tmp_path, name)


def test_a_folder_of_pictures_is_a_clip(tmp_path: Path) -> None:
    clip = tmp_path / "clip"
    clip.mkdir()
    for number in (1, 2, 9, 10):
        Image.new("RGB", (8, 6), (number * 10,) * 3).save(clip / f"{number}.png")
    assert size(tmp_path, "clip") == MediaSize(8, 6, 4, total=4)  # nobody says how many make a second
    assert size(tmp_path, "clip").fps is None
    frames = decode(Part("video", "clip"), tmp_path, LIMITS, SAMPLING)
    assert frames[:, 0, 0, 0].tolist() == [10, 20, 90, 100]
    Image.new("RGB", (9, 6)).save(clip / "2.png")
    with raises("media.frame-sizes-differ"):
        decode(Part("video", "clip"), tmp_path, LIMITS, SAMPLING)
    (clip / "3.png").symlink_to(tmp_path / "elsewhere.png")
    pictures(tmp_path, ["elsewhere.png"])
    with raises("media.outside-root"):
        size(tmp_path, "clip")
    (tmp_path / "bare").mkdir()
    with raises("media.no-frames"):
        size(tmp_path, "bare")


def everything(data: bytes) -> list[np.ndarray]:
    """All frames of a clip, by the plainest use of PyAV."""
    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


SAMPLINGS = [VideoSampling(frames=n, multiple=1) for n in (1, 2, 5, 40)] + [VideoSampling(), VideoSampling(fps=9)]


@pytest.mark.parametrize(
    "name", quick(sorted(media_zoo.CLIPS), "h264.mp4", "h264-open.mkv", "mpeg2.ts", "mpeg4-b.avi", "vp9.webm")
)
def test_frames_are_those_of_decoding_everything(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    if media_zoo.CLIPS[name][1] not in av.codecs_available:
        pytest.skip(f"no encoder {media_zoo.CLIPS[name][1]}")
    data = media_zoo.clip(name, 40)
    (tmp_path / "shard.tar").write_bytes(b"before" + data + b"behind")
    frames = everything(data)
    assert len(frames) == 40
    for sampling in SAMPLINGS:
        promised = probe(Part("video", data), tmp_path, LIMITS, sampling)
        expected = np.stack([frames[i * 40 // promised.frames] for i in range(promised.frames)])
        within = ArchiveMember(tmp_path / "shard.tar", 6, len(data), name)
        for value in (data, within):
            decoded = decode(Part("video", value), tmp_path, LIMITS, sampling)
            assert np.array_equal(decoded, expected), sampling
        small = decode(Part("video", data), tmp_path, LIMITS, sampling, lambda kind, size: (28, 14))
        resized = np.stack([np.asarray(Image.fromarray(frame).resize((28, 14), 3)) for frame in expected])
        assert np.array_equal(small, resized)


@pytest.mark.parametrize("form", ["mp4", "avi"])
def test_a_frame_that_its_decoder_calls_corrupt_refuses_the_clip(tmp_path: Path, form: str) -> None:
    write_clip(tmp_path / f"sound.{form}", 24, noise=True)
    data = (tmp_path / f"sound.{form}").read_bytes()
    everything_of = VideoSampling(fps=10, max_frames=24)
    assert decode(Part("video", data), tmp_path, LIMITS, everything_of).shape[0] == 24
    refused = []
    for at in range(10):
        flipped = bytearray(data)
        flipped[len(data) // 4 + at * len(data) // 20] ^= 0xFF
        try:
            decode(Part("video", bytes(flipped)), tmp_path, LIMITS, everything_of)
        except TesseraError as error:
            refused.append("corrupt" in error.what)
    assert sum(refused) >= 3


def test_only_what_leads_to_a_chosen_frame_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    data = media_zoo.clip("mpeg4.mp4", 240)
    arguments: list[int] = []
    real = video.decoder

    def watched(stream: Any, max_pixels: int | None = None) -> Any:
        context = real(stream, max_pixels)

        class Counting:
            flush_buffers = context.flush_buffers
            width, height = context.width, context.height

            def decode(self, packet: Any) -> Any:
                arguments.append(0 if packet is None else packet.size)
                return context.decode(packet)

        return Counting()

    monkeypatch.setattr(video, "decoder", watched)
    decoded = decode(Part("video", data), tmp_path, LIMITS, VideoSampling(frames=4))
    frames = everything(data)
    assert np.array_equal(decoded, np.stack([frames[i] for i in (0, 60, 120, 180)]))
    assert len(arguments) < 30  # of 240: key frames come every twelfth


def test_a_clip_that_lies_on_its_side(tmp_path: Path) -> None:
    """Telephones store clips as the sensor lies, with a note how to turn them."""
    pytest.importorskip("av")
    data = media_zoo.clip("h264.mp4", 10)
    frames = everything(data)
    for quarters, (a, b, c, d) in enumerate([(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]):
        turned = bytearray(data)
        at = turned.index(b"tkhd") + 4 + 40
        for place, value in zip((0, 4, 12, 16), (a, b, c, d), strict=True):
            turned[at + place : at + place + 4] = struct.pack(">i", value << 16)
        part = Part("video", bytes(turned))
        wide = quarters % 2 == 0
        probed = probe(part, tmp_path, LIMITS, SAMPLING)
        assert (probed.width, probed.height, probed.frames) == (64 if wide else 48, 48 if wide else 64, 4)
        decoded = decode(part, tmp_path, LIMITS, SAMPLING)
        assert np.array_equal(decoded[0], np.rot90(frames[0], -quarters))


def test_headers_that_are_wrong(tmp_path: Path) -> None:
    """A count that is off by a little is mended; one that is off by much is told."""
    pytest.importorskip("av")
    data = media_zoo.clip("mpeg4.avi", 40)
    place = data.index(b"strh") + 8 + 32
    assert struct.unpack_from("<I", data, place) == (40,)
    every = VideoSampling(frames=100, multiple=1)
    for claimed, told in ((39, None), (42, None), (400, "media.damaged-file 400 40"), (10, "media.damaged-file 10 40")):
        part = Part("video", data[:place] + struct.pack("<I", claimed) + data[place + 4 :])
        if told is None:
            assert len(decode(part, tmp_path, LIMITS, every)) == probe(part, tmp_path, LIMITS, every).frames == claimed
        else:
            with raises(told):
                decode(part, tmp_path, LIMITS, every)
    whole = media_zoo.clip("h264-open.mkv", 100)
    with raises("media.damaged-file"):
        decode(Part("video", whole[: len(whole) // 2]), tmp_path, LIMITS, SAMPLING)


def test_files_without_frames(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with raises("media.no-such-stream"):
        probe(Part("video", media_zoo.sound("sound.mka")), tmp_path, LIMITS, SAMPLING)
    held = io.BytesIO()
    with av.open(held, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    with raises("media.unreadable-file"):
        probe(Part("video", held.getvalue()), tmp_path, LIMITS, SAMPLING)
    for data in (b"", b"\0" * 1000, saved(Image.fromarray(scene()), "JPEG")):
        with raises("media.unreadable-file"):
            probe(Part("video", data), tmp_path, LIMITS, SAMPLING)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_moving_pictures(tmp_path: Path, form: str) -> None:
    frames = [Image.fromarray(scene(at=3 * i)) for i in range(8)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=250, loop=0, **options)
    assert probe(Part("image", data), tmp_path, LIMITS, SAMPLING) == MediaSize(40, 28)
    first = np.asarray(decode(Part("image", data), tmp_path, LIMITS, SAMPLING)).astype(int)
    assert np.abs(first - np.asarray(frames[0])).mean() < 8
    part = Part("video", data)
    assert probe(part, tmp_path, LIMITS, SAMPLING) == MediaSize(40, 28, 4, total=8, rate=4.0)  # two a second
    decoded = decode(part, tmp_path, LIMITS, SAMPLING).astype(int)
    for number, frame in zip((0, 2, 4, 6), decoded, strict=True):
        assert np.abs(frame - np.asarray(frames[number])).mean() < 8
    small = decode(part, tmp_path, LIMITS, SAMPLING, lambda kind, size: (14, 14))
    assert small.shape == (4, 14, 14, 3)
    still = saved(frames[0], form)
    assert probe(Part("video", still), tmp_path, LIMITS, SAMPLING).frames == 1
    assert decode(Part("video", still), tmp_path, LIMITS, SAMPLING).shape == (1, 28, 40, 3)
    with pytest.raises(TesseraError):
        decode(Part("video", data[: len(data) // 2]), tmp_path, LIMITS, SAMPLING)


def test_an_animation_of_too_many_pixels_in_all_frames_is_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("video", media_zoo.animation_of_dots(20, 30))
    assert decode(part, tmp_path, Limits(max_animation_pixels=30 * 20 * 20), SAMPLING).shape[1:3] == (20, 20)
    monkeypatch.setattr(Image.Image, "load", None)
    for work in (probe, decode):
        with raises("media.video-too-large", "30 frames of 20x20"):
            work(part, tmp_path, Limits(max_animation_pixels=30 * 20 * 20 - 1), SAMPLING)


def test_a_moving_png_with_another_still(tmp_path: Path) -> None:
    frames = [Image.fromarray(scene(at=9 * i)) for i in range(4)]
    data = saved(
        Image.new("RGB", (40, 28)), "PNG", save_all=True, append_images=frames, default_image=True, duration=100
    )
    decoded = decode(Part("video", data), tmp_path, LIMITS, SAMPLING)
    assert np.array_equal(decoded, np.stack([np.asarray(frame) for frame in frames]))
    assert np.asarray(decode(Part("image", data), tmp_path, LIMITS, SAMPLING)).max() == 0


# ---------------------------------------------------------------------------------------------- sound


@pytest.mark.parametrize("name", sorted(media_zoo.SOUNDS))
@pytest.mark.parametrize("rate", [16_000, pytest.param(24_000, marks=pytest.mark.slow)])
def test_sound(tmp_path: Path, name: str, rate: int) -> None:
    av = pytest.importorskip("av")
    if media_zoo.SOUNDS[name][1] not in av.codecs_available:
        pytest.skip(f"no encoder {media_zoo.SOUNDS[name][1]}")
    part, sampling = Part("audio", media_zoo.sound(name, 1.5)), MediaSampling(audio=AudioSampling(rate))
    promised = probe(part, tmp_path, LIMITS, sampling)
    assert (promised.width, promised.height, promised.frames) == (0, 0, 0)
    assert abs(promised.samples - 1.5 * rate) <= 0.06 * rate  # encoders add a little
    heard = decode(part, tmp_path, LIMITS, sampling)
    assert heard.shape == (promised.samples,)
    assert heard.dtype == np.float32
    middle = heard[rate // 4 : rate + rate // 4]
    assert abs(np.sqrt(np.mean(middle**2)) - 0.5 / np.sqrt(2)) < 0.03  # two equal channels are no louder than one
    loudest = np.argmax(np.abs(np.fft.rfft(middle)))
    assert abs(loudest - 440) <= 1


def test_sound_that_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("av")
    wav, flac = media_zoo.sound("sound.wav"), media_zoo.sound("sound.flac")

    def refused(data: bytes, told: str, sampling: MediaSampling = SOUND, what: Any = decode) -> None:
        with raises(told):
            what(Part("audio", data), tmp_path, LIMITS, sampling)

    refused(wav, "media.audio-too-long", MediaSampling(audio=AudioSampling(16_000, max_seconds=1)), probe)
    refused(flac[: len(flac) // 2], "media.damaged-file")
    refused(wav[: len(wav) // 2], "media.damaged-file")
    refused(wav[: len(wav) // 2], "media.damaged-file", what=probe)
    at = wav.index(b"data") + 4
    for endless in (0x7FFFF000, 0xFFFFFFFF):  # as programs write it that do not know how much follows
        piped = wav[:at] + struct.pack("<I", endless) + wav[at + 4 :]
        assert len(decode(Part("audio", piped), tmp_path, LIMITS, SOUND)) == 24_000
    refused(wav[:30], "media.unreadable-file")
    refused(b"", "media.unreadable-file")
    refused(media_zoo.clip("mpeg4.mp4", 4), "media.no-such-stream", what=probe)
    refused(wav[:24] + struct.pack("<I", 7) + wav[28:], "media.unreadable-file", what=probe)
    assert len(decode(Part("audio", media_zoo.tone(1, 100)), tmp_path, LIMITS, SOUND)) == 100
