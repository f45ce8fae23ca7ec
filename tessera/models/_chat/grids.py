"""What families with pictures of any size, cut into a grid of patches, have in common: Qwen-VL and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, PartKind
from tessera.data.chat import ChatTemplate
from tessera.data.media.clips import Rule
from tessera.data.media.images import to_rgb
from tessera.data.patches import Patches, block_positions
from tessera.data.side_files import IMAGE_FILE, VIDEO_FILE
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template
from tessera.models._chat.options import ClipOptions
from tessera.models._chat.preprocessor_files import Geometry, GridFiles
from tessera.models._chat.processor import ConversationProcessor, View, check_words


class GridOptions(ClipOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    min_pixels: int | None = Field(None, gt=0, le=10**12, description="smaller pictures are enlarged")
    max_pixels: int | None = Field(None, gt=0, le=10**12, description="larger pictures are made smaller")
    video_min_pixels: int | None = Field(None, gt=0, le=10**12, description="the same bounds for each frame of a clip")
    video_max_pixels: int | None = Field(None, gt=0, le=10**12)


@dataclass(frozen=True, eq=False)
class GridProcessor(ConversationProcessor):
    """Pictures become a grid of patches (time, height, width), which are merged block by block into tokens."""

    files: ClassVar[GridFiles] = GridFiles()
    frames_rule: ClassVar[Rule] = "steps"

    image: Patches
    video: Patches

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        chosen: GridOptions,
        template: ChatTemplate,
        *,
        geometry: Geometry,
        ids: dict[str, int],
        vocabulary: int,
    ) -> Self:
        """From a folder with tokenizer.json and, when the model comes from a hub, its preprocessor files. `ids`: what
        the model takes special words for."""
        jinja = read_chat_template(folder)
        if "system" in chosen.model_fields_set:
            template = replace(template, system=chosen.system)
        elif jinja is not None:
            template = replace(template, system=template.system_in(jinja))
        encoder = PieceEncoder(load_tokenizer(folder))
        check_words(encoder, template, ids, vocabulary, folder)
        image, video = cls.files.read(
            folder,
            geometry,
            image_bounds=(chosen.min_pixels, chosen.max_pixels),
            video_bounds=(chosen.video_min_pixels, chosen.video_max_pixels),
        )
        if (image.mean, image.std, image.scale) != (video.mean, video.std, video.scale):
            raise TesseraError(
                "pictures and frames of clips are normalised differently",
                where=str(folder / VIDEO_FILE),
                fix=f"use the same image_mean, image_std and rescale_factor there and in {IMAGE_FILE}",
            )
        # Where any number of frames is taken, the last patch along time is filled by its last frame.
        multiple = 1 if cls.frames_rule == "ends" else geometry.temporal_patch_size
        sampling = replace(chosen.sampling(folder), multiple=multiple, rule=cls.frames_rule)
        return cls(encoder, template, sampling, chosen.train_on, False, image, video)

    def facts(self) -> list[Any]:
        return [asdict(self.image), asdict(self.video)]

    def patches(self, kind: PartKind) -> Patches:
        return self.image if kind == "image" else self.video

    @property
    def bytes_mean(self) -> Patches:
        return self.image

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int]:
        height, width = self.patches(kind).fit(size.height, size.width, size.frames)
        return width, height

    def view(self, kind: PartKind, size: MediaSize) -> View:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        return View(tokens=(patches.tokens((t, h, w)),), pieces=(h * w,) * t, grid=(t, h, w))

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        t, h, w = view.grid
        frames = [to_rgb(media)] if isinstance(media, Image.Image) else np.asarray(media)
        positions = np.tile(block_positions(h, w, self.image.merge), (t, 1))
        order = None
        if view.order is not None:  # of tokens, each a block of patches
            block = self.image.merge**2
            order = (view.order[:, None] * block + np.arange(block)).reshape(-1)
            positions = positions[order]
        return {"pixels": self.patches(kind).cut(frames, view.grid, order), "patch_positions": positions}

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        # A clip whose steps along time are runs of their own counts each of them from where it begins.
        grids = [(1, *v.grid[1:]) if len(v.tokens) > 1 else v.grid for v in views for _ in v.tokens]
        intervals = [view.interval for view in views for _ in view.tokens]
        return grid_positions(length, spans, grids, self.image.merge, intervals)

    def save_preprocessor(self, folder: Path) -> None:
        self.files.write(folder, self.image, self.video, self.sampling)


def grid_positions(
    length: int,
    spans: Sequence[tuple[int, int]],
    grids: Sequence[Sequence[int]],
    merge: int,
    intervals: Sequence[float] | None = None,
) -> np.ndarray:
    """[3, length]: text counts on in all three axes; an image or video counts in time, height and width from where it
    begins, and what follows it goes on one past the largest position so far, on whichever axis it lies.

    That is the rule by which Qwen2-VL and Qwen2.5-VL were published (their authors' code in transformers up to 5.2,
    their fine-tuning code, and vLLM); `generate` counts on in the same way. transformers 5.3 to 5.22 goes on after the
    longer *side* of a video instead: text behind a video that lasts longer than it is wide stands elsewhere there.

    `intervals`: of each image or video, how far one step along time goes; default: 1, and in any case rounded down from
    the fp32 that the reference computes."""
    positions = np.empty((3, length), dtype=np.int64)
    at = place = 0
    steps = [1.0] * len(grids) if intervals is None else intervals
    for (start, count), (t, h, w), step in zip(spans, grids, steps, strict=True):
        positions[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        grid = np.indices((t, h // merge, w // merge), dtype=np.int64).reshape(3, -1)
        grid[0] = grid[0].astype(np.float32) * np.float32(step)
        positions[:, start : start + count] = grid + place
        at, place = start + count, place + int(grid.max()) + 1
    positions[:, at:] = np.arange(place, place + length - at)
    return positions
