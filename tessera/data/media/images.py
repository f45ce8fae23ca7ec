"""Images from untrusted files: the header is read first and decides whether a pixel is decoded.

The headers of the most common formats are read straight from the bytes, because an index reads a million of them. For
an image of 640x480 on one core this takes 22 us (JPEG), 15 us (PNG) and 25 us (WebP), where Pillow's lazy open and its
EXIF reader take 106 us, 7,600 us and 480 us. Decoding takes size and orientation from here too, so that both agree.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageChops, UnidentifiedImageError

from tessera.core.sample import MediaSize
from tessera.data.media.files import Limits, Opened, Target, byte_ranges, refusing, size_of
from tessera.data.workers.worker import memory_limit
from tessera.errors import TesseraError

# Formats that are only pixels. Others that Pillow knows run programs (EPS) or hold documents.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Chunks of a PNG without pixels, which may unpack to any size.
_TEXT_CHUNKS = (b"zTXt", b"iTXt", b"tEXt", b"iCCP")
_MAX_CHUNKS = 200_000  # of a PNG; an image of the largest size in chunks of 8 KiB has half as many
_MAX_BYTES = 256 << 20  # of a file that is read as a whole
_PIXEL_BYTES = 64  # of memory for each pixel: the decoder's buffers, deep colours, conversions
_SLACK_BYTES = 96 << 20


def probe_image(source: Opened, limits: Limits) -> MediaSize:
    return MediaSize(*_header(source, limits).upright)


def decode_image(source: Opened, limits: Limits, target: Target | None = None) -> tuple[Image.Image, MediaSize]:
    """Return the first image in a file, RGB and upright, and the size in its header.

    An image that `target` wants smaller is returned in that size.
    """
    header = _header(source, limits)
    size = MediaSize(*header.upright)
    wanted = target(size) if target is not None else None
    with open_image(source) as image:
        if image.size != (header.width, header.height):
            raise TesseraError(
                f"damaged image: {source.name} (its header says {header.width}x{header.height}, "
                f"the image is {image.width}x{image.height})",
                code="media.damaged-file",
            )
        with refusing("damaged image", source.name):
            if wanted is not None and limits.jpeg_draft and image.format in ("JPEG", "MPO"):
                image.draft(None, wanted[::-1] if header.turn >= 5 else wanted)
            image.load()
            rgb = rgb_of(_uninverted(image))
            turn = _TURNS.get(header.turn)
            rgb = rgb if turn is None else rgb.transpose(turn)
            return _detached(smaller(rgb, wanted)), size


def read_image(path: Path, limits: Limits) -> Image.Image:
    """Return the image in a file that the caller names, in any folder."""
    try:
        with path.open("rb") as file:
            return decode_image(Opened(file, path.name), limits)[0]
    except OSError as error:
        raise TesseraError(f"cannot be opened: {path.name} ({error.strerror})", code="media.cannot-open") from None


def smaller(image: Image.Image, wanted: tuple[int, int] | None) -> Image.Image:
    """Return the image in the wanted size if that is smaller; enlarging is left to the processor."""
    if wanted is None or wanted[0] * wanted[1] >= image.width * image.height:
        return image
    return image.resize(wanted, Image.Resampling.BICUBIC)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return eight-bit RGB: transparency over white, deeper greys reduced to eight bits."""
    return _detached(rgb_of(image))


def check_pixels(width: int, height: int, name: str, limits: Limits) -> None:
    if width * height > limits.max_image_pixels:
        raise TesseraError(
            f"image header claims too many pixels: {name} is {width}x{height}, {limits.max_image_pixels} are allowed",
            fix="raise data.max_image_pixels, or make the image smaller",
            code="media.too-many-pixels",
        )
    if width < 1 or height < 1:
        raise TesseraError(f"unreadable image: {name} ({width}x{height})", code="media.unreadable-file")


def _header(source: Opened, limits: Limits) -> Header:
    header = read_header(source.file)
    if header is not None:
        check_pixels(header.width, header.height, source.name, limits)
        return header
    with open_image(source) as image:
        check_pixels(*image.size, source.name, limits)
        return Header(*image.size, _turn(image))


