"""Define samples: messages with media parts, and samples that a processor has encoded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

# codes: speech as int64 [frames, codebooks]; features: stored encoder outputs of a full sample
PartKind = Literal["text", "image", "video", "audio", "codes", "features"]
PLAIN = "text"  # the role of plain text: no header, no end of turn, and all tokens are trained on


class StoredTensors(ABC):
    """Base class of `Part.value` for the kind `features`: stored encoder outputs of one sample."""

    @property
    @abstractmethod
    def content(self) -> str:
        """Return a text that identifies the tensors, such as a hash: different tensors give different texts."""

    @abstractmethod
    def load(self) -> dict[str, Tensor]:
        """Return the tensors by name."""


@dataclass(frozen=True)
class Region:
    """Hold a box (x1, y1, x2, y2) or a point (x, y) in an image. If `numbers` is empty, hold only an object's name."""

    numbers: tuple[float, ...] = ()
    label: str = ""  # name of the object; empty: unknown
    image: int = 0  # index among the images of the sample
    # 1 or 1000: coordinates go from 0 to this number over the width and the height; 0: pixels, after EXIF rotation
    scale: int = 0

    def pixels(self, size: MediaSize) -> tuple[float, ...]:
        """Return the coordinates in pixels of an image of this size."""
        if not self.scale:
            return self.numbers
        sides = (size.width, size.height)
        return tuple(number * sides[n % 2] / self.scale for n, number in enumerate(self.numbers))


REGION = re.compile("<(?:ref-object|bbox)>")  # placeholders of regions in a text


@dataclass(frozen=True)
class Part:
    """Hold one part of a message.

    `value`: a text, or media: a path inside the data root, the location of bytes in another file, bytes, or a decoded
    object. `regions`: boxes, points or object names, one for each placeholder (`REGION`) in a text.
    """

    kind: PartKind
    value: Any
    regions: tuple[Region, ...] = ()

    def spelled(self) -> str:
        """Return the text for display. Each placeholder is replaced by the coordinates or the name of its region."""
        if not self.regions:
            return str(self.value)
        regions = iter(self.regions)

        def word(_: re.Match[str]) -> str:
            region = next(regions)
            return str([round(number, 6) for number in region.numbers]) if region.numbers else region.label

        return REGION.sub(word, self.value)


@dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[Part, ...]
    speaker: str = ""  # name or number of the voice that says this message; empty: the model's default


@dataclass(frozen=True)
class Sample:
    """Hold one conversation. Ledgers, quarantine lists and errors use `id`, which is unique in its data set."""

    id: str
    messages: tuple[Message, ...]

    def media(self) -> list[Part]:
        return [part for message in self.messages for part in message.parts if part.kind != "text"]


class BadSample(NamedTuple):
    """Hold why a sample is not trained on. `code`: as listed in docs/reference/error-codes.md."""

    id: str
    reason: str
    code: str = ""  # "": written by an earlier version, or by a data set of the user

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" [{self.code}]" if self.code else "")


def count_codes(codes: Iterable[str]) -> str:
    """Return how often each code occurs, such as "3 media.no-such-file, 1 data.empty-turn"."""
    return ", ".join(f"{count} {code or 'without a code'}" for code, count in Counter(codes).most_common())


@dataclass(frozen=True)
class MediaSize:
    """Hold the size of an image, a video or a recording, as read from its header."""

    width: int
    height: int
    frames: int = 1
    samples: int = 0  # samples of a recording or of the sound track, at the rate to which audio is decoded
    total: int = 0  # number of frames of the full video, from which `frames` frames are taken evenly
    rate: float | None = None  # frames per second of the full video; None: unknown

    @property
    def fps(self) -> float | None:
        """Return the frames per second after `frames` frames were selected from the video."""
        return None if self.rate is None or not self.total else self.frames / self.total * self.rate


class VideoWithSound(NamedTuple):
    """Hold a decoded video whose sound track the model reads, too."""

    frames: Any  # uint8 [F, H, W, 3]
    sound: Any  # float32 [samples]


@dataclass
class EncodedStream:
    """Hold the input of one encoder for one sample, before packing. Its `Stream` in the plan names the tensors."""

    tensors: dict[str, Tensor]  # name in a batch -> tensor with one entry per element: a patch or audio frame
    lengths: tuple[int, ...]  # number of elements of each sequence: an image, a video frame, a recording
    slots: Tensor  # [outputs] int64: positions of the tokens that the encoder's outputs replace
    windows: tuple[int, ...] = ()  # number of elements of each window, for encoders with window attention
    selected: Tensor | None = None  # [features]: indices of the elements whose features are used; None: all
    # [outputs, K]: indices of the features that each output is interpolated from; -1 is the projector's own embedding.
    # None: each feature is an output.
    index: Tensor | None = None
    weights: Tensor | None = None  # [outputs, K] interpolation weights


@dataclass
class Encoded:
    """Hold one sample after tokenising, not yet packed. `labels[i]` is the label *of* token i (collate shifts them)."""

    id: str
    tokens: Tensor  # [L] int64
    labels: Tensor  # [L] int64, IGNORE where not trained on
    positions: Tensor  # [L] or [3, L] int64
    streams: dict[str, EncodedStream] = field(default_factory=dict)  # stream name in the model's plan -> its input
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Return how many tokens the sample adds to a row."""
        return len(self.tokens)
