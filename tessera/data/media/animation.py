"""Animated GIF, WebP and PNG as videos. Frames and their times are counted in the file; Pillow decodes the pixels.

Pillow could count them too, but only by decoding every frame: 60 frames of 640x480 take 0.3 ms here and 340 ms there as
PNG, 0.2 and 110 ms as WebP, 130 and 170 ms as GIF, and an index reads the header of every file.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Opened, Target, refusing
from tessera.data.media.images import PNG, open_image, probe_image, rgb_of
from tessera.data.media.video_frames import Frames, VideoHeader, VideoSampling, checked_size
from tessera.errors import TesseraError

_MIN_DELAY = 0.011  # seconds: shorter frames are shown for a tenth of a second, as every browser does
_DEFAULT_DELAY = 0.1


def is_animation(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(12)
    return head.startswith((PNG, b"GIF8")) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def read_header(source: Opened, limits: Limits) -> VideoHeader:
    size = probe_image(source, limits)
    file = source.file
    file.seek(0)
    head = file.read(12)
    try:
        if head.startswith(PNG):
            delays = _png(file)
        elif head.startswith(b"GIF8"):
            delays = _gif(file)
        else:
            delays = _webp(file)
    except (struct.error, IndexError):
        raise TesseraError(
            f"damaged video: {source.name} (it ends within a frame)", code="media.damaged-file"
        ) from None
    total = max(1, len(delays))  # a still image is a video of one frame
    seconds = sum(delay if delay >= _MIN_DELAY else _DEFAULT_DELAY for delay in delays)
    return VideoHeader(size.width, size.height, total, total / seconds if seconds else None)


def decode(
    source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None
) -> tuple[np.ndarray, MediaSize]:
    header = read_header(source, limits)
    size = checked_size(header, source.name, limits, sampling, target)
    frames = Frames(sampling.choose(header.total, header.rate), size, target, source.name)
    with open_image(source) as image:
        # A PNG may have a default image for viewers without animation: its frames come after that one.
        before = 1 if getattr(image, "default_image", False) and header.total > 1 else 0
        # Fewer frames than in the header end in EOFError: `Frames.stacked` decides.
        with refusing("damaged video", source.name), suppress(EOFError):
            while (number := frames.next) is not None:
                image.seek(number + before)
                image.load()
                frames.put(number, rgb_of(image))
    return frames.stacked(), size


def _gif(file: BinaryIO) -> list[float]:
    """Return the seconds of each frame."""
    delays: list[float] = []
    delay = _DEFAULT_DELAY
    file.seek(10)
    flags = file.read(3)[0]
    file.seek(3 << (flags & 7) + 1 if flags & 128 else 0, 1)
    while kind := file.read(1):
        if kind == b"!":
            label = file.read(1)
            block = file.read(file.read(1)[0])
            if label == b"\xf9":
                (hundredths,) = struct.unpack_from("<H", block, 1)
                delay = hundredths / 100
            if block:
                _skip_blocks(file)
        elif kind == b",":
            flags = file.read(9)[8]
            file.seek((3 << (flags & 7) + 1 if flags & 128 else 0) + 1, 1)
            _skip_blocks(file)
            delays.append(delay)
            delay = _DEFAULT_DELAY
        elif kind == b";":
            break
    return delays


def _skip_blocks(file: BinaryIO) -> None:
    while length := file.read(1)[0]:
        file.seek(length, 1)


def _webp(file: BinaryIO) -> list[float]:
    delays: list[float] = []
    while len(head := file.read(8)) == 8:
        kind, length = struct.unpack("<4sI", head)
        skip = length + length % 2
        if kind == b"ANMF":
            fields = file.read(16)
            delays.append(int.from_bytes(fields[12:15], "little") / 1000)
            skip -= 16
        file.seek(skip, 1)
    return delays


def _png(file: BinaryIO) -> list[float]:
    delays: list[float] = []
    moving = False
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"fcTL":
            above, below = struct.unpack(">20xHH2x", file.read(26))
            delays.append(above / (below or 100))
            length -= 26
        moving = moving or kind == b"acTL"
        file.seek(length + 4, 1)
    return delays if moving else []
