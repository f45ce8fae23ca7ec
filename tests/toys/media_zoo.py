"""One small sound file of every kind of media, made by code: what tests read, turn, cut and break."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image, features

WIDTH, HEIGHT = 40, 28


def scene(width: int = WIDTH, height: int = HEIGHT, at: float = 0.0) -> np.ndarray:
    """A soft picture that moves with `at`: encoders keep their groups of frames, and each frame differs."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 7 + at / 3), np.cos(y / 5 - at / 4), np.sin((x + y) / 9 + at / 5)]
    return np.stack([(127 + 100 * wave).astype(np.uint8) for wave in waves], axis=-1)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def exif(turn: int) -> Image.Exif:
    record = Image.Exif()
    record[0x0112] = turn
    record[0x010F] = "a camera"
    return record


@functools.cache
def pictures() -> dict[str, bytes]:
    rgb = Image.fromarray(scene())
    grey = rgb.convert("L")
    clear = rgb.convert("RGBA")
    clear.putalpha(grey)
    palette = rgb.quantize(16)
    deep = np.asarray(grey).astype(np.uint16) * 257
    frames = [Image.fromarray(scene(at=i)) for i in range(4)]
    moving: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 100}
    files = {
        "plain.jpg": saved(rgb, "JPEG"),
        "turned.jpg": saved(rgb, "JPEG", exif=exif(6)),
        "progressive.jpg": saved(rgb, "JPEG", progressive=True),
        "grey.jpg": saved(grey, "JPEG"),
        "cmyk.jpg": saved(rgb.convert("CMYK"), "JPEG"),
        "two.mpo.jpg": saved(rgb, "MPO", save_all=True, append_images=[rgb]),
        "plain.png": saved(rgb, "PNG"),
        "clear.png": saved(clear, "PNG"),
        "palette.png": saved(palette, "PNG"),
        "palette-clear.png": saved(palette, "PNG", transparency=3),
        "la.png": saved(clear.convert("LA"), "PNG"),
        "one.png": saved(grey.convert("1"), "PNG"),
        "deep.png": saved(Image.fromarray(deep), "PNG"),
        "deep-rgb.png": png16(scene()),
        "turned.png": saved(rgb, "PNG", exif=exif(8)),
        "moving.png": saved(frames[0], "PNG", **moving),
        "plain.gif": saved(palette, "GIF"),
        "moving.gif": saved(frames[0], "GIF", **moving),
        "plain.bmp": saved(rgb, "BMP"),
        "plain.ppm": saved(rgb, "PPM"),
        "plain.tif": saved(rgb, "TIFF"),
        "deflated.tif": saved(rgb, "TIFF", compression="tiff_deflate"),
        "lzw.tif": saved(rgb, "TIFF", compression="tiff_lzw"),
        "deep.tif": saved(Image.fromarray(deep), "TIFF"),
        "float.tif": saved(Image.fromarray(np.asarray(grey).astype(np.float32)), "TIFF"),
        "pages.tif": saved(rgb, "TIFF", save_all=True, append_images=[Image.fromarray(scene(20, 10))]),
        "turned.tif": saved(rgb, "TIFF", exif=exif(6)),
    }
    if features.check("webp"):
        files |= {
            "plain.webp": saved(rgb, "WEBP"),
            "lossless.webp": saved(rgb, "WEBP", lossless=True),
            "clear.webp": saved(clear, "WEBP"),
            "turned.webp": saved(rgb, "WEBP", exif=exif(6)),
            "moving.webp": saved(frames[0], "WEBP", **moving),
        }
    if features.check("avif"):
        files |= {"plain.avif": saved(rgb, "AVIF", speed=10), "clear.avif": saved(clear, "AVIF", speed=10)}
    return files


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png16(pixels: np.ndarray) -> bytes:
    """Sixteen bits for each colour: Pillow reads such a PNG and does not write it."""
    height, width, _ = pixels.shape
    rows = (pixels.astype(">u2") * 257).reshape(height, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(raw)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


# Container, codec, options: every way that frames may depend on each other.
CLIPS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mpeg4.mp4": ("mp4", "mpeg4", {"bf": "2", "g": "12"}),
    "mpeg4.avi": ("avi", "mpeg4", {"g": "9"}),
    "mpeg4-b.avi": ("avi", "mpeg4", {"bf": "2", "g": "9"}),
    "mpeg2.ts": ("mpegts", "mpeg2video", {"bf": "2", "g": "10"}),
    "mpeg1.mpg": ("mpeg", "mpeg1video", {"g": "10"}),
    "h264.mp4": ("mp4", "libx264", {"preset": "ultrafast", "bf": "2", "g": "8"}),
    "h264-open.mkv": ("matroska", "libx264", {"bf": "3", "g": "10", "x264-params": "open-gop=1:b-pyramid=normal"}),
    "h264-refresh.mkv": ("matroska", "libx264", {"g": "10", "x264-params": "intra-refresh=1"}),
    "h264.ts": ("mpegts", "libx264", {"preset": "ultrafast", "bf": "2", "g": "8"}),
    "h264.flv": ("flv", "libx264", {"preset": "ultrafast", "g": "8"}),
    "h264-one-key.mov": ("mov", "libx264", {"preset": "ultrafast", "g": "1000"}),
    "h264-part.mp4": ("mp4", "libx264", {"preset": "ultrafast", "g": "8"}),
    "hevc.mp4": ("mp4", "libx265", {"preset": "ultrafast", "x265-params": "keyint=10:log-level=none"}),
    "vp9.webm": ("webm", "libvpx-vp9", {"g": "10", "deadline": "realtime", "cpu-used": "8"}),
    "mjpeg.avi": ("avi", "mjpeg", {}),
    "mjpeg.mov": ("mov", "mjpeg", {}),
    "ffv1.mkv": ("matroska", "ffv1", {"g": "6"}),
}


