"""Images from untrusted files. Pillow reads the header; pixels are decoded only if its size is within the limits."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageChops, UnidentifiedImageError

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Opened, Target, refused, refusing, size_of
from tessera.errors import TesseraError
from tessera.runtime.byte_ranges import byte_ranges
from tessera.workers.worker import memory_limit

# Pillow's other formats are not allowed: some run programs (EPS) or are documents.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
COPY_PIXELS = 420  # limit of the longer side of a copy for a report, in pixels; smaller images keep their size
TINY = 64  # copies for a report are PNG for images up to 64 pixels per side, and JPEG for larger ones
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG = b"\x89PNG\r\n\x1a\n"
# PNG chunks with text or a colour profile, which may decompress to any size.
_TEXT_CHUNKS = (b"zTXt", b"iTXt", b"tEXt", b"iCCP")
_MAX_SEGMENTS = 100  # limit of JPEG segments before the size
_MAX_CHUNKS = 200_000  # limit of chunks in a PNG: twice as many as the largest image has in chunks of 8 KiB
_MAX_BYTES = 256 << 20  # size limit of a WebP or AVIF file, which Pillow reads into memory at once
_PIXEL_BYTES = 64  # bytes of memory per pixel for buffers of the decoder, 16-bit colours and conversions
_SLACK_BYTES = 96 << 20


def probe_image(source: Opened, limits: Limits) -> MediaSize:
    """Return the size of an image from its header, after the EXIF rotation."""
    size = _jpeg_size(source.file)
    if size is not None:
        check_pixels(*size, source.name, limits)
        return MediaSize(*size)
    with open_image(source, limits) as image:
        return _upright_size(image)


def decode_image(source: Opened, limits: Limits, target: Target | None = None) -> tuple[Image.Image, MediaSize]:
    """Return the first image in a file as RGB, rotated by EXIF, and the size in its header.

    The image is resized if `target` returns a smaller size than the header.
    """
    with open_image(source, limits) as image, refusing("damaged image", source.name):
        size, turn = _upright_size(image), _turn(image)
        wanted = target(size) if target is not None else None
        if wanted is not None and limits.jpeg_draft and image.format in ("JPEG", "MPO"):
            image.draft(None, wanted[::-1] if turn >= 5 else wanted)
        image.load()
        rgb = rgb_of(_uninverted(image))
        rgb = rgb.transpose(_TURNS[turn]) if turn in _TURNS else rgb
        return _detached(smaller(rgb, wanted)), size


def _upright_size(image: Image.Image) -> MediaSize:
    return MediaSize(*(image.size[::-1] if _turn(image) >= 5 else image.size))


def read_image(path: Path, limits: Limits) -> Image.Image:
    """Read an image file at a trusted path, in any folder."""
    try:
        with path.open("rb") as file:
            return decode_image(Opened(file, path.name), limits)[0]
    except OSError as error:
        raise TesseraError(f"cannot be opened: {path.name} ({error.strerror})", code="media.cannot-open") from None


def small_copy(image: Image.Image) -> tuple[bytes, str]:
    """Return an encoded copy of at most `COPY_PIXELS` per side, and its format: tiny images as PNG, others as JPEG."""
    tiny = max(image.size) <= TINY
    image.thumbnail((COPY_PIXELS, COPY_PIXELS), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    if tiny:
        image.save(content, "PNG")
    else:
        image.convert("RGB").save(content, "JPEG", quality=90)
    return content.getvalue(), "png" if tiny else "jpeg"


def smaller(image: Image.Image, wanted: tuple[int, int] | None) -> Image.Image:
    """Resize an image if the wanted size is smaller. Never enlarge it: the processor does that."""
    if wanted is None or wanted[0] * wanted[1] >= image.width * image.height:
        return image
    return image.resize(wanted, Image.Resampling.BICUBIC)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB: transparency on white, 16-bit grey reduced to 8 bits."""
    return _detached(rgb_of(image))


def check_pixels(width: int, height: int, name: str, limits: Limits) -> None:
    if width * height > limits.max_image_pixels:
        raise TesseraError(
            f"too many pixels in an image: {name} is {width}x{height}, the limit is {limits.max_image_pixels}",
            fix="raise data.max_image_pixels, or scale the image down",
            code="media.too-many-pixels",
        )
    if width < 1 or height < 1:
        raise refused("unreadable image", name, f"{width}x{height}")