@contextmanager
def open_image(source: Opened) -> Iterator[Image.Image]:
    """Open an image with Pillow; no pixel is decoded yet.

    Inside the block, a worker process may allocate what an image of the size in the header needs.
    """
    file_bytes = 2 * min(size_of(source.file), _MAX_BYTES)  # asked before: Pillow goes on where it stopped to read
    with refusing("unreadable image", source.name), warnings.catch_warnings():
        # Pillow warns of sizes below our limit, and of oddities in EXIF that have no effect.
        warnings.simplefilter("ignore")
        try:
            image = Image.open(_for_pillow(source), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise TesseraError(
                f"image header claims too many pixels: {source.name} ({error})", code="media.too-many-pixels"
            ) from None
        except UnidentifiedImageError:  # its text names an object in memory
            raise TesseraError(
                f"unreadable image: {source.name} (not an image in a known format)", code="media.unknown-format"
            ) from None
    with image, memory_limit(_PIXEL_BYTES * image.width * image.height + file_bytes + _SLACK_BYTES):
        yield image


def _for_pillow(source: Opened) -> BinaryIO:
    """Return what Pillow may read: a PNG without its texts and colour profile, which may unpack to any size; and no
    endless file of a format that is read as a whole."""
    file, size = source.file, size_of(source.file)
    file.seek(0)
    head = file.read(12)
    if head.startswith(PNG):
        return _without_texts(file, size, source.name)
    if size > _MAX_BYTES and (head[4:8] == b"ftyp" or head[8:] == b"WEBP"):
        raise TesseraError(f"unreadable image: {source.name} ({size} bytes)", code="media.file-too-large")
    return file


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
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF itself, and has already swapped its size
    try:
        turn = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF in a sound image: it has no orientation then
        return 1
    return turn if turn in _TURNS else 1


def _uninverted(image: Image.Image) -> Image.Image:
    """Invert CMYK JPEGs that are not Adobe's: Pillow takes all of them for inverted, as Adobe writes them."""
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        return ImageChops.invert(image)
    return image


def _detached(image: Image.Image) -> Image.Image:
    return image if type(image) is Image.Image else image.copy()  # a copy lets go of the file


def rgb_of(image: Image.Image) -> Image.Image:
    """Return `to_rgb(image)`, or the image itself, which still holds its file."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        deep = image.mode != "I" or int(values.max(initial=0)) > 255
        values = np.clip(values >> 8 if deep else values, 0, 255)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        floats = np.nan_to_num(np.asarray(image), posinf=0.0, neginf=0.0)
        scaled = floats * 255 if 0 < float(floats.max(initial=0)) <= 1 else floats  # both ranges are in use
        return Image.fromarray(np.clip(scaled, 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        see_through = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, see_through).convert("RGB")
    return image.convert("RGB")


# ---------------------------------------------------------------------------------------------- headers


PNG = b"\x89PNG\r\n\x1a\n"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_TURN = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_MANY = 512  # segments or chunks before the pixels; a usual file has a dozen
_TEXT = 1 << 20  # of EXIF or XMP that is read


class Header(NamedTuple):
    """Hold the size of the stored pixels, and the EXIF orientation (1 to 8) in which they are shown."""

    width: int
    height: int
    turn: int = 1

    @property
    def upright(self) -> tuple[int, int]:
        """Return (width, height) the right way up."""
        return (self.height, self.width) if self.turn >= 5 else (self.width, self.height)


def read_header(file: BinaryIO) -> Header | None:
    """Return the header of a JPEG, PNG or WebP; None for other formats and headers that cannot be followed."""
    file.seek(0)
    head = file.read(12)
    try:
        if head[:3] == b"\xff\xd8\xff":
            file.seek(2)
            return _jpeg(file)
        if head.startswith(PNG):
            file.seek(8)
            return _png(file)
        if head[:4] == b"RIFF" and head[8:] == b"WEBP":
            return _webp(file)
    except (struct.error, IndexError):  # ends within its header
        pass
    return None


def turn_in_exif(exif: bytes) -> int | None:
    """Return the orientation in the first directory of an EXIF record; None when there is none that can be read."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", exif, entry)
            if tag == 0x0112 and kind in (1, 3, 4):
                (value,) = struct.unpack_from(order + {1: "B", 3: "H", 4: "I"}[kind], exif, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return None


def _turn_of(exif: bytes, xmp: bytes) -> int:
    turn = turn_in_exif(exif) if exif else None
    if turn is None and xmp:
        match = _XMP_TURN.search(xmp)
        turn = None if match is None else int(match[1])
    return turn or 1


def _jpeg(file: BinaryIO) -> Header | None:
    exif = xmp = b""
    for _ in range(_MANY):
        mark = file.read(4)
        while mark[:2] == b"\xff\xff":  # any number of 0xff may stand before a marker
            mark = mark[1:] + file.read(1)
        marker, kind, length = struct.unpack(">BBH", mark)
        if marker != 0xFF or length < 2:
            return None
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            _, height, width = struct.unpack(">BHH", file.read(5))
            return Header(width, height, _turn_of(exif, xmp))
        if kind == 0xE1:
            data = file.read(length - 2)
            if data.startswith(b"Exif\0\0") and not exif:
                exif = data
            elif data.startswith(_XMP) and not xmp:
                xmp = data
        elif 0xD0 <= kind <= 0xDA or kind in (0x00, 0x01):  # pixels begin, or something that has no length
            return None
        else:
            file.seek(length - 2, 1)
    return None


def _png(file: BinaryIO) -> Header | None:
    """Read the header. Only EXIF before the pixels counts: what follows them is not known without reading them all."""
    length, kind, width, height = struct.unpack(">I4sII", file.read(16))
    if length != 13 or kind != b"IHDR":
        return None
    file.seek(9, 1)
    for _ in range(_MANY):
        length, kind = struct.unpack(">I4s", file.read(8))
        if kind == b"eXIf":
            return Header(width, height, _turn_of(file.read(min(length, _TEXT)), b""))
        if kind == b"IDAT":
            return Header(width, height)
        file.seek(length + 4, 1)
    return None


def _webp(file: BinaryIO) -> Header | None:
    kind, length = struct.unpack("<4sI", file.read(8))
    if kind == b"VP8 ":
        start, width, height = struct.unpack("<3x3sHH", file.read(10))
        return Header(width & 0x3FFF, height & 0x3FFF) if start == b"\x9d\x01\x2a" else None
    if kind == b"VP8L":
        mark, bits = struct.unpack("<BI", file.read(5))
        return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if mark == 0x2F else None
    if kind != b"VP8X":
        return None
    fields = file.read(10)
    width, height = (int.from_bytes(fields[at : at + 3], "little") + 1 for at in (4, 7))
    exif = xmp = b""
    if fields[0] & 0x0C and len(fields) == 10:  # flags of EXIF and XMP
        file.seek(12 + 8 + length + length % 2)
        while len(head := file.read(8)) == 8:
            kind, length = struct.unpack("<4sI", head)
            if kind == b"EXIF":
                exif = file.read(min(length, _TEXT))
                break
            if kind == b"XMP ":
                xmp = file.read(min(length, _TEXT))
                file.seek(length + length % 2 - len(xmp), 1)
            else:
                file.seek(length + length % 2, 1)
    return Header(width, height, _turn_of(exif, xmp))
