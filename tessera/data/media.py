"""Media parts of samples: where their files may lie, what their headers tell, and their pixels.

`probe` and `decode` agree on the size: the cost of a sample is known from headers alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, Part
from tessera.data import video
from tessera.data.images import Limits, open_image, read_image, size_of, to_rgb
from tessera.data.video import VideoSampling

_URL = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.\-]*://|data:|file:)")


def resolve(value: Any, root: Path) -> Path:
    """The file a data set means by a path. It must lie under `root` after links are followed."""
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise TesseraError(f"not a path: {value!r:.80}")
    text = str(value)
    if _URL.match(text):
        raise TesseraError(
            f"media is read from files, not from URLs: {text:.80}", fix="download it below the data root"
        )
    if ".." in Path(text).parts:
        raise TesseraError(f"path with '..': {text}", fix="write paths relative to the data root")
    base = root.resolve()
    try:
        path = (base / text).resolve()
        outside, exists = not path.is_relative_to(base), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a circle of links
        raise TesseraError(f"not a usable path: {text:.80} ({error})") from None
    if outside:
        raise TesseraError(
            f"path outside the data root: {text}", fix="set `root` of the data source to a folder above it"
        )
    if not exists:
        raise TesseraError(f"no such file: {text}")
    return path


def probe(part: Part, root: Path, limits: Limits, sampling: VideoSampling) -> MediaSize:
    """Size of a media part from headers alone; `frames` is how many `decode` will give."""
    if part.kind == "image":
        if isinstance(part.value, Image.Image):
            return MediaSize(*part.value.size)
        with open_image(_file(resolve(part.value, root)), limits) as image:
            return MediaSize(*size_of(image))
    if isinstance(part.value, np.ndarray):
        frames, height, width, _ = part.value.shape
        return MediaSize(width, height, frames)
    return video.probe(resolve(part.value, root), limits, sampling)


def decode(part: Part, root: Path, limits: Limits, sampling: VideoSampling) -> Any:
    """Pixels of a media part: an RGB image the right way up, or uint8 frames [F, H, W, 3]."""
    if part.kind == "image":
        if isinstance(part.value, Image.Image):
            return to_rgb(part.value)
        return read_image(_file(resolve(part.value, root)), limits)
    if isinstance(part.value, np.ndarray):
        return part.value
    return video.decode(resolve(part.value, root), limits, sampling)


def _file(path: Path) -> Path:
    if not path.is_file():
        raise TesseraError(f"not a file: {path.name}")
    return path
