"""Animated GIF, WebP and PNG as videos, decoded by Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Opened, Target, refusing, size_of
from tessera.data.media.images import open_image, rgb_of
from tessera.data.media.video_frames import Frames, VideoHeader, VideoSampling, checked_size
from tessera.errors import TesseraError

_MIN_DELAY = 0.011  # seconds: a frame with a shorter duration is shown for 0.1 s, as in every browser
_DEFAULT_DELAY = 0.1


@contextmanager
def _opened(source: Opened, limits: Limits) -> Iterator[Image.Image]:
    """Open an animation. Raise if a GIF is truncated: Pillow would read the frames before the cut without an error."""
    source.file.seek(max(0, size_of(source.file) - 16))
    end = source.file.read(16).rstrip(b"\0\r\n")
    source.file.seek(0)
    is_gif = source.file.read(4) == b"GIF8"
    with open_image(source, limits) as image, refusing("damaged video", source.name):
        if is_gif and not end.endswith(b";"):
            raise ValueError("the file is truncated")
        yield image


def is_animation(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(12)
    return head.startswith((b"\x89PNG", b"GIF8")) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def probe(source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None) -> MediaSize:
    with _opened(source, limits) as image:
        return checked_size(_header(image, source.name, limits), source.name, limits, sampling, target)


def decode(
    source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None
) -> tuple[np.ndarray, MediaSize]:
    with _opened(source, limits) as image:
        header = _header(image, source.name, limits)
        size = checked_size(header, source.name, limits, sampling, target)
        frames = Frames(sampling.choose(header.total, header.rate), size, target, source.name)
        with suppress(EOFError):  # fewer frames than the header states: `Frames.stacked` repeats the last or raises
            while (number := frames.next) is not None:
                image.seek(number + _still_images(image))
                image.load()
                frames.put(number, rgb_of(image))
        return frames.stacked(), size


def _header(image: Image.Image, name: str, limits: Limits) -> VideoHeader:
    """Return size, number of frames and frame rate of an animation. The frame rate follows from the frame durations."""
    before = _still_images(image)
    total = max(1, getattr(image, "n_frames", 1) - before)  # a still image is a video of one frame
    if total > 1 and total * image.width * image.height > limits.max_animation_pixels:
        raise TesseraError(
            f"too many pixels in an animation: {name} has {total} frames of {image.width}x{image.height}, "
            f"the limit is {limits.max_animation_pixels} in all frames",
            fix="scale the animation down, shorten it, or convert it to MP4",
            code="media.video-too-large",
        )
    seconds = 0.0
    for number in range(total if total > 1 else 0):
        image.seek(number + before)
        image.load()  # Pillow knows the duration of a WebP frame only after loading it
        delay = float(image.info.get("duration", 0)) / 1000
        seconds += delay if delay >= _MIN_DELAY else _DEFAULT_DELAY
    return VideoHeader(*image.size, total, total / seconds if seconds else None)


def _still_images(image: Image.Image) -> int:
    """Return the number of images that are no frames: 1 for an animated PNG with a default image, else 0."""
    return 1 if getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1 else 0
