"""Tell which digit a video shows and which way it moves: a small classifier and the centre of what is bright."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import digits
import numpy as np
from sklearn.svm import SVC

_CROP = 11  # pixels around the centre of a digit, which is 8 x 8
_MARGIN = 8


@dataclass(frozen=True)
class Verdict:
    """Hold the digit and the way of each video."""

    digits: np.ndarray
    ways: list[str]

    def right(self, wanted: Sequence[int] | np.ndarray, ways: Sequence[str]) -> tuple[float, float]:
        """Return which share of digits and of ways are those that were asked for."""
        same = [one == other for one, other in zip(self.ways, ways, strict=True)]
        return float(np.mean(self.digits == np.asarray(wanted))), float(np.mean(same))


class Judge:
    """Read digits with a support vector machine that was trained on frames of real videos."""

    def __init__(self) -> None:
        scans = digits.split(held_out=False)
        videos, labels, _ = digits.drawn(scans, 2 * len(scans), seed=1)
        frames = np.random.default_rng(0).integers(0, videos.shape[1], len(videos))
        bright = _bright(videos)[np.arange(len(videos)), frames]
        self._reader = SVC(C=10, gamma=0.2).fit(_centred(bright), labels)

    def __call__(self, videos: np.ndarray) -> Verdict:
        """Judge grey videos, uint8 [N, F, H, W]: the digit that all frames together speak for."""
        bright = _bright(videos)
        count, frames = bright.shape[:2]
        votes = self._reader.decision_function(_centred(bright.reshape(-1, *bright.shape[2:])))
        read = self._reader.classes_[votes.reshape(count, frames, -1).sum(1).argmax(1)]
        return Verdict(read, _ways(bright))


def _bright(videos: np.ndarray) -> np.ndarray:
    """Return brightness from 0 to 1, without the faint haze that a decoder leaves on black."""
    brightness = videos.astype(np.float32) / 255
    return np.where(brightness < 0.1, 0, brightness)


def _centres(bright: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return column and row of the centre of frames [..., H, W]; that of a black frame is in the middle."""
    places = np.arange(bright.shape[-1])
    total = bright.sum((-2, -1))
    empty = total == 0
    total = np.where(empty, 1, total)
    middle = (bright.shape[-1] - 1) / 2
    x, y = ((bright.sum(axis) * places).sum(-1) / total for axis in (-2, -1))
    return np.where(empty, middle, x), np.where(empty, middle, y)


def _centred(frames: np.ndarray) -> np.ndarray:
    """Return the pixels around the centre of each frame, [N, values]."""
    x, y = (np.round(one).astype(int) + _MARGIN - _CROP // 2 for one in _centres(frames))
    wide = np.pad(frames, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))
    cut = [frame[top : top + _CROP, left : left + _CROP].ravel() for frame, left, top in zip(wide, x, y, strict=True)]
    return np.stack(cut)


def _ways(bright: np.ndarray) -> list[str]:
    """Return the way of each video by how its centre moves; "nowhere" if that is less than a pixel."""
    x, y = _centres(bright)
    directions = []
    for right, down in zip(x[:, -1] - x[:, 0], y[:, -1] - y[:, 0], strict=True):
        if max(abs(right), abs(down)) < 1:
            directions.append("nowhere")
        elif abs(right) > abs(down):
            directions.append("right" if right > 0 else "left")
        else:
            directions.append("down" if down > 0 else "up")
    return directions
