"""Declare the options for reading samples of a generation model, and split a sample into its parts."""

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
    """Declare the keys of `data.processor` for generation families."""

    height: int | None = Field(None, gt=0, le=2**16, description="height in pixels of images and frames; needs width")
    width: int | None = Field(None, gt=0, le=2**16, description="width in pixels of images and frames; needs height")
    max_pixels: int = Field(
        480 * 832, gt=0, le=10**9, description="larger images and frames are scaled down and keep their aspect ratio"
    )
    num_frames: int = Field(
        81, gt=0, le=10**6, description="maximum number of frames taken from a video, from its beginning"
    )
    min_frames: int = Field(1, gt=0, le=10**6, description="videos from which fewer frames are taken are left out")
    fps: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="frames taken from each second of a video; 0: every frame, whatever the frame rate",
    )
    long_captions: Literal["cut", "leave_out"] = Field(
        "cut",
        description="whether captions that are too long are truncated, as in published pipelines, or left out "
        "with their media",
    )
    reference_pixels: int | None = Field(
        None,
        gt=0,
        le=1 << 26,
        description="images to edit are resized to about this many pixels and keep their aspect ratio; "
        "default: 1048576 "
        "for pipelines whose text encoder reads these images, otherwise the size of other images",
    )
    vae_stride: tuple[int, int] | None = Field(
        None, description="frames and pixels along a side that one latent encodes; needed without a VAE folder"
    )

    @model_validator(mode="after")
    def _both_sides(self) -> GenerationOptions:
        if (self.height is None) != (self.width is None):
            raise ValueError("set both height and width, or only max_pixels, which keeps the aspect ratio")
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
        """Return the parts of a sample; raise if the sample does not consist of a caption, images to edit and media."""
        if any(message.role == CHOSEN for message in sample.messages):
            raise TesseraError(
                "this sample is a pair of images or videos, which data.kind=generation_preference reads",
                fix="set data.kind=generation_preference",
                code="data.pair-needs-preference-kind",
            )
        media = sample.media()
        if any(part.kind != "image" for part in media[:-1]):
            raise TesseraError(
                "only images can be edited, and this sample has other media before the image or video to generate",
                fix="remove the other media from the sample",
                code="data.not-an-edit-image",
            )
        texts = [part.value for message in sample.messages for part in message.parts if part.kind == "text"]
        return CaptionedSample("".join(texts).strip(), tuple(range(len(media) - 1)), media[-1])


@dataclass
class EncodedMedia:
    """Hold one sample of a generation model before packing: an image or video to generate, and its conditions. A sample
    that could not be read has only a length.

    `tensors` contains `text_ids` (also `text_ids_2`, `text_ids_3`) and `frames` uint8 [F, H, W, 3], or the outputs of
    encoders: `clean` [patches, P], `text` [L, D] and others.
    """

    id: str
    length: int  # number of tokens in the main sequence
    grid: tuple[int, int, int] = (0, 0, 0)  # size of the latents in patches: frames, rows, columns
    text: int = 0  # number of text embeddings
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reference_grids: tuple[tuple[int, int, int], ...] = ()  # sizes of the images to edit, in patches
    counts: dict[str, int] = field(default_factory=dict)
    references: tuple[Tensor, ...] = ()  # images to edit, uint8 [1, H, W, 3]; empty if `clean` has their latents
    embeds: int = 0  # number of embeddings of conditioning frames in the main sequence, after the text
