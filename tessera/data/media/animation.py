"""Moving GIF, WebP and PNG as clips. Frames and their times are counted in the file; Pillow makes the pixels."""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy as np

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import MediaSize
from tessera.data.media.clips import Clip, Frames, VideoSampling, promised
from tessera.data.media.files import Opened
from tessera.data.media.headers import PNG
from tessera.data.media.images import Limits, Target, open_image, probe_image, rgb_of

_HURRY = 0.011  # seconds: shorter frames are shown for a tenth of a second, as every browser does
_USUAL = 0.1


def is_animation(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(12)
    return head.startswith((PNG, b"GIF8")) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def header(source: Opened, limits: Limits) -> Clip:
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
        raise TesseraError(f"damaged video: {source.name} (it ends within a frame)") from None
    total = max(1, len(delays))  # a still picture is a clip of one frame
    seconds = sum(delay if delay >= _HURRY else _USUAL for delay in delays)
    return Clip(size.width, size.height, total, total / seconds if seconds else None)


def decode(
    source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None
) -> tuple[np.ndarray, MediaSize]:
    clip = header(source, limits)
    size = promised(clip, source.name, limits, sampling, target)
    frames = Frames(sampling.choose(clip.total, clip.rate), size, target, source.name)
    with open_image(source) as image:
        # A PNG may show another picture where it cannot move: its frames come after that one.
        before = 1 if getattr(image, "default_image", False) and clip.total > 1 else 0
        try:
            while (number := frames.next) is not None:
                image.seek(number + before)
                image.load()
                frames.put(number, rgb_of(image))
        except EOFError:
            pass  # fewer frames than it says: `whole` decides
        except TesseraError:
            raise
        except Exception as error:  # what a decoder raises on foreign bytes is not listed anywhere
            raise TesseraError(f"damaged video: {source.name} ({first_line(error)})") from None
    return frames.whole(), size


def _gif(file: BinaryIO) -> list[float]:
    """Seconds of each frame."""
    delays: list[float] = []
    delay = _USUAL
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
            delay = _USUAL
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
