"""What videos of every kind have in common: which frames are sampled, and the array they are put into."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Target
from tessera.data.media.images import smaller
from tessera.errors import TesseraError

# Which frames of a video are taken, once it is known how many. Each family has the rule of the preprocessor it was
# published with, and the timestamps follow from it:
#   even     at i x total / count, rounded down (LLaVA-OneVision)
#   steps    the same, computed in fp32 as the reference does: very long videos differ by a frame (Qwen2-VL, Qwen2.5-VL)
#   middles  as steps, from the middle of each part (InternVL)
#   ends     from the first frame to the last, rounded to the nearest; any number of frames (Qwen3-VL)
#   clock    at every tick of `fps`, rounded up; from a video that is too long, evenly over its seconds (GLM-4.1V)
#   pace     what is shown at every tick of `fps` from the beginning on, so that motion keeps its speed, up to
#            `max_frames`; one frame and a multiple of `multiple` more; `fps` 0: every frame (generation)
Rule = Literal["even", "steps", "middles", "ends", "clock", "pace"]


_CLOSE = 1e-4  # times in files are rounded


@dataclass(frozen=True)
class VideoSampling:
    """State how many frames are taken from a video: `fps` for each second, within bounds, or just `frames`.

    It is always a multiple of `multiple`, and never more than the video has.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2
    frames: int | None = None
    rule: Rule = "even"

    def count(self, total: int, rate: float | None) -> int:
        """Return how many of `total` frames at `rate` a second are taken; without a rate: of a sampled video."""
        if self.rule == "clock" and self.frames is None and rate is not None:
            return len(self._ticks(total, rate))
        if self.rule == "pace":
            ticks = max(1, math.ceil(total / self._step(rate) - _CLOSE))  # ticks while the video lasts
            return (min(ticks, self.max_frames) - 1) // self.multiple * self.multiple + 1
        if self.frames is not None:
            taken = min(self.frames, total)
        else:
            wanted = float(total) if rate is None else total / rate * self.fps
            taken = int(min(max(wanted, self.min_frames), self.max_frames, total))
        # A video shorter than one temporal patch is padded with its last frame when patches are made.
        return max(taken // self.multiple * self.multiple, 1)

    def choose(self, total: int, rate: float | None) -> list[int]:
        """Return the numbers of the frames that are taken."""
        if self.rule == "clock" and self.frames is None and rate is not None:
            return self._ticks(total, rate)
        if self.rule == "pace":
            step = self._step(rate)
            return [int(i * step + _CLOSE) for i in range(self.count(total, rate))]
        return self.spread(self.count(total, rate), total)

    def choose_by_time(self, seconds: Sequence[float], count: int) -> list[int] | None:
        """Return the numbers of `count` frames by the times at which frames are shown, rising; None where only their
        number matters. Frames of one video may be shown for different times."""
        if self.rule != "pace" or self.fps <= 0:
            return None
        ticks = (seconds[0] + i / self.fps + _CLOSE for i in range(count))
        return [max(0, bisect_right(seconds, tick) - 1) for tick in ticks]

    def _step(self, rate: float | None) -> float:
        """Return how many frames of a video lie between two ticks."""
        return 1.0 if rate is None or self.fps <= 0 else rate / self.fps

    def spread(self, count: int, total: int) -> list[int]:
        """Return the numbers of `count` frames spread over a video; some come twice where it has fewer."""
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
    """Hold the size, the frames and the rate in the header of a video."""

    width: int  # the right way up
    height: int
    total: int  # frames
    rate: float | None  # frames per second


def checked_size(
    header: VideoHeader, name: str, limits: Limits, sampling: VideoSampling, target: Target | None
) -> MediaSize:
    """Return the size that a video counts as. Raise if a frame of it, or all that is kept of it, is beyond limits."""
    taken = sampling.count(header.total, header.rate)
    size = MediaSize(header.width, header.height, taken, total=header.total, rate=header.rate)
    if header.width * header.height > limits.max_image_pixels:
        raise TesseraError(
            f"video header claims too many pixels: {name} is {header.width}x{header.height}, "
            f"{limits.max_image_pixels} are allowed",
            fix="raise data.max_image_pixels, or make the video smaller",
            code="media.too-many-pixels",
        )
    width, height = kept_size(size, target)
    if width * height * size.frames > limits.max_video_pixels:
        raise TesseraError(
            f"too many pixels in one video: {size.frames} frames of {width}x{height} are taken from {name}",
            fix="lower max_frames, fps or video_max_pixels of data.processor",
            code="media.video-too-large",
        )
    return size


def kept_size(size: MediaSize, target: Target | None) -> tuple[int, int]:
    """Return (width, height) in which frames are kept until they are used: the smaller of their own and the target."""
    wanted = target(size) if target is not None else None
    if wanted is None or wanted[0] * wanted[1] >= size.width * size.height:
        return size.width, size.height
    return wanted


class Frames:
    """Hold the array of chosen frames, which is filled as they are decoded."""

    def __init__(self, chosen: list[int], size: MediaSize, target: Target | None, name: str) -> None:
        self.chosen = chosen
        self.filled = 0
        self._name = name
        self._size = (size.width, size.height)
        self._stored_size = kept_size(size, target)
        self._pixels = np.empty((len(chosen), self._stored_size[1], self._stored_size[0], 3), dtype=np.uint8)

    @property
    def next(self) -> int | None:
        """Return the number of the frame that is needed next; None when all are there."""
        return self.chosen[self.filled] if self.filled < len(self.chosen) else None

    def put(self, number: int, frame: Image.Image) -> None:
        """Store frame `number`, also for frames that were chosen before it and never came."""
        if frame.size not in (self._size, self._stored_size):
            raise TesseraError(
                f"damaged video: {self._name} (frames of different sizes: {frame.width}x{frame.height} "
                f"after {self._size[0]}x{self._size[1]})",
                code="media.frame-sizes-differ",
            )
        first = self.filled
        while self.filled < len(self.chosen) and self.chosen[self.filled] <= number:
            self.filled += 1
        self._pixels[first : self.filled] = np.asarray(smaller(frame, self._stored_size))

    def stacked(self) -> np.ndarray:
        """Return [F, H, W, 3]. A file may lack a frame or two at its end, which the index has counted: the last one is
        repeated. A video that lacks more than that is refused."""
        total = len(self.chosen)
        if self.filled == 0 or total - self.filled > max(1, total // 10):
            raise TesseraError(
                f"damaged video: {self._name} ({self.filled} of {total} frames could be decoded)",
                code="media.damaged-file",
            )
        self._pixels[self.filled :] = self._pixels[self.filled - 1]
        return self._pixels