@contextmanager
def open_image(source: Opened, limits: Limits) -> Iterator[Image.Image]:
    """Open an image with Pillow, and check the size in its header. No pixel is decoded yet.

    Inside the block the memory of a worker process is limited to the needs of an image of this size.
    """
    file_size = size_of(source.file)
    source.file.seek(0)
    head = source.file.read(30)
    size = _webp_size(head)
    if size is not None:  # a WebP: check its size here, because Pillow allocates all pixels when it opens the file
        check_pixels(*size, source.name, limits)
    with refusing("unreadable image", source.name), warnings.catch_warnings():
        # Pillow warns about sizes below our limit, and about harmless errors in EXIF.
        warnings.simplefilter("ignore")
        try:
            image = Image.open(_for_pillow(source, head, file_size), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise TesseraError(
                f"too many pixels in an image: {source.name} ({error})",
                fix="make the image smaller",
                code="media.too-many-pixels",
            ) from None
        except UnidentifiedImageError:  # leave `{error}` out of the message: it contains a memory address
            raise TesseraError(
                f"unreadable image: {source.name} (not a supported image format)",
                fix="convert the file to a common format, such as PNG or JPEG",
                code="media.unknown-format",
            ) from None
    check_pixels(*image.size, source.name, limits)
    file_bytes = 2 * min(file_size, _MAX_BYTES)
    with image, memory_limit(_PIXEL_BYTES * image.width * image.height + file_bytes + _SLACK_BYTES):
        yield image


def _for_pillow(source: Opened, head: bytes, size: int) -> BinaryIO:
    """Return the file for Pillow, without PNG chunks whose decompressed size has no limit (text, colour profile).

    Raise for a huge WebP or AVIF file, which Pillow would read into memory at once.
    """
    if head.startswith(_PNG):
        return _without_texts(source.file, size, source.name)
    if size > _MAX_BYTES and (head[4:8] == b"ftyp" or head[8:12] == b"WEBP"):
        raise TesseraError(f"unreadable image: {source.name} ({size} bytes)", code="media.file-too-large")
    return source.file


def _without_texts(file: BinaryIO, size: int, name: str) -> BinaryIO:
    spans, at = [(0, 8)], 8
    for _ in range(_MAX_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            break
        length, kind = struct.unpack(">I4s", head)
        end = min(at + 12 + length, size)
        if kind not in _TEXT_CHUNKS:
            spans.append((at, end - at))
        at = end
        if kind == b"IEND":
            break
    else:
        raise TesseraError(
            f"unreadable image: {name} (more than {_MAX_CHUNKS} chunks)", code="media.header-claims-too-much"
        )
    file.seek(0)
    return file if sum(length for _, length in spans) == at else byte_ranges(file, spans)


def _turn(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 to 8."""
    if image.format == "TIFF":
        return 1  # Pillow rotates a TIFF itself, and has already swapped width and height
    try:
        # PNG overrides `getexif` and decodes all pixels, to find EXIF data after them. So call the base class.
        turn = int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF: ignore it
        return 1
    return turn if turn in _TURNS else 1


def _uninverted(image: Image.Image) -> Image.Image:
    """Invert a CMYK JPEG that Adobe did not write: Pillow has inverted it, but only those of Adobe need that."""
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        return ImageChops.invert(image)
    return image


def _detached(image: Image.Image) -> Image.Image:
    return image if type(image) is Image.Image else image.copy()  # a copy has no reference to the file


def rgb_of(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB like `to_rgb`. An RGB image is returned itself, and can still refer to its file."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        deep = image.mode != "I" or int(values.max(initial=0)) > 255
        values = np.clip(values >> 8 if deep else values, 0, 255)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        floats = np.nan_to_num(np.asarray(image), posinf=0.0, neginf=0.0)
        scaled = floats * 255 if 0 < float(floats.max(initial=0)) <= 1 else floats  # white is 1 or 255
        return Image.fromarray(np.clip(scaled, 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        see_through = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, see_through).convert("RGB")
    return image.convert("RGB")


def _jpeg_size(file: BinaryIO) -> tuple[int, int] | None:
    """Return (width, height) of a JPEG without EXIF; None for other files, and with EXIF, which can rotate the image.

    Pillow parses all tables before the size, which took 40 % of the time to index small images.
    """
    file.seek(0)
    at = 2
    for _ in range(_MAX_SEGMENTS if file.read(2) == b"\xff\xd8" else 0):
        file.seek(at)
        segment = file.read(9)
        # Leave EXIF (0xE1: it may contain a rotation) and padding (0xFF) to Pillow.
        if len(segment) < 9 or segment[0] != 0xFF or segment[1] in (0xE1, 0xFF):
            break
        if 0xC0 <= segment[1] <= 0xC2:  # baseline, extended or progressive; then precision, height, width
            height, width = struct.unpack_from(">HH", segment, 5)
            return (width, height) if segment[4] == 8 and width and height else None
        at += 2 + int.from_bytes(segment[2:4], "big")
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """Return (width, height) in the first 30 bytes of a WebP; None for other formats and damaged headers."""
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return None
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF
