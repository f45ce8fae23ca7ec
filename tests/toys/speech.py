"""Recordings for tests: tones whose pitch says which second of a recording they are in, in many encodings."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Any

import numpy as np

from tests.toys.media_zoo import tone


def steps(seconds: int, rate: int) -> np.ndarray:
    """Return a tone of 300 + 100 n Hz in second n."""
    return np.concatenate([tone(1, rate, 300.0 + 100 * second) for second in range(seconds)])


def pitch(sound: np.ndarray, rate: int) -> float:
    """Return the loudest frequency in Hz."""
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    return float(spectrum.argmax() * rate / len(sound))


def wav(sound: np.ndarray, rate: int, bits: int = 16) -> bytes:
    """Return a WAV file of [samples] or [samples, channels]. `bits`: 8, 16, 24 or 32 for integers, -32 for floats."""
    channels = 1 if sound.ndim == 1 else sound.shape[1]
    width = abs(bits) // 8
    if bits < 0:
        data = sound.astype("<f4").tobytes()
    elif bits == 8:
        data = (sound * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = (sound.astype(np.float64) * ((1 << (bits - 1)) - 1)).astype("<i4").reshape(-1, 1)
        data = whole.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    form = struct.pack(
        "<HHIIHH", 3 if bits < 0 else 1, channels, rate, rate * channels * width, channels * width, abs(bits)
    )
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def encoded(sound: np.ndarray, rate: int, form: str, codec: str) -> bytes:
    """Return [samples] in a container and a codec of FFmpeg."""
    import av

    held = io.BytesIO()
    with av.open(held, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((sound * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        size = stream.codec_context.frame_size
        resampler = av.AudioResampler(stream.codec_context.format, "mono", rate, size)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return held.getvalue()
