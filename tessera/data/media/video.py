"""Decode sampled frames of videos: files for PyAV, animated images, or folders of images.

Which frames are sampled follows from the header. All packets are read first, without decoding, for the time of each
frame and for the key frames. Then only the packets that a sampled frame depends on are decoded. The result is the same
as with all packets decoded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize
from tessera.data.media import animation
from tessera.data.media.containers import container, decoder, quarters
from tessera.data.media.files import Limits, Opened, Target, refused, refusing
from tessera.data.media.images import decode_image, probe_image
from tessera.data.media.video_frames import Frames, VideoHeader, VideoSampling, checked_size
from tessera.errors import TesseraError

_FRAME_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"}
_SLACK = 10  # 1 / 10 of the frames may be missing, because headers often state a few frames too many
_TURNS = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}


def probe(source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None = None) -> MediaSize:
    if animation.is_animation(source.file):
        return animation.probe(source, limits, sampling, target)
    turned = quarters(source, "video")
    with container(source, "video", limits) as held:
        header = _header(held, source.name).upright(turned)
    return checked_size(header, source.name, limits, sampling, target)


def decode(
    source: Opened, limits: Limits, sampling: VideoSampling, target: Target | None = None
) -> tuple[np.ndarray, MediaSize]:
    """Return the sampled frames [F, H, W, 3], resized to `target` if that is smaller, and the size in the header."""
    if animation.is_animation(source.file):
        return animation.decode(source, limits, sampling, target)
    turned = quarters(source, "video")
    with container(source, "video", limits) as held:
        stream_header = _header(held, source.name)
        header = stream_header.upright(turned)
        size = checked_size(header, source.name, limits, sampling, target)
        packets = _packets(held, stream_header, source.name) if stream_header.unread else None
    if packets is None:
        with container(source, "video", limits) as held:
            packets = _packets(held, stream_header, source.name)
    total = stream_header.total - sum(packets.hidden) if stream_header.counted else packets.displayed
    numbers = sampling.choose(max(1, total), header.rate)
    # The sample index stores the number of frames that `probe` returned. Return as many, even if the file has changed.
    if len(numbers) != size.frames:
        numbers = sampling.spread(size.frames, max(1, total))
    seconds = packets.seconds()
    if seconds is not None:
        numbers = sampling.choose_by_time(seconds, size.frames) or numbers
    chosen = [min(number, packets.displayed - 1) for number in numbers]
    # A decoder may pad frames: allow twice the pixels of the header, and one megapixel more.
    max_pixels = 2 * stream_header.width * stream_header.height + (1 << 20)
    for attempt in (_decoded_parts, _decoded_all):
        frames = Frames(chosen, size, target, source.name)
        with container(source, "video", limits) as held:
            stream = _stream(held, source.name)
            try:
                with refusing("damaged video", source.name):
                    for number, frame in attempt(held, stream, packets, frames, max_pixels):
                        image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                        frames.put(number, image.transpose(_TURNS[turned]) if turned else image)
                        if frames.next is None:
                            break
            except _FrameLostError:
                continue
            return frames.stacked(), size
    raise AssertionError("unreachable: decoding all packets loses no frame")


# ---------------------------------------------------------------------------------------------- headers


class _StreamHeader(NamedTuple):
    width: int  # in pixels, as stored: before the frame is rotated
    height: int
    total: int  # number of frames
    counted: bool  # whether the header states `total`; otherwise it was estimated from the duration or from packets
    rate: float | None
    seconds: float | None
    unread: bool  # whether no packet has been read from the container yet

    def upright(self, turned: int) -> VideoHeader:
        width, height = (self.height, self.width) if turned % 2 else (self.width, self.height)
        return VideoHeader(width, height, self.total, self.rate)


def _stream(held: Any, name: str) -> Any:
    from av.stream import Disposition

    for stream in held.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    what = "only an audio stream" if held.streams.audio else "no video stream"
    raise TesseraError(f"unreadable video: {name} ({what})", code="media.no-such-stream")


def _header(held: Any, name: str) -> _StreamHeader:
    stream = _stream(held, name)
    with refusing("unreadable video", name):
        context = decoder(stream)
        width, height = int(context.width), int(context.height)
        rate = float(stream.average_rate) if stream.average_rate else None
        seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else None
        if seconds is None and held.duration and held.duration > 0:
            seconds = held.duration / 1e6
        total = max(0, int(stream.frames))
        counted = total > 0
        if not counted and seconds is not None and rate:
            total = round(seconds * rate)
        unread = total > 0
        if not unread:  # the header has neither a number of frames nor a duration and a rate: count the packets
            total = sum(1 for packet in held.demux(stream) if packet.size)
    if total < 1 or width < 1 or height < 1:
        raise refused("unreadable video", name, f"{width}x{height}, {total} frames")
    return _StreamHeader(width, height, total, counted, rate, seconds, unread)


# ---------------------------------------------------------------------------------------------- packets


class _Packets(NamedTuple):
    """Hold one list entry per packet of a video stream, in decoding order."""

    times: list[int | None]  # presentation timestamps, in units of `time_base`
    keys: list[bool]  # whether the packet is a key frame, where decoding may begin
    hidden: list[bool]  # whether the packet's frame is decoded but not shown
    time_base: float | None  # seconds per unit of `times`

    @property
    def displayed(self) -> int:
        return len(self.hidden) - sum(self.hidden)

    def order(self) -> list[int] | None:
        """Return the timestamps of the shown frames in display order; None if they are not unique."""
        times = [time for time, hidden in zip(self.times, self.hidden, strict=True) if not hidden]
        distinct = sorted(time for time in times if time is not None)
        return distinct if len(distinct) == len(times) == len(set(distinct)) else None

    def seconds(self) -> list[float] | None:
        """Return the presentation time of each shown frame in seconds; None if timestamps or their unit are unknown."""
        times = self.order()
        return None if times is None or self.time_base is None else [time * self.time_base for time in times]

    def starts(self, times: list[int]) -> list[int]:
        """Return for each timestamp the index of the last key packet at or before it, where decoding has to begin."""
        keys = sorted(
            (time, number)
            for number, (time, key) in enumerate(zip(self.times, self.keys, strict=True))
            if key and time is not None
        )
        before = (bisect_right(keys, (time, len(self.keys))) - 1 for time in times)
        return [keys[index][1] if index >= 0 else 0 for index in before]


def _packets(held: Any, stream_header: _StreamHeader, name: str) -> _Packets:
    stream = _stream(held, name)
    packets = _Packets([], [], [], float(stream.time_base) if stream.time_base else None)
    end = 0.0
    with refusing("damaged video", name):
        for packet in held.demux(stream):
            if packet.size:
                packets.times.append(packet.pts)
                packets.keys.append(packet.is_keyframe)
                packets.hidden.append(packet.is_discard)
                if packet.pts is not None:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    count = len(packets.times)
    off = abs(count - stream_header.total) > max(1, stream_header.total // _SLACK)
    # An estimated number of frames is wrong at variable frame rates, so then the file must also end too early.
    cut_off = (
        count < stream_header.total
        and stream_header.seconds is not None
        and end < stream_header.seconds * (1 - 1 / _SLACK)
    )
    if packets.displayed < 1 or (off and (stream_header.counted or cut_off)):
        raise refused("damaged video", name, f"the header states {stream_header.total} frames, the file has {count}")
    return packets


# ---------------------------------------------------------------------------------------------- frames


class _FrameLostError(TesseraError):
    """Report that the decoder returned no frame with a packet's timestamp. `decode` then decodes all packets."""


def _decoded_parts(
    held: Any, stream: Any, packets: _Packets, frames: Frames, max_pixels: int
) -> Iterator[tuple[int, Any]]:
    """Yield (index, frame) of the sampled frames. Only packets that these frames depend on are decoded."""
    order = packets.order()
    if order is None:
        raise _FrameLostError("a frame does not have the timestamp of its packet", code="media.damaged-file")
    context = decoder(stream, max_pixels)
    numbers = {time: number for number, time in enumerate(order)}
    starts = dict(zip(frames.chosen, packets.starts([order[number] for number in frames.chosen]), strict=True))
    last = -1  # index of the last packet that was decoded
    for index, packet in enumerate(packet for packet in held.demux(stream) if packet.size):
        if frames.next is None:
            return
        start = starts[frames.next]
        if index < start and last < start:
            continue
        if last != index - 1:
            context.flush_buffers()
        last = index
        yield from _wanted(context.decode(packet), numbers, frames, packets.times[start])
    yield from _wanted(context.decode(None), numbers, frames, None)
    if frames.next is not None:
        raise _FrameLostError("a frame does not have the timestamp of its packet", code="media.damaged-file")


def _wanted(
    decoded: list[Any], numbers: dict[int, int], frames: Frames, start: int | None
) -> Iterator[tuple[int, Any]]:
    """Yield the decoded frames that are sampled. `start`: timestamp of the key frame at which decoding began."""
    for frame in decoded:
        number = numbers.get(frame.pts)
        if frames.next is None:
            return
        # Frames before the key frame may depend on skipped packets. They are not sampled, so damage in them is ignored.
        if start is None or frame.pts is None or frame.pts >= start:
            _check_sound(frame)
        if number == frames.next:
            yield number, frame
        elif number is not None and number > frames.next:
            raise _FrameLostError("a frame does not have the timestamp of its packet", code="media.damaged-file")


def _decoded_all(
    held: Any, stream: Any, packets: _Packets, frames: Frames, max_pixels: int
) -> Iterator[tuple[int, Any]]:
    decoder(stream, max_pixels)
    for number, frame in enumerate(held.decode(stream)):
        _check_sound(frame)
        if frames.next is not None and number >= frames.next:
            yield number, frame


def _check_sound(frame: Any) -> None:
    """Raise if the decoder marked a frame as corrupt, sampled or not: other frames are predicted from it."""
    if frame.is_corrupt:
        raise ValueError("a frame is corrupt")


# ---------------------------------------------------------------------------------------------- folders


def probe_folder(folder: Path, limits: Limits, sampling: VideoSampling, target: Target | None = None) -> MediaSize:
    return checked_size(_folder_header(_frame_files(folder), limits), folder.name, limits, sampling, target)


def decode_folder(
    folder: Path, limits: Limits, sampling: VideoSampling, target: Target | None = None
) -> tuple[np.ndarray, MediaSize]:
    files = _frame_files(folder)
    size = checked_size(_folder_header(files, limits), folder.name, limits, sampling, target)
    frames = Frames(sampling.choose(len(files), None), size, target, folder.name)
    for number in frames.chosen:
        with files[number].open("rb") as file:
            image, its_size = decode_image(Opened(file, files[number].name), limits, target)
        if (its_size.width, its_size.height) != (size.width, size.height):
            raise TesseraError(
                f"the frames in {folder.name} have different sizes: {files[number].name}",
                fix="make all frames the same size",
                code="media.frame-sizes-differ",
            )
        frames.put(number, image)
    return frames.stacked(), size


def _folder_header(files: list[Path], limits: Limits) -> VideoHeader:
    with files[0].open("rb") as file:
        size = probe_image(Opened(file, files[0].name), limits)
    return VideoHeader(size.width, size.height, len(files), None)


def _frame_files(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by the numbers in their names: 2 before 10."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in _FRAME_SUFFIXES and file.is_file()]
    inside = [file for file in files if not file.is_symlink() or file.resolve().is_relative_to(folder.resolve())]
    if not files:
        raise TesseraError(
            f"no images in the folder {folder.name}",
            fix="name a folder with one image for each frame",
            code="media.no-frames",
        )
    if len(inside) != len(files):
        raise TesseraError(
            f"a frame in {folder.name} is a link out of the folder",
            fix="copy the frame into the folder",
            code="media.outside-root",
        )
    return sorted(files, key=lambda file: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", file.name)])
