"""What families with pictures of any size, cut into a grid of patches, have in common: Qwen-VL and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image
from pydantic import Field, model_validator

from tessera.core.config import Section
from tessera.core.types import MediaSize, PartKind
from tessera.data.chat import ChatTemplate
from tessera.data.media.clips import VideoSampling
from tessera.data.media.images import to_rgb
from tessera.data.patches import Patches, block_positions
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template
from tessera.models._chat.preprocessor_files import Geometry, GridFiles, read_sampling
from tessera.models._chat.processor import ConversationProcessor, View, check_words


class GridOptions(Section):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    min_pixels: int | None = Field(None, gt=0, description="smaller pictures are enlarged")
    max_pixels: int | None = Field(None, gt=0, description="larger pictures are made smaller")
    video_min_pixels: int | None = Field(None, gt=0, description="the same bounds for each frame of a clip")
    video_max_pixels: int | None = Field(None, gt=0)
    fps: float = Field(2.0, gt=0, description="frames taken from each second of a clip")
    min_frames: int = Field(4, gt=0, description="taken even from a short clip, if it has them")
    max_frames: int = Field(768, gt=0, description="taken even from a long clip")
    frames: int | None = Field(None, gt=0, description="frames taken from every clip, in place of fps and its bounds")
    train_on: tuple[str, ...] = ("assistant",)
    system: str | None = Field(None, description="said when a conversation has no system message")

    @model_validator(mode="after")
    def _one_way_to_sample(self) -> GridOptions:
        if self.frames is not None and self.model_fields_set & {"fps", "min_frames", "max_frames"}:
            raise ValueError("give frames, or fps with min_frames and max_frames, not both")
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames ({self.min_frames}) is more than max_frames ({self.max_frames})")
        return self

    def sampling(self, folder: Path) -> VideoSampling:
        """As the recipe says, and where it says nothing, as the folder does."""
        if self.frames is not None:
            return VideoSampling(frames=self.frames)
        given = {name: getattr(self, name) for name in ("fps", "min_frames", "max_frames")}
        said = self.model_fields_set & given.keys()
        stored = {name: value for name, value in read_sampling(folder).items() if name not in said}
        if said:
            stored.pop("frames", None)  # the recipe has chosen the other way
        return VideoSampling(**{**given, **stored})


@dataclass(frozen=True, eq=False)
class GridProcessor(ConversationProcessor):
    """Pictures become a grid of patches (time, height, width), which are merged block by block into tokens."""

    files: ClassVar[GridFiles] = GridFiles()

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
        sampling = replace(chosen.sampling(folder), multiple=geometry.temporal_patch_size)
        return cls(encoder, template, sampling, chosen.train_on, False, image, video)

    def facts(self) -> list[Any]:
        return [asdict(self.image), asdict(self.video)]

    def patches(self, kind: PartKind) -> Patches:
        return self.image if kind == "image" else self.video

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int]:
        height, width = self.patches(kind).fit(size.height, size.width)
        return width, height

    def view(self, kind: PartKind, size: MediaSize) -> View:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        return View(tokens=(patches.tokens((t, h, w)),), pieces=(h * w,) * t, grid=(t, h, w))

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        t, h, w = view.grid
        frames = [to_rgb(media)] if isinstance(media, Image.Image) else np.asarray(media)
        return {
            "pixels": self.patches(kind).cut(frames, view.grid),
            "patch_positions": np.tile(block_positions(h, w, self.image.merge), (t, 1)),
        }

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        return grid_positions(length, spans, [view.grid for view in views], self.image.merge)

    def save_preprocessor(self, folder: Path) -> None:
        self.files.write(folder, self.image, self.video, self.sampling)


def grid_positions(
    length: int, spans: Sequence[tuple[int, int]], grids: Sequence[Sequence[int]], merge: int
) -> np.ndarray:
    """[3, length]: text counts on in all three; a media counts in time, height and width from where it begins, and what
    follows it goes on after its longer side."""
    positions = np.empty((3, length), dtype=np.int64)
    at = place = 0
    for (start, count), (t, h, w) in zip(spans, grids, strict=True):
        positions[:, at:start] = np.arange(place, place + start - at)
        place += start - at
        grid = np.indices((t, h // merge, w // merge), dtype=np.int64).reshape(3, -1)
        positions[:, start : start + count] = grid + place
        at, place = start + count, place + max(h, w) // merge
    positions[:, at:] = np.arange(place, place + length - at)
    return positions
