"""Media parts of samples: what their headers tell, and their pixels or sound.

`probe` and `decode` agree on the size: the cost of a sample is known from headers alone. Everyone who reads the media
of a sample, be it for training, evaluation or serving, does it by `read_media`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import MediaSize, Part, PartKind, Sample
from tessera.data.media import audio, video
from tessera.data.media.audio import AudioSampling
from tessera.data.media.clips import VideoSampling
from tessera.data.media.files import folder_of, opened, resolve
from tessera.data.media.images import Limits, Target, check_pixels, decode_image, probe_image, smaller, to_rgb
from tessera.data.processor import ChatProcessor

__all__ = ["decode", "probe", "read_media", "resolve"]

KindTarget = Callable[[PartKind, MediaSize], "tuple[int, int] | None"]  # as `ChatProcessor.target`


def probe(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
    sound: AudioSampling | None = None,
) -> MediaSize:
    """Size of a media part from headers alone; `frames` and `samples` are how many `decode` will give.

    A clip is refused for what is kept of it when `target` tells how much that is; without it, when it is decoded.
    """
    given = _given(part, limits)
    if given is not None:
        return given
    wanted = _no_pixels if target is None else partial(target, part.kind)
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.probe_folder(folder, limits, sampling, wanted)
    with opened(part.value, root, part.kind) as source:
        if part.kind == "image":
            return probe_image(source, limits)
        if part.kind == "audio":
            return audio.probe(source, limits, sound or AudioSampling())
        return video.probe(source, limits, sampling, wanted)


def decode(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
    sound: AudioSampling | None = None,
) -> Any:
    """A media part: an RGB image the right way up, uint8 frames [F, H, W, 3], or float32 sound [samples].

    What `target` wants smaller than it is comes in that size.
    """
    return _decode(part, root, limits, sampling, target, sound)[0]


def read_media(
    sample: Sample, root: Path, limits: Limits, processor: ChatProcessor
) -> tuple[list[Any], list[MediaSize]]:
    """All media of a sample, decoded for a processor, and the sizes their headers told."""
    read = [
        _decode(part, root, limits, processor.sampling, processor.target, AudioSampling()) for part in sample.media()
    ]
    return [media for media, _ in read], [size for _, size in read]


def _decode(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None,
    sound: AudioSampling | None,
) -> tuple[Any, MediaSize]:
    wanted: Target | None = None if target is None else partial(target, part.kind)
    given = _given(part, limits)
    if given is not None:
        return _shrunk(part.value, given, wanted), given
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.decode_folder(folder, limits, sampling, wanted)
    with opened(part.value, root, part.kind) as source:
        if part.kind == "image":
            return decode_image(source, limits, wanted)
        if part.kind == "audio":
            return audio.decode(source, limits, sound or AudioSampling())
        return video.decode(source, limits, sampling, wanted)


def _no_pixels(size: MediaSize) -> tuple[int, int]:
    """Stands for a target that is not known: what is kept of a clip is then not judged."""
    return 0, 0


def _given(part: Part, limits: Limits) -> MediaSize | None:
    """The size of what is decoded already; None for what has to be read."""
    value = part.value
    if part.kind == "image" and isinstance(value, Image.Image):
        check_pixels(value.width, value.height, "image", limits)
        return MediaSize(*value.size)
    if part.kind == "video" and isinstance(value, np.ndarray):
        if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8 or 0 in value.shape:
            raise TesseraError(f"frames are uint8 [frames, height, width, 3], these are {value.dtype} {value.shape}")
        return MediaSize(value.shape[2], value.shape[1], value.shape[0])
    if part.kind == "audio" and isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype != np.float32 or not len(value):
            raise TesseraError(f"sound is float32 [samples], this is {value.dtype} {value.shape}")
        return MediaSize(0, 0, 0, samples=len(value))
    return None


def _shrunk(value: Any, size: MediaSize, target: Target | None) -> Any:
    if not isinstance(value, Image.Image):
        return value
    try:
        return smaller(to_rgb(value), None if target is None else target(size))
    except TesseraError:
        raise
    except Exception as error:  # an image that was opened elsewhere and is read only now
        raise TesseraError(f"damaged image ({first_line(error)})") from None
