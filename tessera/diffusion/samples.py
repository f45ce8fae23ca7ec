"""Declare the options of a generation model's samples, and read the parts of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from tessera.config.reader import Section
from tessera.core.sample import Part, Sample
from tessera.data.sources.formats import CHOSEN
from tessera.errors import TesseraError


class GenerationOptions(Section):
    """Declare the keys of `data.processor` of a generation family."""

    height: int | None = Field(None, gt=0, le=2**16, description="of every image and frame; give width too")
    width: int | None = Field(None, gt=0, le=2**16, description="of every image and frame; give height too")
    max_pixels: int = Field(
        480 * 832, gt=0, le=10**9, description="larger images and frames are scaled down, in their own aspect ratio"
    )
    num_frames: int = Field(81, gt=0, le=10**6, description="frames taken from a video at most, from its beginning")
    min_frames: int = Field(1, gt=0, le=10**6, description="videos that give fewer frames are left out")
    fps: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="frames taken from each second of a video, so that motion keeps its speed; 0: every frame",
    )
    long_captions: Literal["cut", "leave_out"] = Field(
        "cut", description="captions with more tokens than the model reads: cut as published pipelines do, or left out"
    )
    reference_pixels: int | None = Field(
        None,
        gt=0,
        le=1 << 26,
        description="images to edit are brought to about so many pixels, in their own aspect ratio; default: 1048576, "
        "as in sampling, where the text encoder reads them, too, and as other images where it does not",
    )
    vae_stride: tuple[int, int] | None = Field(
        None, description="frames and pixels that one latent stands for, where no folder with a VAE tells it"
    )

    @model_validator(mode="after")
    def _both_sides(self) -> GenerationOptions:
        if (self.height is None) != (self.width is None):
            raise ValueError("give height and width together; or max_pixels alone, which keeps the aspect ratio")
        if self.min_frames > self.num_frames:
            raise ValueError(f"min_frames {self.min_frames} is more than num_frames {self.num_frames}")
        return self


@dataclass(frozen=True)
class CaptionedSample:
    """Hold the parts of a sample: a caption, images to edit, and the image or video to generate."""

    caption: str
    references: tuple[int, ...]  # indices into the sample's media
    wanted: Part

    @staticmethod
    def of(sample: Sample) -> CaptionedSample:
        """Return the parts of a sample; raise if it is of another kind."""
        if any(message.role == CHOSEN for message in sample.messages):
            raise TesseraError(
                "a pair of images or videos: data.kind=generation_preference reads these",
                code="data.pair-needs-preference-kind",
            )
        media = sample.media()
        if any(part.kind != "image" for part in media[:-1]):
            raise TesseraError(
                "images can be edited, and this sample has something else before what is to be made",
                code="data.not-an-edit-image",
            )
        texts = [part.value for message in sample.messages for part in message.parts if part.kind == "text"]
        return CaptionedSample("".join(texts).strip(), tuple(range(len(media) - 1)), media[-1])


@dataclass
class EncodedMedia:
    """Hold one sample of a generation model, not yet packed: an image or video that the model learns to make, and what
    it is made from. A sample that could not be read has a length and nothing else.

    `tensors` has `text_ids` (also `text_ids_2`, `text_ids_3`) and `frames` uint8 [F, H, W, 3]; or what encoders made of
    them: `clean` [patches, P], `text` [L, D] and the like.
    """

    id: str
    length: int  # elements of the main sequence
    grid: tuple[int, int, int] = (0, 0, 0)  # of the latents, in patches: frames, rows, columns
    text: int = 0  # text tokens in the main sequence; 0 where the model reads text by cross attention
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reference_grids: tuple[tuple[int, int, int], ...] = ()  # of images to edit, whose latents follow
    counts: dict[str, int] = field(default_factory=dict)
    references: tuple[Tensor, ...] = ()  # these images, uint8 [1, H, W, 3]; none where `clean` has their latents
    embeds: int = 0  # embeddings of a given frame in the main sequence, which follow those of text
