"""Log-mel features of sound, equal to those of transformers' `WhisperFeatureExtractor`, and their files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from tessera.errors import TesseraError

_FLOOR = -10.0  # log10 of the minimum energy of a bin, to which silence is clamped
_RANGE = 8.0  # log10 energies are clamped to at least that of the loudest bin minus this


@dataclass(frozen=True)
class LogMel:
    """Hold the settings of log-mel features, and compute them."""

    bins: int = 80
    rate: int = 16_000  # samples per second
    fft: int = 400  # samples in the window of a frame
    hop: int = 160  # samples between the middles of neighbouring frames
    seconds: int = 30  # for models that pad all recordings to one length: that length, which is the maximum

    @property
    def longest(self) -> int:
        """Return the maximum length of a recording in samples, to which some models pad all recordings."""
        return self.seconds * self.rate

    def frames(self, samples: int) -> int:
        """Return the number of mel frames of a recording: `samples` / `hop`, rounded up."""
        return -(-samples // self.hop)

    def __call__(self, sound: np.ndarray, length: int | None = None, frames: int | None = None) -> np.ndarray:
        """Return the features [frames, bins] of `sound`, followed by silence up to `length` samples.

        `length`: default: no silence is added. `frames`: number of the first frames to return; default: all.
        """
        length = len(sound) if length is None else length
        total = length // self.hop
        frames = total if frames is None else frames
        assert len(sound) <= length, (len(sound), length)
        assert frames <= total, (frames, total)
        # Frames after the sound are silence. They need not be computed, and do not change the loudest bin.
        heard = min(total, self.frames(len(sound) + self.fft // 2))
        padded = np.zeros(min(length, heard * self.hop + self.fft), dtype=np.float32)
        padded[: len(sound)] = sound
        spectrum = torch.stft(
            torch.from_numpy(padded), self.fft, self.hop, window=torch.hann_window(self.fft), return_complex=True
        )
        energies = mel_filters(self.bins, self.fft, self.rate) @ (spectrum[:, :heard].abs() ** 2)
        logs = torch.full((self.bins, max(frames, heard)), _FLOOR)
        logs[:, :heard] = energies.clamp(min=10**_FLOOR).log10()
        logs = torch.maximum(logs, logs.max() - _RANGE)
        return ((logs + 4.0) / 4.0)[:, :frames].T.contiguous().numpy()

    # ------------------------------------------------------------------------------------------ files

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str) -> Self:
        """Return the settings that a preprocessor_config.json contains."""
        dither = data.get("dither") or 0.0
        if dither != 0.0:
            raise TesseraError(
                f"dither = {dither!r} adds noise to recordings, which Tessera does not support",
                where=where,
                fix="set dither to 0.0, as in published folders",
                code="media.audio-dither",
            )
        settings = {
            ours: whole_number(data, theirs, getattr(cls, ours), _MOST[ours], where) for ours, theirs in _FIELDS.items()
        }
        mel = cls(**settings)
        if mel.fft // 2 >= mel.longest:
            raise TesseraError(
                f"n_fft = {mel.fft} is too large for recordings of {mel.longest} samples",
                where=where,
                fix="set n_fft to 400, as in published folders",
                code="media.preprocessor-value",
            )
        return mel

    def write(self, extractor: str = "WhisperFeatureExtractor") -> dict[str, Any]:
        """Return the fields of a preprocessor_config.json. `extractor`: class of transformers that reads them."""
        return {
            "feature_extractor_type": extractor,
            **{theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()},
            "n_samples": self.longest,
            "nb_max_frames": self.longest // self.hop,
            "dither": 0.0,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
        }


_FIELDS = {
    "bins": "feature_size",
    "rate": "sampling_rate",
    "fft": "n_fft",
    "hop": "hop_length",
    "seconds": "chunk_length",
}
_MOST = {"bins": 1024, "rate": 768_000, "fft": 1 << 16, "hop": 1 << 16, "seconds": 86_400}


def whole_number(data: Mapping[str, Any], name: str, default: int, most: int, where: str, least: int = 1) -> int:
    """Return the integer field `name` of a preprocessor file, or `default`; raise if it is out of range."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TesseraError(
            f"{name} = {value!r} must be a whole number from {least} to {most}",
            where=where,
            code="media.preprocessor-value",
        )
    return value


@functools.lru_cache(maxsize=4)
def mel_filters(bins: int, fft: int, rate: int) -> torch.Tensor:
    """Return triangular filters [bins, fft // 2 + 1] from 0 to 8000 Hz on the mel scale of Slaney, each of area 1."""
    # The scale is linear below 1000 Hz, which is mel 15, and logarithmic above.
    top = 15.0 + np.log(8000.0 / 1000.0) * _PER_LOG
    mels = np.linspace(0.0, top, bins + 2)
    edges = np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp((mels - 15.0) / _PER_LOG))
    slopes = edges[:, None] - np.linspace(0, rate // 2, fft // 2 + 1)
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters).float()


_PER_LOG = 27.0 / np.log(6.4)


def mel_windows(mel: np.ndarray, count: int, frames: int, stride: int, reach: int) -> dict[str, np.ndarray]:
    """Return the input of an `AudioEncoder` for the first `count` audio frames of a chunk.

    `mel` [at most `frames`, bins]: the first mel frames of the chunk, as many as these audio frames need. `frames`:
    number of mel frames of the chunk. `stride`, `reach`: see `AudioShape`.
    """
    after = max(0, (count - 1) * stride + reach + 1 - len(mel))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(mel, ((reach, after), (0, 0))), 2 * reach + 1, axis=0)
    index = np.arange(count, dtype=np.int64)
    return {
        "mel": windows[: count * stride : stride].reshape(count, -1),
        "mel_positions": np.stack([index, np.full_like(index, frames)], axis=1),
    }
