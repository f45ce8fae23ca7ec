"""Media parts of samples: their sizes from headers, and their decoded content.

`probe` and `decode` agree on the size: the cost of a sample is known from headers alone. Everyone who reads the media
of a sample, be it for training, evaluation or serving, does it by `read_media`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize, Part, PartKind, Sample, StoredTensors
from tessera.core.spec import LanguageProcessor, Processor
from tessera.data.media import audio, video
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits, Target, folder_of, opened, refusing
from tessera.data.media.images import check_pixels, decode_image, probe_image, smaller, to_rgb
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError

KindTarget = Callable[[PartKind, MediaSize], "tuple[int, int] | None"]  # as `ChatProcessor.target`


@dataclass(frozen=True)
class MediaSampling(VideoSampling):
    """State how videos and audio are sampled, for families that read both."""

    audio: AudioSampling = field(kw_only=True)


@runtime_checkable
class MediaProcessor(Processor, Protocol):
    """Declare what an index of samples with media needs of a family's processor beyond `Processor`."""

    @property
    def fingerprint(self) -> str:
        """Return a hash that changes whenever `measure` could give another answer."""
        ...

    @property
    def sampling(self) -> VideoSampling:
        """Return how videos are sampled; `MediaSampling` of families that also read audio."""
        ...

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Return (width, height) that an image, or each video frame, of this size is resized to; None: not resized.

        Decoders use it to decode no more than is used.
        """
        ...


@runtime_checkable
class ChatProcessor(LanguageProcessor, MediaProcessor, Protocol):
    """Declare what conversations need of a family's processor."""

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        """Return the same processor with other roles to train on; `last_only`: on the last turn of those roles."""
        ...

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with special words, for people who want to see what a model sees."""
        ...


@runtime_checkable
class KeepsMediaWhole(Protocol):
    """Mark a processor that resizes some media of a sample by itself, from their full size."""

    def whole_media(self, sample: Sample) -> Sequence[int]:
        """Return the numbers of the media of a sample that are decoded in their own size, not in that of `target`."""
        ...


@runtime_checkable
class PadsSamples(Protocol):
    """Mark a processor whose batches have rows [rows, tokens] that are as long as the longest, not of constant length.

    Its models keep samples that share a row apart, or do not.
    """

    @property
    def packs(self) -> bool:
        """Return whether several samples may share a row."""
        ...


def probe(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
) -> MediaSize:
    """Return the size of a media part from headers alone; `frames` and `samples` are how many `decode` will return.

    A video whose resized frames are too large is refused here if `target` is given, otherwise when it is decoded.
    """
    decoded = _decoded_size(part, limits)
    if decoded is not None:
        return decoded
    # Without a target, (0, 0): then the limit on the resized frames of a video does not apply.
    wanted: Target = (lambda size: (0, 0)) if target is None else partial(target, part.kind)
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.probe_folder(folder, limits, sampling, wanted)
    with opened(part.value, root, part.kind, limits.urls) as source:
        if part.kind == "image":
            return probe_image(source, limits)
        if part.kind == "audio":
            return audio.probe(source, limits, _audio_of(sampling))
        return video.probe(source, limits, sampling, wanted)


def decode(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
) -> Any:
    """Return a decoded media part: an upright RGB image, uint8 frames [F, H, W, 3], float32 audio [samples], or tensors
    by name.

    What `target` wants smaller than it is comes in that size.
    """
    return _decode(part, root, limits, sampling, target)[0]


def read_media(
    sample: Sample, root: Path, limits: Limits, processor: MediaProcessor
) -> tuple[list[Any], list[MediaSize]]:
    """Return all media of a sample, decoded for a processor, and the sizes in their headers."""
    whole = processor.whole_media(sample) if isinstance(processor, KeepsMediaWhole) else ()
    read = [
        _decode(part, root, limits, processor.sampling, None if number in whole else processor.target)
        for number, part in enumerate(sample.media())
    ]
    return [media for media, _ in read], [size for _, size in read]


def _decode(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None,
) -> tuple[Any, MediaSize]:
    wanted: Target | None = None if target is None else partial(target, part.kind)
    decoded = _decoded_size(part, limits)
    if isinstance(part.value, StoredTensors):
        return part.value.load(), MediaSize(0, 0, 0)
    if decoded is not None:
        return _shrunk(part.value, decoded, wanted), decoded
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.decode_folder(folder, limits, sampling, wanted)
    with opened(part.value, root, part.kind, limits.urls) as source:
        if part.kind == "image":
            return decode_image(source, limits, wanted)
        if part.kind == "audio":
            return audio.decode(source, limits, _audio_of(sampling))
        return video.decode(source, limits, sampling, wanted)


def _audio_of(sampling: VideoSampling) -> AudioSampling:
    if not isinstance(sampling, MediaSampling):
        raise TesseraError(
            "this model has no audio input", fix="leave such samples out", code="media.kind-not-supported"
        )
    return sampling.audio


def _decoded_size(part: Part, limits: Limits) -> MediaSize | None:
    """Return the size of media that is decoded already; None for what has to be read."""
    value = part.value
    if part.kind == "features":
        return MediaSize(0, 0, 0)
    if part.kind == "image" and isinstance(value, Image.Image):
        check_pixels(value.width, value.height, "image", limits)
        return MediaSize(*value.size)
    if part.kind == "video" and isinstance(value, np.ndarray):
        if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8 or 0 in value.shape:
            raise TesseraError(
                f"frames are uint8 [frames, height, width, 3], these are {value.dtype} {value.shape}",
                code="media.wrong-array",
            )
        return MediaSize(value.shape[2], value.shape[1], value.shape[0])
    if part.kind == "audio" and isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype != np.float32 or not len(value):
            raise TesseraError(
                f"sound is float32 [samples], this is {value.dtype} {value.shape}", code="media.wrong-array"
            )
        return MediaSize(0, 0, 0, samples=len(value))
    return None


def _shrunk(value: Any, size: MediaSize, target: Target | None) -> Any:
    if not isinstance(value, Image.Image):
        return value
    with refusing("damaged image", "opened elsewhere and read only now"):
        return smaller(to_rgb(value), None if target is None else target(size))
