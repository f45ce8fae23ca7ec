"""Choose which frames of a video are sampled, and collect them in an array."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Target, refused
from tessera.data.media.images import smaller
from tessera.errors import TesseraError

# Rules for the indices of the sampled frames. Each model family uses the rule of its published preprocessor:
#   even     i x total / count, rounded down (LLaVA-OneVision)
#   steps    the same in fp32, which differs by a frame for very long videos (Qwen2-VL, Qwen2.5-VL)
#   middles  like steps, from the middle of each interval (InternVL)
#   ends     from the first to the last frame, rounded to the nearest; any number of frames (Qwen3-VL)
#   clock    every 1 / fps seconds, rounded up; a video that is too long evenly over its duration (GLM-4.1V)
#   pace     the frame shown every 1 / fps seconds from the start, up to `max_frames`: motion keeps its speed. The
#            number of frames is 1 plus a multiple of `multiple`; `fps` 0: every frame (generation)
Rule = Literal["even", "steps", "middles", "ends", "clock", "pace"]


_CLOSE = 1e-4  # tolerance for rounded timestamps, in seconds or sampling intervals


@dataclass(frozen=True)
class VideoSampling:
    """State how many frames are sampled from a video: `fps` per second between two limits, or `frames`.

    The number is at most that of the video's frames, rounded down to a multiple of `multiple`, but at least 1. With the
    rule "pace", it is a multiple plus 1. With the rule "clock", the last frame is repeated until it is a multiple.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2
    frames: int | None = None
    rule: Rule = "even"

    def count(self, total: int, rate: float | None) -> int:
        """Return how many of `total` frames are sampled. `rate`: frames per second; None: unknown, `fps` is ignored."""
        if self.rule == "clock" and self.frames is None and rate is not None:
            return len(self._ticks(total, rate))
        if self.rule == "pace":
            ticks = max(1, math.ceil(total / self._step(rate) - _CLOSE))  # sampling times within the duration
            return (min(ticks, self.max_frames) - 1) // self.multiple * self.multiple + 1
        if self.frames is not None:
            taken = min(self.frames, total)
        else:
            wanted = float(total) if rate is None else total / rate * self.fps
            taken = int(min(max(wanted, self.min_frames), self.max_frames, total))
        # For a video shorter than one temporal patch, the processor repeats the last frame.
        return max(taken // self.multiple * self.multiple, 1)

    def choose(self, total: int, rate: float | None) -> list[int]:
        """Return the indices of the sampled frames among `total` frames. `rate`: frames per second, None if unknown."""
        if self.rule == "clock" and self.frames is None and rate is not None:
            return self._ticks(total, rate)
        if self.rule == "pace":
            step = self._step(rate)
            return [int(i * step + _CLOSE) for i in range(self.count(total, rate))]
        return self.spread(self.count(total, rate), total)

    def choose_by_time(self, seconds: Sequence[float], count: int) -> list[int] | None:
        """Return the indices of `count` sampled frames by the presentation times of all frames, which may be irregular.

        `seconds`: time of each frame, ascending. Return None if the rule does not depend on times.
        """
        if self.rule != "pace" or self.fps <= 0:
            return None
        ticks = (seconds[0] + i / self.fps + _CLOSE for i in range(count))
        return [max(0, bisect_right(seconds, tick) - 1) for tick in ticks]

    def _step(self, rate: float | None) -> float:
        """Return the number of frames between two sampling times."""
        return 1.0 if rate is None or self.fps <= 0 else rate / self.fps

    def spread(self, count: int, total: int) -> list[int]:
        """Return the indices of `count` evenly spaced frames. If `count` exceeds `total`, some indices occur twice."""
        if self.rule in ("ends", "pace"):
            return [int(n) for n in np.linspace(0, total - 1, count).round()]
        if self.rule in ("steps", "middles"):
            step = total / count
            shift = step / 2 if self.rule == "middles" else 0.0
            return [int(np.float32(shift + i * step)) for i in range(count)]
        return [i * total // count for i in range(count)]

    def _ticks(self, total: int, rate: float) -> list[int]:
        last, seconds, longest = total - 1, total / rate, self.max_frames / self.fps
        if seconds <= longest:
            ticks = max(math.floor(seconds * self.fps), 1)
            numbers = [min(last, math.ceil(i * rate / self.fps)) for i in range(ticks)]
        elif self.max_frames >= total:
            numbers = list(range(total))
        else:
            numbers = [min(last, math.ceil(t * rate)) for t in np.linspace(0, seconds, self.max_frames)]
        once = list(dict.fromkeys(numbers))
        if len(once) < min(self.min_frames, total):
            once = self.spread(min(self.min_frames, total), total)
        return once + [once[-1]] * (-len(once) % self.multiple)


class VideoHeader(NamedTuple):
    """Hold frame size, number of frames and frame rate of a video, from its header."""

    width: int  # in pixels, as displayed: after the frame is rotated
    height: int
    total: int  # number of frames
    rate: float | None  # frames per second


def checked_size(
    header: VideoHeader, name: str, limits: Limits, sampling: VideoSampling, target: Target | None
) -> MediaSize:
    """Return the size of the sampled video. Raise if one frame, or all sampled frames together, exceed the limits."""
    taken = sampling.count(header.total, header.rate)
    size = MediaSize(header.width, header.height, taken, total=header.total, rate=header.rate)
    if header.width * header.height > limits.max_image_pixels:
        raise TesseraError(
            f"too many pixels in a video frame: {name} is {header.width}x{header.height}, "
            f"the limit is {limits.max_image_pixels}",
            fix="raise data.max_image_pixels, or scale the video down",
            code="media.too-many-pixels",
        )
    width, height = kept_size(size, target)
    if width * height * size.frames > limits.max_video_pixels:
        raise TesseraError(
            f"too many pixels in one video: {size.frames} frames of {width}x{height} are sampled from {name}",
            fix="lower max_frames, fps or video_max_pixels of data.processor",
            code="media.video-too-large",
        )
    return size


def kept_size(size: MediaSize, target: Target | None) -> tuple[int, int]:
    """Return (width, height) of frames in memory: the original size or the target, whichever is smaller."""
    wanted = target(size) if target is not None else None
    if wanted is None or wanted[0] * wanted[1] >= size.width * size.height:
        return size.width, size.height
    return wanted


class Frames:
    """Collect the sampled frames in an array while the video is decoded."""

    def __init__(self, chosen: list[int], size: MediaSize, target: Target | None, name: str) -> None:
        self.chosen = chosen
        self.filled = 0
        self._name = name
        self._size = (size.width, size.height)
        self._stored_size = kept_size(size, target)
        self._pixels = np.empty((len(chosen), self._stored_size[1], self._stored_size[0], 3), dtype=np.uint8)

    @property
    def next(self) -> int | None:
        """Return the index in the video of the next frame to store; None if all are stored."""
        return self.chosen[self.filled] if self.filled < len(self.chosen) else None

    def put(self, number: int, frame: Image.Image) -> None:
        """Store the frame with index `number`. It also replaces earlier frames that the decoder did not return."""
        if frame.size not in (self._size, self._stored_size):
            raise TesseraError(
                f"damaged video: {self._name} (its frames have different sizes: {frame.width}x{frame.height} "
                f"after {self._size[0]}x{self._size[1]})",
                fix="make all frames the same size",
                code="media.frame-sizes-differ",
            )
        first = self.filled
        while self.filled < len(self.chosen) and self.chosen[self.filled] <= number:
            self.filled += 1
        self._pixels[first : self.filled] = np.asarray(smaller(frame, self._stored_size))

    def stacked(self) -> np.ndarray:
        """Return the frames as [F, H, W, 3]. If frames are missing at the end, repeat the last frame.

        Raise if more than one frame and more than a tenth of the frames are missing, or all.
        """
        total = len(self.chosen)
        if self.filled == 0 or total - self.filled > max(1, total // 10):
            raise refused("damaged video", self._name, f"{self.filled} of {total} frames could be decoded")
        self._pixels[self.filled :] = self._pixels[self.filled - 1]
        return self._pixels