# Codecs of sound tracks that each container takes; the others take AAC.
TRACKS = {"webm": "libopus", "avi": "libmp3lame", "mpeg": "mp2"}


def clip(
    name: str,
    frames: int = 40,
    rate: int = 25,
    width: int = 64,
    height: int = 48,
    sound_seconds: float = 0.0,
    **options: str,
) -> bytes:
    """A clip of `CLIPS`. Needs PyAV with an encoder for it. `sound_seconds`: length of a tone as its sound track."""
    import av

    form, codec, arguments = CLIPS[name]
    held = io.BytesIO()
    muxing = {"movflags": "frag_keyframe+empty_moov"} if name == "h264-part.mp4" else {}
    with av.open(held, "w", format=form, container_options=muxing) as container:
        stream: Any = container.add_stream(codec, rate=rate, options={**arguments, **options})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        track: Any = (
            container.add_stream(TRACKS.get(form, "aac"), rate=48_000, layout="stereo") if sound_seconds else None
        )
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(scene(width, height, number), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if sound_seconds:
            _mux_tone(container, track, sound_seconds, 48_000)
    return held.getvalue()


def clips(frames: int = 12) -> dict[str, bytes]:
    """Those that this build of PyAV can write."""
    import av

    return {name: clip(name, frames) for name, (_, codec, _) in CLIPS.items() if codec in av.codecs_available}


SOUNDS = {
    "sound.wav": ("wav", "pcm_s16le"),
    "sound.flac": ("flac", "flac"),
    "sound.mp3": ("mp3", "libmp3lame"),
    "sound.ogg": ("ogg", "libopus"),
    "sound.m4a": ("mp4", "aac"),
    "sound.aac": ("adts", "aac"),
    "sound.mka": ("matroska", "aac"),
}


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound(name: str, seconds: float = 1.5, rate: int = 48_000) -> bytes:
    """Two channels of the same tone."""
    import av

    form, codec = SOUNDS[name]
    held = io.BytesIO()
    with av.open(held, "w", format=form) as container:
        _mux_tone(container, container.add_stream(codec, rate=rate, layout="stereo"), seconds, rate)
    return held.getvalue()


def _mux_tone(container: Any, stream: Any, seconds: float, rate: int) -> None:
    import av

    data = np.repeat((tone(seconds, rate) * 32767).astype(np.int16), 2)[None]
    frame = av.AudioFrame.from_ndarray(data, format="s16", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    resampler = av.AudioResampler(
        format=stream.codec_context.format, layout="stereo", rate=rate, frame_size=stream.codec_context.frame_size
    )
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(piece))
    container.mux(stream.encode())


def sounds(seconds: float = 0.5) -> dict[str, bytes]:
    import av

    return {name: sound(name, seconds) for name, (_, codec) in SOUNDS.items() if codec in av.codecs_available}


# ---------------------------------------------------------------------------------------------- damage


def _flip(data: bytearray, rng: np.random.Generator) -> None:
    for place in rng.integers(0, len(data), 1 << int(rng.integers(0, 6))):
        data[place] ^= 1 << int(rng.integers(0, 8))


def _overwrite(data: bytearray, rng: np.random.Generator) -> None:
    start, length = int(rng.integers(0, len(data))), int(rng.integers(1, 64))
    data[start : start + length] = rng.integers(0, 256, len(data[start : start + length]), dtype=np.uint8).tobytes()


def _cut(data: bytearray, rng: np.random.Generator) -> None:
    del data[int(rng.integers(0, len(data))) :]


def _drop(data: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(0, len(data)))
    del data[start : start + int(rng.integers(1, 200))]


def _insert(data: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(0, len(data)))
    data[start:start] = rng.integers(0, 256, int(rng.integers(1, 200)), dtype=np.uint8).tobytes()


def _repeat(data: bytearray, rng: np.random.Generator) -> None:
    start, length = int(rng.integers(0, len(data))), int(rng.integers(1, 400))
    data[start:start] = data[start : start + length]


def _header(data: bytearray, rng: np.random.Generator) -> None:
    """Numbers near the start become very small or very large: sizes, counts, offsets."""
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, min(len(data), 400)))
        value = int(rng.choice([0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
        width = int(rng.choice([1, 2, 4]))
        order = "little" if rng.integers(0, 2) else "big"
        data[place : place + width] = (value & (1 << 8 * width) - 1).to_bytes(width, order)


DAMAGE: dict[str, Callable[[bytearray, np.random.Generator], None]] = {
    "flip": _flip,
    "overwrite": _overwrite,
    "cut": _cut,
    "drop": _drop,
    "insert": _insert,
    "repeat": _repeat,
    "header": _header,
}


def mutations(sound_files: dict[str, bytes], start: int, stop: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """(file, kind of damage, bytes) of each number: what it is depends on the seed and the number alone."""
    names, kinds = sorted(sound_files), sorted(DAMAGE)
    for number in range(start, stop):
        rng = np.random.default_rng((seed, number))
        name, kind = names[number % len(names)], kinds[int(rng.integers(0, len(kinds)))]
        data = bytearray(sound_files[name])
        DAMAGE[kind](data, rng)
        yield name, kind, bytes(data)


def animation_of_dots(side: int, frames: int) -> bytes:
    """Return a GIF whose frames change one pixel each: it is small, and large once decoded."""
    still = saved(Image.new("P", (side, side)), "GIF")
    dot = b"\x2c" + bytes(4) + b"\x01\x00\x01\x00\x00" + b"\x02\x02\x44\x01\x00"
    return still[:-1] + dot * (frames - 1) + b";"
