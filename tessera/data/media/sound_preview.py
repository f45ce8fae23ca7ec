"""Draw recordings, and encode short previews of them, for pages that contain all that they show."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.sample import Part
from tessera.data.media.audio import AudioSampling
from tessera.data.media.clips import AudioClip
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe

PREVIEW = ".mp3"  # suffix of files with previews
PREVIEW_SECONDS = 10.0
_PREVIEW_RATE = 16_000
_PREVIEW_BITS = 32_000  # bits per second of an MP3 preview
_WIDTH, _WAVE, _SPECTRUM = 288, 48, 96  # pixels: of the drawing, of the waveform, of the spectrogram below it
_WINDOW = 512  # samples of a Fourier transform
_RANGE = 8.0  # the spectrogram shows powers down to 10^-8 of the largest; smaller ones get the darkest colour
_BACKGROUND, _LINE = (20, 23, 28), (125, 162, 255)
# Colours of the spectrogram, from zero to the largest power.
_COLOURS = np.array([(20, 23, 28), (80, 18, 123), (182, 54, 121), (251, 136, 97), (252, 253, 191)], np.float64)


def draw(sound: np.ndarray) -> str:
    """Return the waveform above the spectrogram of a recording, as a data URI of a JPEG. `sound`: float32 [samples]."""
    out = io.BytesIO()
    Image.fromarray(np.concatenate([_waveform(sound), _spectrogram(sound)])).save(out, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def play(sound: np.ndarray, rate: int) -> str | None:
    """Return the beginning of a recording, as a data URI of an MP3 file; None if this FFmpeg writes none."""
    content = encode_preview(sound, rate)
    return None if content is None else f"data:audio/mpeg;base64,{base64.b64encode(content).decode()}"


def beginning(part: Part, root: Path, limits: Limits) -> tuple[np.ndarray, int]:
    """Return the samples of a recording that its preview contains, and their rate."""
    sampling = MediaSampling(audio=AudioSampling(_PREVIEW_RATE))
    seconds = probe(part, root, limits, sampling).samples / _PREVIEW_RATE
    clip = part.value if isinstance(part.value, AudioClip) else AudioClip(part.value, 0.0, seconds)
    clip = replace(clip, end=min(clip.end, clip.start + PREVIEW_SECONDS))
    return decode(Part("audio", clip), root, limits, sampling), _PREVIEW_RATE


def encode_preview(sound: np.ndarray, rate: int) -> bytes | None:
    """Return the beginning of a recording as an MP3 file; None if this FFmpeg writes none."""
    import av

    if "libmp3lame" not in av.codecs_available:
        return None
    data = np.clip(sound[: round(PREVIEW_SECONDS * rate)], -1, 1).astype(np.float32)
    held = io.BytesIO()
    with av.open(held, "w", format="mp3") as container:
        stream: Any = container.add_stream("libmp3lame", rate=_PREVIEW_RATE, layout="mono")
        stream.bit_rate = _PREVIEW_BITS
        frame = av.AudioFrame.from_ndarray(data[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, "mono", _PREVIEW_RATE, context.frame_size or 1152)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return held.getvalue()


def _columns(count: int) -> np.ndarray:
    """Return the index of the first sample of each column of pixels, and at the end the number of samples."""
    return np.linspace(0, count, _WIDTH + 1).astype(np.int64)


def _waveform(sound: np.ndarray) -> np.ndarray:
    """Return an image with a line from the lowest to the highest sample in each column. The height is full scale."""
    drawn = np.full((_WAVE, _WIDTH, 3), _BACKGROUND, np.uint8)
    bounds = _columns(len(sound))
    rows = np.arange(_WAVE)
    for column, start in enumerate(bounds[:-1].tolist()):
        samples = sound[start : max(start + 1, int(bounds[column + 1]))]
        high, low = float(np.clip(samples.max(), -1, 1)), float(np.clip(samples.min(), -1, 1))
        top, bottom = ((1 - value) / 2 * (_WAVE - 1) for value in (high, low))
        drawn[(rows >= round(top)) & (rows <= round(bottom)), column] = _LINE
    return drawn


def _spectrogram(sound: np.ndarray) -> np.ndarray:
    """Return an image of the power at each time and frequency: from 0 at the bottom to half of the rate at the top."""
    padded = np.concatenate([sound, np.zeros(_WINDOW, np.float32)])
    windows = np.stack([padded[start : start + _WINDOW] for start in _columns(len(sound))[:-1].tolist()])
    power = np.abs(np.fft.rfft(windows * np.hanning(_WINDOW), axis=1)) ** 2
    bands = np.linspace(0, power.shape[1] - 1, _SPECTRUM).round().astype(np.int64)
    decades = np.log10(power[:, bands[::-1]].T + 1e-12)
    # The brightest colour is full scale (1), or the largest power of the recording if it is quiet.
    largest = max(float(decades.max()), -_RANGE / 2)
    level = np.clip((decades - largest + _RANGE) / _RANGE, 0, 1) * (len(_COLOURS) - 1)
    below = np.minimum(level.astype(np.int64), len(_COLOURS) - 2)
    part = (level - below)[..., None]
    image: np.ndarray = (_COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part).astype(np.uint8)
    return image
