"""Open the bytes of a media part: a file below the data root, a member of an archive, a URL, or bytes in memory."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tessera.config.run_config import DataSection
from tessera.core.sample import MediaSize
from tessera.data.media.urls import UrlPolicy, fetch_image, is_url
from tessera.errors import TesseraError, first_line
from tessera.runtime.byte_ranges import byte_ranges
from tessera.runtime.files import leads_out

# (size in the header) -> (width, height) after resizing; None: not resized
Target = Callable[[MediaSize], "tuple[int, int] | None"]
_URL = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.\-]*://|data:|file:)")


@dataclass(frozen=True)
class ArchiveMember:
    """Locate a file inside an archive. The bytes are read in place; nothing is unpacked."""

    file: Path
    start: int
    size: int
    name: str  # file name in the archive


@dataclass(frozen=True)
class Limits:
    """State the limits of media. They are checked against headers, before decoding."""

    max_image_pixels: int = 64_000_000  # pixels of an image, or of one frame of a video
    max_video_pixels: int = 1_000_000_000  # pixels of all sampled frames of a video, which are in memory at once
    # Pixels of all frames of an animated GIF, WebP or PNG. All frames are decoded, also those that are not sampled.
    max_animation_pixels: int = 1_000_000_000
    urls: UrlPolicy | None = None  # rules for images by URL; None: URLs are refused
    jpeg_draft: bool = False  # decode large JPEGs at 1/2, 1/4 or 1/8 of their size: faster, but not exact


def limits_of(section: DataSection) -> Limits:
    """Return the limits that a recipe's data section sets for images and videos."""
    policy = None
    if section.urls is not None:
        urls = section.urls
        cache = "" if urls.cache is None else str(urls.cache)
        policy = UrlPolicy(tuple(urls.hosts), urls.max_bytes, urls.timeout_s, urls.private, cache)
    return Limits(max_image_pixels=section.max_image_pixels, urls=policy, jpeg_draft=section.jpeg_draft)


class Opened(NamedTuple):
    """Hold a seekable binary stream and its name in error messages."""

    file: BinaryIO
    name: str


def reason(error: BaseException) -> str:
    """Return the message of an exception as one line."""
    if isinstance(error, EOFError):
        return "the file ends before the first frame"
    if isinstance(error, MemoryError):
        return "decoding needs more memory than the size in the header allows"
    return str(getattr(error, "strerror", None) or first_line(error))


def refused(what: str, name: str, why: str) -> TesseraError:
    """Return the error about a media file. `what`: such as "damaged video" or "unreadable image"."""
    return TesseraError(
        f"{what}: {name} ({why})",
        code="media.damaged-file" if what.startswith("damaged") else "media.unreadable-file",
    )


@contextmanager
def refusing(what: str, name: str) -> Iterator[None]:
    """Convert every exception of a decoder in the block to a `TesseraError`. Decoders raise undocumented exceptions."""
    try:
        yield
    except TesseraError:
        raise
    except Exception as error:
        raise refused(what, name, reason(error)) from None


def resolve(value: Any, root: Path) -> Path:
    """Return the absolute path of a media file. It must exist, and be below `root` after links are resolved.

    A path may begin with the last folders of the root: with the root `project/data`, `./data/COCO2017/1.jpg` means
    `project/data/COCO2017/1.jpg`.
    """
    return Path(_locate(value, root)[0])


