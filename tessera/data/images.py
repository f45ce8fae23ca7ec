"""Pictures from files that strangers wrote: the header is read first and decides whether a pixel is decoded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from tessera.core.errors import TesseraError

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


@dataclass(frozen=True)
class Limits:
    """What is refused from its header. Holds whatever Pillow's own global limit is set to."""

    max_image_pixels: int = 64_000_000  # of an image, or of one frame of a clip
    max_video_pixels: int = 1_000_000_000  # of all frames taken from a clip: they are in memory together


@contextmanager
def open_image(path: Path, limits: Limits) -> Iterator[Image.Image]:
    """An image whose header was read and found acceptable; no pixel is decoded yet."""
    try:
        with warnings.catch_warnings():
            # Pillow warns from a size on that is not ours; what is too large is decided below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise TesseraError(f"image header claims too many pixels: {path.name} ({error})") from None
    except (
        Exception
    ) as error:  # what a decoder raises on foreign bytes is not listed anywhere: all of it means unreadable
        raise TesseraError(f"unreadable image: {path.name} ({type(error).__name__}: {error})") from None
    with image:
        width, height = image.size
        if width * height > limits.max_image_pixels:
            raise TesseraError(
                f"image header claims too many pixels: {path.name} is {width}x{height}, "
                f"{limits.max_image_pixels} are allowed",
                fix="raise data.max_image_pixels, or make the image smaller",
            )
        if width < 1 or height < 1:
            raise TesseraError(f"unreadable image: {path.name} ({width}x{height})")
        yield image


def read_image(path: Path, limits: Limits) -> Image.Image:
    with open_image(path, limits) as image:
        turn = _TURNS.get(_turn(image))
        try:
            image.load()
            rgb = to_rgb(image)
        except Exception as error:  # see open_image
            raise TesseraError(f"damaged image: {path.name} ({error})") from None
        return rgb if turn is None else rgb.transpose(turn)


def size_of(image: Image.Image) -> tuple[int, int]:
    """(width, height) that `read_image` will give."""
    width, height = image.size
    return (height, width) if _turn(image) in (5, 6, 7, 8) else (width, height)


def _turn(image: Image.Image) -> int:
    """The orientation in the header, asked before pixels are loaded: `probe` and `decode` get the same answer."""
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF itself, and has already swapped its size
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # asking a PNG for EXIF that lies behind the pixels would decode them
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF in a sound picture: it has no orientation then
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Eight-bit RGB: transparency laid over white, deeper greys brought down to eight bits."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image if type(image) is Image.Image else image.copy()  # a copy lets go of the file
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        deep = image.mode != "I" or int(values.max(initial=0)) > 255
        values = np.clip(values >> 8 if deep else values, 0, 255)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(np.clip(np.nan_to_num(np.asarray(image)), 0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        see_through = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, see_through).convert("RGB")
    return image.convert("RGB")
