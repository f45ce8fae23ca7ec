"""Clips: files that PyAV reads, or a folder of pictures. Frames are chosen from what the header tells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize
from tessera.data.images import Limits, open_image, read_image, size_of

_PICTURES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"}


@dataclass(frozen=True)
class VideoSampling:
    """How many frames are taken from a clip: `fps` for each second, within bounds, a multiple of `multiple`."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2

    def count(self, total: int, rate: float | None) -> int:
        """Frames to take of `total` at `rate` per second; without a rate the clip is taken as already sampled."""
        most = min(self.max_frames, total)
        wanted = float(total) if rate is None else total / rate * self.fps
        taken = int(min(max(wanted, self.min_frames), most))
        # A clip shorter than one temporal patch is filled up by repeating its last frame, by whoever makes patches.
        return max(taken // self.multiple * self.multiple, 1)

    def choose(self, total: int, rate: float | None) -> list[int]:
        count = self.count(total, rate)
        return [i * total // count for i in range(count)]


class _Clip(NamedTuple):
    width: int
    height: int
    total: int  # frames, as far as the header knows
    rate: float | None  # frames per second


def probe(path: Path, limits: Limits, sampling: VideoSampling) -> MediaSize:
    if path.is_dir():
        clip = _folder_header(path, limits)
    else:
        with _container(path) as container:
            clip = _header(container, path)
    return _allowed(clip, path, limits, sampling)


def decode(path: Path, limits: Limits, sampling: VideoSampling) -> np.ndarray:
    """The chosen frames [F, H, W, 3]; F is what `probe` said, also when the file ends before its header says."""
    if path.is_dir():
        return _decode_folder(path, limits, sampling)
    with _container(path) as container:
        clip = _header(container, path)
        size = _allowed(clip, path, limits, sampling)
        chosen = sampling.choose(clip.total, clip.rate)
        frames = np.empty((size.frames, size.height, size.width, 3), dtype=np.uint8)
        filled = 0
        for number, frame in enumerate(_decoded(container, path)):
            while filled < len(chosen) and chosen[filled] <= number:
                pixels = frame.to_ndarray(format="rgb24")
                if pixels.shape != frames.shape[1:]:
                    raise TesseraError(f"damaged video: {path.name} (frames of different sizes)")
                frames[filled] = pixels
                filled += 1
            if filled == len(chosen):
                break
        # A header is often wrong by a frame or two, and the number of frames was promised: the last one is repeated.
        # A clip that lacks more than that is damaged, and is not made up.
        if filled == 0 or len(chosen) - filled > max(1, len(chosen) // 10):
            raise TesseraError(f"damaged video: {path.name} ({filled} of {len(chosen)} frames could be decoded)")
        frames[filled:] = frames[filled - 1]
        return frames


def _allowed(clip: _Clip, path: Path, limits: Limits, sampling: VideoSampling) -> MediaSize:
    frames = sampling.count(clip.total, clip.rate)
    pixels = clip.width * clip.height
    if pixels > limits.max_image_pixels or pixels * frames > limits.max_video_pixels:
        raise TesseraError(
            f"video header claims too many pixels: {path.name} is {clip.width}x{clip.height}, {frames} frames taken",
            fix="lower max_frames or fps of data.processor, or make the clip smaller",
        )
    return MediaSize(clip.width, clip.height, frames)


@contextmanager
def _container(path: Path) -> Iterator[Any]:
    try:
        import av
    except ModuleNotFoundError:
        raise TesseraError("reading video files needs PyAV", fix="pip install 'tessera-mm[video]'") from None
    try:
        # Only this file: playlists and concatenations would let it name others.
        options = {"protocol_whitelist": "file"}
        container = av.open(str(path), options=options)
    except (av.error.FFmpegError, OSError) as error:
        raise TesseraError(f"unreadable video: {path.name} ({error.strerror or error})") from None
    with container:
        if not container.streams.video or container.format.name in ("hls", "concat"):
            raise TesseraError(f"unreadable video: {path.name} (no picture in it)")
        yield container


def _header(container: Any, path: Path) -> _Clip:
    import av

    stream = container.streams.video[0]
    rate = float(stream.average_rate) if stream.average_rate else None
    total = int(stream.frames)
    if total <= 0 and stream.duration and stream.time_base and rate:
        total = round(float(stream.duration * stream.time_base) * rate)
    if total <= 0:
        # Some containers tell neither: count packets, which are read but not decoded.
        try:
            total = sum(1 for packet in container.demux(stream) if packet.size)
            container.seek(0)
        except (av.error.FFmpegError, OSError) as error:
            raise TesseraError(f"unreadable video: {path.name} ({error})") from None
    width, height = int(stream.codec_context.width), int(stream.codec_context.height)
    if total < 1 or width < 1 or height < 1:
        raise TesseraError(f"unreadable video: {path.name} ({width}x{height}, {total} frames)")
    return _Clip(width, height, total, rate)


def _decoded(container: Any, path: Path) -> Iterator[Any]:
    import av

    try:
        yield from container.decode(container.streams.video[0])
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise TesseraError(f"damaged video: {path.name} ({error})") from None


def _pictures(folder: Path) -> list[Path]:
    """Frames in the order a person would count them: 2 before 10."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in _PICTURES and file.is_file()]
    inside = [file for file in files if file.resolve().is_relative_to(folder)]
    if not files:
        raise TesseraError(f"no pictures in the folder {folder.name}")
    if len(inside) != len(files):
        raise TesseraError(f"a frame in {folder.name} is a link to somewhere else")
    return sorted(files, key=lambda file: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", file.name)])


def _folder_header(folder: Path, limits: Limits) -> _Clip:
    files = _pictures(folder)
    with open_image(files[0], limits) as first:
        return _Clip(*size_of(first), len(files), None)


def _decode_folder(folder: Path, limits: Limits, sampling: VideoSampling) -> np.ndarray:
    files = _pictures(folder)
    size = _allowed(_folder_header(folder, limits), folder, limits, sampling)
    frames = np.empty((size.frames, size.height, size.width, 3), dtype=np.uint8)
    for at, number in enumerate(sampling.choose(len(files), None)):
        image = read_image(files[number], limits)
        if image.size != (size.width, size.height):
            raise TesseraError(f"frames of different sizes in {folder.name}: {files[number].name}")
        frames[at] = np.asarray(image)
    return frames