def _locate(value: Any, root: Path) -> tuple[str, os.stat_result]:
    """Return the path and the stat of a media file. Links are resolved only if the path below the root has any."""
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise TesseraError(
            f"not a path: {value!r:.80}", fix="write the path of a file as text", code="media.not-a-path"
        )
    text = str(value)
    if _URL.match(text):
        raise TesseraError(
            f"URLs of media are not allowed: {text:.80}",
            fix="download the file below the data root, or allow URLs of images: data.urls={}",
            code="media.url-not-allowed",
        )
    base = os.path.abspath(root)
    inner = text.removeprefix(base + os.sep) if text.startswith(os.sep) else text
    parts = inner.split(os.sep)
    if ".." in parts:
        raise TesseraError(
            f"a media path contains '..': {text}",
            fix="write paths relative to the data root",
            code="media.path-leads-up",
        )
    try:
        if inner.startswith(os.sep):  # an absolute path that is outside of the root, or that reaches it through a link
            return _follow_links(text, base)
        names = [part for part in parts if part and part != "."]
        try:
            return _walk(base, names)
        except (FileNotFoundError, NotADirectoryError):
            shorter = _without_root(names, base)
            if shorter is None:
                raise
            return _walk(base, shorter)
    except (FileNotFoundError, NotADirectoryError):
        raise TesseraError(f"no such file: {text:.200}", code="media.no-such-file") from None
    except UnicodeEncodeError:  # half of a surrogate pair
        raise TesseraError(
            f"not a usable path: {text!a:.80} (not valid Unicode)",
            fix="write the path of a file as text",
            code="media.not-a-path",
        ) from None
    except OSError as error:  # too long a name, a loop of links, no permission
        raise TesseraError(
            f"not a usable path: {text:.80} ({error.strerror})",
            fix="write the path of a file as text",
            code="media.not-a-path",
        ) from None


def _walk(base: str, names: Sequence[str]) -> tuple[str, os.stat_result]:
    path, stat_result = base, None if names else os.lstat(base)
    for name in names:
        path = f"{path}{os.sep}{name}" if path != os.sep else path + name
        stat_result = os.lstat(path)
        if stat.S_ISLNK(stat_result.st_mode):
            return _follow_links(os.path.join(base, *names), base)
    assert stat_result is not None
    return path, stat_result


def _without_root(names: Sequence[str], base: str) -> Sequence[str] | None:
    """Remove leading folders of a path that repeat the last folders of the root; None if no folder is repeated."""
    root = [part for part in base.split(os.sep) if part]
    for count in range(min(len(names) - 1, len(root)), 0, -1):
        if root[-count:] == list(names[:count]):
            return names[count:]
    return None


def _follow_links(text: str, base: str) -> tuple[str, os.stat_result]:
    path = os.path.realpath(text)
    if leads_out(Path(text), Path(base)):
        raise TesseraError(
            f"path outside the data root: {text}",
            fix="set `root` of the data set (in data.json: dataset_dir) to a folder that contains the file",
            code="media.outside-root",
        )
    return path, os.stat(path)


def folder_of(value: Any, root: Path) -> Path | None:
    """Return the path of a folder with video frames; None if `value` is not the path of a folder."""
    if not isinstance(value, (str, Path)):
        return None
    path, stat_result = _locate(value, root)
    return Path(path) if stat.S_ISDIR(stat_result.st_mode) else None


@contextmanager
def opened(value: Any, root: Path, kind: str, urls: UrlPolicy | None = None) -> Iterator[Opened]:
    """Open the bytes of a media part. `kind`: "image", "video" or "audio", for messages. `urls`: rules for URLs."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield Opened(io.BytesIO(value), f"{kind} given as bytes")
        return
    if isinstance(value, ArchiveMember):
        with _open(str(value.file), value.name) as file:
            yield Opened(_part_of(file, value), value.name)
        return
    if urls is not None and kind == "image" and is_url(value):
        fetched = str(fetch_image(value, urls))
        with _open(fetched, value) as file:
            yield Opened(file, f"{value:.200}")
        return
    path, stat_result = _locate(value, root)
    name = os.path.basename(path)
    if not stat.S_ISREG(stat_result.st_mode):  # opening a named pipe would block
        raise TesseraError(f"not a file: {name}", code="media.not-a-file")
    with _open(path, name) as file:
        yield Opened(file, name)


def _open(path: str, name: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise TesseraError(f"cannot be opened: {name} ({error.strerror})", code="media.cannot-open") from None


def _part_of(file: BinaryIO, member: ArchiveMember) -> BinaryIO:
    size = os.fstat(file.fileno()).st_size
    if member.start < 0 or member.size < 0 or member.start + member.size > size:
        raise TesseraError(
            f"{member.name} is beyond the end of {member.file.name}: the archive was truncated or changed",
            code="data.archive-changed",
        )
    return byte_ranges(file, [(member.start, member.size)])


def size_of(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)
