"""Video and audio containers, opened by PyAV. FFmpeg gets one byte stream without a name and may open no other file.

Two things are read from the boxes of MP4 files here. First, the rotation of a video: PyAV returns it only with a
decoded frame, and an index decodes none. Second, the number of samples in the header: FFmpeg allocates a table for all
of them, and decompresses headers of any size. So a file whose header states too many is refused beforehand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from tessera.data.media.files import Limits, Opened, reason, refused, size_of
from tessera.errors import TesseraError
from tessera.workers.worker import memory_limit

# Allowed formats: they contain their data. Formats that open other files, such as playlists, are not allowed.
_DEMUXERS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,av1,obu,ivf,flv,asf,ogg,mxf,dv,mjpeg,yuv4mpegpipe,"
    "wav,w64,aiff,au,caf,mp3,aac,flac,ac3,eac3,amr,amrnb,amrwb,ape,wv,tta"
)
_BUFFER = 1 << 17
_PIXEL_BYTES = 64  # bytes of memory per pixel of a frame, for up to 17 frames that a decoder keeps
_SLACK_BYTES = 512 << 20
_NESTED = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}
_MAX_BOXES = 100_000
# (a, b, c, d) of the matrix in a track header -> clockwise rotation in quarter turns
_QUARTERS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 1, (-1, 0, 0, -1): 2, (0, -1, 1, 0): 3}


@contextmanager
def container(source: Opened, kind: str, limits: Limits) -> Iterator[Any]:
    """Open a file with PyAV. `kind`: "video" or "audio", for error messages."""
    try:
        import av
    except ModuleNotFoundError:
        raise TesseraError(
            f"reading {kind} files needs PyAV", fix="pip install 'tessera-mm[video]'", code="environment.no-pyav"
        ) from None
    check_boxes(source, kind)
    source.file.seek(0)
    options = {
        "format_whitelist": _DEMUXERS,
        "protocol_whitelist": "none",
        # Twice the limit of an image, because decoders pad frames. `checked_size` applies the exact limit.
        "max_pixels": str(2 * limits.max_image_pixels + (1 << 20)),
    }
    with memory_limit(_PIXEL_BYTES * limits.max_image_pixels + 4 * limits.max_video_pixels + _SLACK_BYTES):
        try:
            # FFmpeg reads through the Python file, so the time limit of a sample can interrupt it.
            opened = av.open(source.file, options=options, buffer_size=_BUFFER, **_metadata_errors(av.__version__))
        except TesseraError:
            raise
        except Exception as error:  # demuxers raise undocumented errors on damaged files
            allowed = not isinstance(error, av.error.ArgumentError)  # raised for a format that is not in _DEMUXERS
            why = reason(error) if allowed else f"not a supported {kind} format"
            raise refused(f"unreadable {kind}", source.name, why) from None
        with opened:
            yield opened


def _metadata_errors(version: str) -> dict[str, Any]:
    """Return the option of `av.open` for metadata that is not UTF-8. PyAV 19 has none, and raises no error."""
    return {} if int(version.split(".")[0]) >= 19 else {"metadata_errors": "replace"}


def decoder(stream: Any, max_pixels: int | None = None) -> Any:
    """Return the decoder of a stream, limited to one thread: the loader runs several processes."""
    context = stream.codec_context
    if context is None:
        raise TesseraError(
            "FFmpeg has no decoder for this stream",
            fix="convert the file to a common codec, such as H.264 or FLAC",
            code="media.no-decoder",
        )
    context.thread_count = 1
    if max_pixels is not None:
        context.options = {"max_pixels": str(max_pixels)}
    return context


# ---------------------------------------------------------------------------------------------- boxes of MP4


def check_boxes(source: Opened, kind: str) -> None:
    """Raise if an MP4 header is compressed, or states more samples (frames, audio packets) than the file has bytes."""
    if not _is_mp4(source.file):
        return
    size, claimed = size_of(source.file), 0
    for name, start, _ in boxes(source, kind, size):
        if name == b"cmov":
            raise TesseraError(
                f"unreadable {kind}: {source.name} (its header is compressed)", code="media.compressed-header"
            )
        if name in (b"stsz", b"stz2", b"trun"):
            source.file.seek(start + (4 if name == b"trun" else 8))
            claimed += int.from_bytes(source.file.read(4), "big")
            if claimed > size:
                raise TesseraError(
                    f"unreadable {kind}: {source.name} (its header states {claimed} samples in {size} bytes)",
                    code="media.header-claims-too-much",
                )


def quarters(source: Opened, kind: str) -> int:
    """Return the number of clockwise quarter turns by which the first video track must be rotated."""
    if not _is_mp4(source.file):
        return 0
    turned = 0
    for name, start, end in boxes(source, kind, size_of(source.file)):
        source.file.seek(start)
        if name == b"tkhd":
            data = source.file.read(min(end - start, 128))
            at = 52 if data[:1] == b"\x01" else 40
            if len(data) >= at + 20:
                a, b, c, d = (struct.unpack_from(">i", data, at + offset)[0] / 65536 for offset in (0, 4, 12, 16))
                turned = _QUARTERS.get((round(a), round(b), round(c), round(d)), 0)
        elif name == b"hdlr" and source.file.read(12)[8:] == b"vide":
            return turned
    return 0


def _is_mp4(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(8)[4:] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


def boxes(source: Opened, kind: str, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start, end) of the content of each MP4 box, in file order, including nested boxes."""
    at, count = 0, 0
    while at + 8 <= size:
        count += 1
        if count > _MAX_BOXES:
            raise TesseraError(
                f"unreadable {kind}: {source.name} (more than {_MAX_BOXES} boxes)", code="media.header-claims-too-much"
            )
        source.file.seek(at)
        head = source.file.read(16)
        if len(head) < 8:
            return
        length, name = struct.unpack_from(">I4s", head)
        start = at + 8
        if length == 1 and len(head) == 16:
            (length,) = struct.unpack_from(">Q", head, 8)
            start = at + 16
        end = at + length if length else size
        if end < start:
            return
        yield name, start, min(end, size)
        at = start if name in _NESTED else end
