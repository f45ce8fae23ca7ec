"""Files that PyAV reads. FFmpeg sees one stream of bytes without a name, and may open nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.core.errors import TesseraError, first_line
from tessera.data.media.boxes import check_boxes
from tessera.data.media.files import Opened
from tessera.data.media.images import Limits

# Containers that hold their own data. Playlists, concatenations and patterns of file names are not among them.
_DEMUXERS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,av1,obu,ivf,flv,asf,ogg,mxf,dv,mjpeg,yuv4mpegpipe,"
    "wav,w64,aiff,au,caf,mp3,aac,flac,ac3,eac3,amr,amrnb,amrwb,ape,wv,tta"
)
_BUFFER = 1 << 17


@contextmanager
def container(source: Opened, kind: str, limits: Limits) -> Iterator[Any]:
    """An open PyAV container. `kind` is what errors call the file."""
    try:
        import av
    except ModuleNotFoundError:
        raise TesseraError(f"reading {kind} files needs PyAV", fix="pip install 'tessera-mm[video]'") from None
    check_boxes(source, kind)
    source.file.seek(0)
    options = {
        "format_whitelist": _DEMUXERS,
        "protocol_whitelist": "none",
        # Decoders add edges; whoever reads the header then refuses what is really too large, in words.
        "max_pixels": str(2 * limits.max_image_pixels + (1 << 20)),
    }
    try:
        # FFmpeg asks the Python file for bytes: the clock of a sample is looked at each time.
        held = av.open(source.file, options=options, metadata_errors="replace", buffer_size=_BUFFER)
    except TesseraError:
        raise
    except Exception as error:  # what a demuxer raises on foreign bytes is not listed anywhere
        known = not isinstance(error, av.error.ArgumentError)  # what FFmpeg says of a container that is not on the list
        why = reason(error) if known else f"not a {kind} file of a known kind"
        raise TesseraError(f"unreadable {kind}: {source.name} ({why})") from None
    with held:
        yield held


def decoder(stream: Any, max_pixels: int | None = None) -> Any:
    """The decoder of a stream, with one thread: a loader has processes enough."""
    context = stream.codec_context
    if context is None:
        raise TesseraError("no decoder for it")
    context.thread_count = 1
    if max_pixels is not None:
        context.options = {"max_pixels": str(max_pixels)}
    return context


def reason(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "it ends before anything in it"
    return str(getattr(error, "strerror", None) or first_line(error))
