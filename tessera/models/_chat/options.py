"""What recipes may say to the processor of any family that reads conversations with clips."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tessera.core.config import Section
from tessera.data.media.clips import VideoSampling
from tessera.models._chat.preprocessor_files import read_sampling


class ClipOptions(Section):
    """A part of the `data.processor` section. What is left out comes from the model's folder, if it says."""

    fps: float = Field(2.0, ge=1e-6, le=1e6, description="frames taken from each second of a clip")
    min_frames: int = Field(4, gt=0, le=10**6, description="taken even from a short clip, if it has them")
    max_frames: int = Field(768, gt=0, le=10**6, description="taken even from a long clip")
    frames: int | None = Field(
        None, gt=0, le=10**6, description="frames taken from every clip, in place of fps and its bounds"
    )
    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(None, description="said when a conversation has no system message")

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> Self:
        if self.frames is not None and self.model_fields_set & {"fps", "min_frames", "max_frames"}:
            raise ValueError("give frames, or fps with min_frames and max_frames, not both")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames ({self.min_frames}) is more than max_frames ({self.max_frames})")
        return self

    def sampling(self, folder: Path) -> VideoSampling:
        """As the recipe says, and where it says nothing, as the folder does."""
        given = {name: getattr(self, name) for name in ("fps", "min_frames", "max_frames")}
        if self.frames is not None:
            return VideoSampling(**given, frames=self.frames)
        said = self.model_fields_set & given.keys()
        stored = {name: value for name, value in read_sampling(folder).items() if name not in said}
        if said:
            stored.pop("frames", None)  # the recipe has chosen the other way
        return VideoSampling(**{**given, **stored})
