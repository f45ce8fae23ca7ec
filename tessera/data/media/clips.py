"""Parts of recordings, and recordings that are decoded already."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import TesseraError

# A part of a recording as text: talk.flac#t=12.5,17.25, as in media fragments of the W3C.
_SPAN = re.compile(r"#t=(\d{1,9}(?:\.\d{1,9})?),(\d{1,9}(?:\.\d{1,9})?)$")
_FULL_SCALE = {np.dtype(np.int16): 1 << 15, np.dtype(np.int32): 1 << 31}
_LOUDEST = 1e6  # maximum value of a sample (full scale is 1): powers of much larger values overflow in float32


@dataclass(frozen=True)
class AudioClip:
    """Name the part of a recording from `start` to `end`, in seconds. `value`: the recording, as in `Part.value`."""

    value: Any
    start: float
    end: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end) and 0 <= self.start < self.end):
            raise TesseraError(
                f"not a part of a recording: {self.start:g} to {self.end:g} s",
                fix="write the start and the end in seconds, such as talk.flac#t=12.5,17.25",
                code="media.bad-clip",
            )

    @property
    def span(self) -> str:
        """Return start and end as text, as they are written after a path."""
        return f"#t={_seconds(self.start)},{_seconds(self.end)}"


@dataclass(frozen=True, eq=False)
class AudioSamples:
    """Hold decoded audio: [samples], or with channels, as floats between -1 and 1 or as 16 or 32 bit integers."""

    array: Any
    rate: int  # samples per second

    def mono(self) -> np.ndarray:
        """Return float32 [samples], the mean of all channels. Raise for other arrays."""
        array = np.asarray(self.array)
        full = _FULL_SCALE.get(array.dtype)
        usable = array.ndim in (1, 2) and array.size > 0 and (full or array.dtype.kind == "f")
        sound = array.astype(np.float32) / (full or 1) if usable else np.empty(0)
        if not usable or not is_sound(sound) or type(self.rate) is not int or self.rate < 1:
            raise TesseraError(
                f"audio samples must be finite floats or 16 or 32 bit integers, with their rate, not {array.dtype} "
                f"{array.shape} at {self.rate!r:.20}",
                code="media.wrong-array",
            )
        # Channels are the shorter dimension: soundfile puts them last, torchaudio first.
        mono: np.ndarray = sound if sound.ndim == 1 else sound.mean(axis=int(np.argmin(sound.shape)))
        return mono.astype(np.float32)


def is_sound(samples: np.ndarray) -> bool:
    """Return whether no sample is NaN or so large that its features would overflow."""
    return bool(np.abs(samples).max(initial=0.0) <= _LOUDEST)


def wav_bytes(sound: np.ndarray, rate: int) -> bytes:
    """Return float32 [samples] as a WAV file of 32 bit floats, which changes no sample."""
    data = np.ascontiguousarray(sound, "<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)  # float, channels, rate, bytes a second, block, bits
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def clip_of(value: Any) -> Any:
    """Return the `AudioClip` of a path with a span, such as talk.flac#t=12.5,17.25. Return other values unchanged."""
    match = _SPAN.search(value) if isinstance(value, str) else None
    return value if match is None else AudioClip(value[: match.start()], float(match[1]), float(match[2]))


def _seconds(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")
