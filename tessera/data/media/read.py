"""Read the media parts of samples: sizes from headers (`probe`), and decoded content (`decode`).

Both return the same size, so the tokens of a sample are known from headers alone. Training, evaluation and inference
read all media of a sample by `read_media`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from PIL import Image

from tessera.core.sample import MediaSize, Part, PartKind, Sample, StoredTensors, VideoWithSound
from tessera.core.spec import LanguageProcessor, Processor
from tessera.data.media import audio, video
from tessera.data.media.animation import is_animation
from tessera.data.media.audio import AudioSampling
from tessera.data.media.clips import AudioClip, AudioSamples, is_sound
from tessera.data.media.files import Limits, Opened, Target, folder_of, opened, refusing
from tessera.data.media.images import check_pixels, decode_image, probe_image, smaller, to_rgb
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError

# kind, size in the header -> (width, height) after resizing; None: not resized
KindTarget = Callable[[PartKind, MediaSize], "tuple[int, int] | None"]


@dataclass(frozen=True)
class MediaSampling(VideoSampling):
    """State how videos and audio are sampled, for families with audio input."""

    audio: AudioSampling = field(kw_only=True)
    video_sound: bool = field(default=False, kw_only=True)  # also decode the sound track of videos that have one


@runtime_checkable
class MediaProcessor(Processor, Protocol):
    """Declare the methods that a family's processor needs, in addition to `Processor`, to index samples with media."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of all settings that affect `measure`."""
        ...

    @property
    def sampling(self) -> VideoSampling:
        """Return how videos are sampled; a `MediaSampling` for families with audio input."""
        ...

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Return (width, height) to which an image or video frame of this size is resized; None: it is not resized.

        Decoders use it to decode at a lower resolution.
        """
        ...


@runtime_checkable
class ChatProcessor(LanguageProcessor, MediaProcessor, Protocol):
    """Declare the methods that a family's processor needs to encode conversations."""

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        """Return the same processor with other roles to train on. `last_only`: only on the last turn of these roles."""
        ...

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens including special tokens, to show what a model reads."""
        ...


@runtime_checkable
class KeepsMediaWhole(Protocol):
    """Declare the method of a processor that reads some media of a sample in their original size."""

    def whole_media(self, sample: Sample) -> Sequence[int]:
        """Return the indices of the media of a sample that are decoded in their original size, without `target`."""
        ...


@runtime_checkable
class PadsSamples(Protocol):
    """Declare a processor that pads the rows of a batch to the longest row, not to a constant length.

    `packs` is False for a model whose attention does not separate the samples of a row.
    """

    @property
    def packs(self) -> bool:
        """Return whether several samples are packed into a row."""
        ...


def probe(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
) -> MediaSize:
    """Return the size of a media part from its header. `decode` returns the same number of frames or audio samples.

    With a `target`, also raise if the resized frames of a video are too large; otherwise `decode` does.
    """
    decoded = _decoded_size(part, limits, sampling)
    if decoded is not None:
        return decoded
    # Without a target the size is unknown: pass (0, 0), to which the limit on resized frames of a video never applies.
    wanted: Target = (lambda size: (0, 0)) if target is None else partial(target, part.kind)
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.probe_folder(folder, limits, sampling, wanted)
    clip = part.value if isinstance(part.value, AudioClip) else None
    with opened(part.value if clip is None else clip.value, root, part.kind, limits.urls) as source:
        if part.kind == "image":
            return probe_image(source, limits)
        if part.kind == "audio":
            return audio.probe(source, limits, _audio_of(sampling), clip)
        size = video.probe(source, limits, sampling, wanted)
        if _with_sound(source, limits, sampling):
            size = replace(size, samples=audio.probe(source, limits, _audio_of(sampling)).samples)
        return size


def decode(
    part: Part,
    root: Path,
    limits: Limits,
    sampling: VideoSampling,
    target: KindTarget | None = None,
) -> Any:
    """Decode a media part: an upright RGB image, uint8 frames [F, H, W, 3], float32 audio [samples], frames with their
    sound track, or named tensors.

    Images and frames are resized to `target` if that is smaller.
    """
    return _decode(part, root, limits, sampling, target)[0]


def read_media(
    sample: Sample, root: Path, limits: Limits, processor: MediaProcessor
) -> tuple[list[Any], list[MediaSize]]:
    """Decode all media of a sample for a processor. Return the media, and their sizes according to the headers."""
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
    decoded = _decoded_size(part, limits, sampling)
    if isinstance(part.value, StoredTensors):
        return part.value.load(), MediaSize(0, 0, 0)
    if isinstance(part.value, AudioSamples):
        return audio.resampled(part.value, _audio_of(sampling))
    if decoded is not None:
        return _shrunk(part.value, decoded, wanted), decoded
    folder = folder_of(part.value, root) if part.kind == "video" else None
    if folder is not None:
        return video.decode_folder(folder, limits, sampling, wanted)
    clip = part.value if isinstance(part.value, AudioClip) else None
    with opened(part.value if clip is None else clip.value, root, part.kind, limits.urls) as source:
        if part.kind == "image":
            return decode_image(source, limits, wanted)
        if part.kind == "audio":
            return audio.decode(source, limits, _audio_of(sampling), clip)
        frames, size = video.decode(source, limits, sampling, wanted)
        if not _with_sound(source, limits, sampling):
            return frames, size
        sound, its_size = audio.decode(source, limits, _audio_of(sampling))
        return VideoWithSound(frames, sound), replace(size, samples=its_size.samples)


def _with_sound(source: Opened, limits: Limits, sampling: VideoSampling) -> bool:
    """Return whether to decode the sound track of a video: if the video has one, and the model takes it as input."""
    wanted = isinstance(sampling, MediaSampling) and sampling.video_sound
    return wanted and not is_animation(source.file) and audio.has_sound(source, limits)


def audio_rate(part: Part, root: Path, limits: Limits) -> int:
    """Return the stored sampling rate of a recording, in samples per second."""
    value = part.value.value if isinstance(part.value, AudioClip) else part.value
    with opened(value, root, part.kind, limits.urls) as source:
        return audio.stored_rate(source, limits)


def _audio_of(sampling: VideoSampling) -> AudioSampling:
    if not isinstance(sampling, MediaSampling):
        raise TesseraError(
            "this model has no audio input",
            fix="remove samples with audio; a model that speaks is trained on their codes: tessera data features",
            code="media.kind-not-supported",
        )
    return sampling.audio


def _decoded_size(part: Part, limits: Limits, sampling: VideoSampling) -> MediaSize | None:
    """Return the size of media that is a decoded image or array already; None if it must be read from a file."""
    value = part.value
    if part.kind == "features":
        return MediaSize(0, 0, 0)
    if part.kind == "codes":
        return MediaSize(0, 0, len(value))
    if part.kind == "image" and isinstance(value, Image.Image):
        check_pixels(value.width, value.height, "image", limits)
        return MediaSize(*value.size)
    if part.kind == "video" and isinstance(value, np.ndarray):
        if value.ndim != 4 or value.shape[-1] != 3 or value.dtype != np.uint8 or 0 in value.shape:
            raise TesseraError(
                f"a video array must be uint8 [frames, height, width, 3], not {value.dtype} {value.shape}",
                code="media.wrong-array",
            )
        return MediaSize(value.shape[2], value.shape[1], value.shape[0])
    if part.kind == "audio" and isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype != np.float32 or not len(value) or not is_sound(value):
            raise TesseraError(
                f"an audio array must be finite float32 [samples], not {value.dtype} {value.shape}",
                code="media.wrong-array",
            )
        return MediaSize(0, 0, 0, samples=len(value))
    if part.kind == "audio" and isinstance(value, AudioSamples):
        return audio.decoded_size(value, _audio_of(sampling))
    return None


def _shrunk(value: Any, size: MediaSize, target: Target | None) -> Any:
    if not isinstance(value, Image.Image):
        return value
    with refusing("damaged image", "image object of the data set"):
        return smaller(to_rgb(value), None if target is None else target(size))
