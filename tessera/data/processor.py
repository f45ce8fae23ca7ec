"""What conversations need of a family's processor beyond the common contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from tessera.core.types import MediaSize, PartKind, Processor
from tessera.data.media.video import VideoSampling


@runtime_checkable
class ChatProcessor(Processor, Protocol):
    @property
    def fingerprint(self) -> str:
        """Changes whenever `measure` could give another answer."""
        ...

    @property
    def sampling(self) -> VideoSampling: ...

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """(width, height) that a picture, or each frame of a clip, of this size is brought to; None: it is not resized.
        Decoders use it to decode no more than is used."""
        ...

    def training_on(self, roles: Sequence[str], *, last_only: bool = False) -> Self:
        """The same processor, with other roles to train on; `last_only`: on the last turn of those roles."""
        ...
