"""Check recordings for the data doctor: silence, clipping, a missing upper half of the frequencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.core.sample import MediaSize, Part
from tessera.data.media.audio import AudioSampling
from tessera.data.media.clips import AudioClip, AudioSamples
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, audio_rate, decode

LONGEST = 60.0  # number of seconds at the beginning of a recording that are examined
SILENT = 1e-3  # a recording whose largest sample is below this value is silent; full scale is 1
CLIPPED = 1e-3  # a recording with a larger share of samples in flat tops is clipped
_FLAT_TOP = 0.99  # minimum level of a flat top, as a share of the largest sample
_EQUAL = 2e-5  # maximum difference of neighbouring samples in a flat top: less than a step of 16 bits
_LEAST_FLAT = 2  # minimum number of equal pairs in a flat top: a crest between two samples has one
_EDGE = 2.5e-4  # minimum change within two samples before and after a flat top; that of a smooth crest is smaller
_LOUD = 4.0  # recordings with larger samples are too loud; decoders give samples somewhat above full scale
_SHORTEST = 0.5  # seconds; the spectrum of a shorter recording is not examined
# A recording without power above this share of its sampling rate was upsampled. The share is a bit above 1/4, which is
# the limit of a recording at half the rate, because resamplers leave some power there.
_EMPTY_ABOVE = 0.28
_EMPTY = 1e-6  # a smaller share of the power counts as none
_FACTOR, _SPREADS = 4.0, 6.0  # limits of `odd_lengths`, which explains them
_FRAME_MS = 80  # milliseconds of a frame of codes, of all supported codecs


@dataclass(frozen=True)
class Sound:
    """Hold the beginning of a recording at its own rate."""

    samples: np.ndarray  # float32 [samples]
    rate: int
    seconds: float  # length of the full recording

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (kind of finding, detail) for each problem of the recording."""
        peak = float(np.abs(self.samples).max())
        if peak < SILENT:
            yield "silent", "no sound" if peak == 0 else f"the largest sample is {peak:.1e} of full scale"
            return
        if peak > _LOUD:
            yield "clipped", f"the largest sample is {peak:.3g} times full scale"
        elif (share := _flat_share(self.samples, peak)) > CLIPPED:
            yield "clipped", f"{share:.1%} of the samples are at a flat top"
        if len(self.samples) >= _SHORTEST * self.rate:
            power = np.abs(np.fft.rfft(self.samples.astype(np.float64))) ** 2
            above = power[round(_EMPTY_ABOVE * 2 * (len(power) - 1)) :].sum()
            if above < _EMPTY * power[1:].sum():
                yield "narrow-band", f"nothing above {self.rate / 4000:g} kHz in a file of {self.rate / 1000:g} kHz"


def _flat_share(samples: np.ndarray, peak: float) -> float:
    """Return the share of clipped samples: runs of equal samples near the peak, with a jump before and after."""
    if len(samples) < 2:
        return 0.0
    top, steps = np.abs(samples) >= _FLAT_TOP * peak, np.abs(np.diff(samples))
    flat = top[1:] & top[:-1] & (steps <= _EQUAL)
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], flat, [False]]).astype(np.int8)))
    starts, ends = bounds[::2], bounds[1::2]
    around = np.pad(steps, 2, constant_values=np.inf)  # the beginning and the end of the recording count as edges
    before, after = around[starts] + around[starts + 1], around[ends + 2] + around[ends + 3]
    clipped = (ends - starts >= _LEAST_FLAT) & (np.minimum(before, after) > _EDGE)
    return float((ends - starts)[clipped].sum()) / len(flat)


def listen(part: Part, size: MediaSize, rate: int, root: Path, limits: Limits) -> Sound:
    """Return the beginning of a recording at its own rate. `size`: its size at `rate`."""
    value, seconds = part.value, size.samples / rate
    if isinstance(value, np.ndarray):
        return Sound(value[: round(LONGEST * rate)], rate, seconds)
    if isinstance(value, AudioSamples):
        return Sound(value.mono()[: round(LONGEST * value.rate)], value.rate, seconds)
    clip = value if isinstance(value, AudioClip) else AudioClip(value, 0.0, seconds)
    clip = AudioClip(clip.value, clip.start, min(clip.end, clip.start + LONGEST))
    own_rate = audio_rate(part, root, limits)
    sampling = MediaSampling(audio=AudioSampling(own_rate, LONGEST + 1))
    return Sound(decode(Part("audio", clip), root, limits, sampling), own_rate, seconds)


def odd_lengths(characters: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which texts are much too long, and much too short, for their recordings.

    The characters per second of a text are compared with those of the set: they must differ by a factor of `_FACTOR`
    and by `_SPREADS` times the spread of the set.
    """
    speed = np.log((characters + 1) / (seconds + 0.5))
    middle = np.median(speed)
    limit = max(np.log(_FACTOR), _SPREADS * 1.4826 * float(np.median(np.abs(speed - middle))))
    return speed > middle + limit, speed < middle - limit


def milliseconds(parts: Sequence[Part], sizes: Sequence[MediaSize], rate: int) -> int:
    """Return the milliseconds of all recordings of a sample, and of its speech as codes."""
    pairs = list(zip(parts, sizes, strict=True))
    recorded = sum(size.samples for part, size in pairs if part.kind == "audio") * 1000 // rate
    return recorded + _FRAME_MS * sum(size.frames for part, size in pairs if part.kind == "codes")
