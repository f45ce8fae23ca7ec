"""Conversations with pictures and clips -> what a GLM-4.1V model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding). Behind every pair of frames
stands the second at which it was shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tessera.core.config import build
from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, Part, PartKind
from tessera.data.chat import Piece
from tessera.data.media.clips import VideoSampling, spread
from tessera.data.patches import Patches, block_positions
from tessera.models._chat.grids import GridOptions, GridProcessor, grid_positions
from tessera.models._chat.preprocessor_files import BOTH_FILE, IMAGE_FILE, Bounds, Geometry, GridFiles, read_sampling
from tessera.models._chat.processor import View
from tessera.models._chat.templates import GLM4V
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.positions import between_entries

UNKNOWN_RATE = 24.0  # frames per second of a clip that does not say: what the reference takes it for


class Glm4vOptions(GridOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says.

    Bounds of pixels are counted over all frames of a clip; a picture counts as often as a patch has frames: twice.
    """

    min_pixels: int | None = Field(None, gt=0, description="smaller pictures are enlarged; each pixel counts twice")
    max_pixels: int | None = Field(None, gt=0, description="larger pictures are made smaller; each pixel counts twice")
    video_min_pixels: int | None = Field(None, gt=0, description="the same bounds for all frames of a clip together")
    min_frames: int = Field(2, gt=0, description="taken even from a short clip, if it has them")
    max_frames: int = Field(600, gt=0, description="taken even from a long clip")

    def sampling(self, folder: Path) -> VideoSampling:
        """Preprocessor files hold a number of frames beside the rate, which this family's reference passes over."""
        found = super().sampling(folder)
        return replace(found, frames=self.frames) if "fps" in read_sampling(folder) else found


@dataclass(frozen=True)
class Glm4vFiles(GridFiles):
    processor: str = "Glm4vProcessor"
    image: str = "Glm4vImageProcessor"
    video: str = "Glm4vVideoProcessor"
    image_bounds: tuple[int, int] = (112 * 112, 14 * 14 * 8 * 6144)
    video_bounds: tuple[int, int] = (112 * 112, 28 * 28 * 2 * 30000)
    whole_clips: bool = True

    def read(
        self, folder: Path, vision: Geometry, *, image_bounds: Bounds, video_bounds: Bounds
    ) -> tuple[Patches, Patches]:
        """A picture is a clip of one patch: its bounds, too, are those of all its frames."""
        _refuse_others(folder, self.processor)
        image, video = super().read(folder, vision, image_bounds=image_bounds, video_bounds=video_bounds)
        return replace(image, whole_clips=True), video


@dataclass(frozen=True, eq=False)
class Glm4vProcessor(GridProcessor):
    meaning: ClassVar[str] = "glm4v 1"
    tokenizer_kind: ClassVar[str] = "PreTrainedTokenizerFast"
    files: ClassVar[GridFiles] = Glm4vFiles()

    table_side: int = 24
    ends: tuple[int, ...] = ()  # further tokens with which the model ends its answers

    @classmethod
    def load(cls, config: Glm4vConfig, folder: Path, **options: Any) -> Glm4vProcessor:
        made = cls.from_folder(
            Path(folder),
            build(Glm4vOptions, options, "data.processor"),
            GLM4V,
            geometry=config.vision,
            ids={
                "<|image|>": config.image_token_id,
                "<|video|>": config.video_token_id,
                "<|begin_of_image|>": config.image_start_token_id,
                "<|end_of_image|>": config.image_end_token_id,
                "<|begin_of_video|>": config.video_start_token_id,
                "<|end_of_video|>": config.video_end_token_id,
            },
            vocabulary=config.text.vocab_size,
        )
        return replace(made, table_side=config.vision.table_side, ends=config.end_tokens)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Those of the template, and what else the model's configuration names; what ends plain text comes last."""
        *words, end = super().stop_tokens
        return (*dict.fromkeys([*words, *(token for token in self.ends if token != end)]), end)

    def view(self, kind: PartKind, size: MediaSize) -> View:
        """Each step of a clip along time is a run of its own, and a caption tells its second."""
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        captions = tuple(map(str, _seconds(size, t, patches.temporal))) if kind == "video" else ()
        return View(tokens=(h * w // patches.merge**2,) * t, pieces=(h * w,) * t, grid=(t, h, w), captions=captions)

    def show(self, part: Part, role: str, view: View) -> list[Piece]:
        if part.kind != "video":
            return self.template.show(part, role)
        words, still = self.template.media["video"], Part("image", None)
        pieces = [Piece(words.before, role, special=True)]
        for caption in view.captions:
            pieces += [*self.template.show(still, role), Piece(caption, role)]
        return [*pieces, Piece(words.after, role, special=True)]

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        t, h, w = view.grid
        index, weights = between_entries(block_positions(h, w, self.image.merge), h, w, self.table_side)
        return {
            **super().pixels(kind, media, view),
            "patch_index": np.tile(index, (t, 1)),
            "patch_weights": np.tile(weights, (t, 1)),
        }

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        steps = [(1, *view.grid[1:]) for view in views for _ in view.tokens]
        return grid_positions(length, spans, steps, self.image.merge)


def _seconds(size: MediaSize, steps: int, temporal: int) -> list[int]:
    """At which whole second the first frame of each step was shown."""
    chosen = spread(size.frames, size.total or size.frames)
    return [int(chosen[min(step * temporal, size.frames - 1)] / (size.rate or UNKNOWN_RATE)) for step in range(steps)]


def _refuse_others(folder: Path, processor: str) -> None:
    """Later models have the same architecture and `model_type`, and write their conversations in another way."""
    for name in (IMAGE_FILE, BOTH_FILE):
        if not (folder / name).is_file():
            continue
        try:
            data = json.loads((folder / name).read_text(encoding="utf-8"))
        except ValueError:
            continue  # whoever reads it says so
        said = data.get("processor_class") if isinstance(data, dict) else None
        if said not in (None, processor):
            raise TesseraError(
                f"this folder's conversations are written by a {said}",
                where=str(folder / name),
                allowed=[processor],
                fix="train it with the tokenizer and preprocessor files of GLM-4.1V, or use model.family=transformers",
            )
