"""Processors of families that cut images of any size into a grid of patches: the Qwen-VL models and GLM-4.1V."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, PartKind
from tessera.data.media.images import to_rgb
from tessera.data.media.video_frames import Rule
from tessera.errors import TesseraError, foreign_values
from tessera.models.files.side_files import IMAGE_FILE, VIDEO_FILE
from tessera.models.processing.chat import ChatTemplate
from tessera.models.processing.conversation import check_special_tokens, with_system
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer
from tessera.models.vision.patches import Patches, block_positions
from tessera.models.vision.preprocessor_files import GridFiles, VideoOptions
from tessera.models.vision.processor import VisionProcessor


class GridOptions(VideoOptions):
    """Declare the keys of `data.processor`. Missing keys get the values of the model's folder."""

    min_pixels: int | None = Field(None, gt=0, le=10**12, description="smaller images are enlarged")
    max_pixels: int | None = Field(None, gt=0, le=10**12, description="larger images are scaled down")
    video_min_pixels: int | None = Field(None, gt=0, le=10**12, description="the same bounds for each frame of a video")
    video_max_pixels: int | None = Field(None, gt=0, le=10**12)


@dataclass(frozen=True, eq=False)
class GridProcessor(VisionProcessor):
    """Cut images and videos into a grid of patches (time, height, width). Blocks of patches are merged into tokens."""

    options: ClassVar[type[GridOptions]] = GridOptions
    chat: ClassVar[ChatTemplate] = ChatTemplate()
    files: ClassVar[GridFiles] = GridFiles()
    frames_rule: ClassVar[Rule] = "steps"

    image: Patches
    video: Patches

    @classmethod
    def load(cls, config: Any, folder: Path, **options: Any) -> Self:
        """Load the processor from a folder with tokenizer.json; preprocessor files are optional.

        `config`: a `VisionLanguageConfig`. `options`: keys of `data.processor`.
        """
        folder, vision = Path(folder), config.vision
        chosen = build(cls.options, options, "data.processor")
        template = with_system(cls.chat, chosen, folder)
        encoder = ChatEncoder(load_tokenizer(folder))
        check_special_tokens(encoder, template, config.special_token_ids, config.text.vocab_size, folder)
        with foreign_values(str(folder)):
            image, video = cls.files.read(
                folder,
                (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size),
                image_bounds=(chosen.min_pixels, chosen.max_pixels),
                video_bounds=(chosen.video_min_pixels, chosen.video_max_pixels),
            )
        if (image.mean, image.std, image.scale) != (video.mean, video.std, video.scale):
            raise TesseraError(
                "images and video frames have different normalisations",
                where=str(folder / VIDEO_FILE),
                fix=f"set the same image_mean, image_std and rescale_factor in {VIDEO_FILE} and {IMAGE_FILE}",
                code="media.image-video-norms-differ",
            )
        # `frames_rule` "ends" allows any number of frames: copies of the last frame fill the last temporal patch.
        multiple = 1 if cls.frames_rule == "ends" else vision.temporal_patch_size
        sampling = replace(chosen.sampling(folder), multiple=multiple, rule=cls.frames_rule)
        return cls(encoder, template, sampling, chosen.train_on, False, image, video, **cls.of_model(config))

    @classmethod
    def of_model(cls, config: Any) -> dict[str, Any]:
        """Return the processor's fields that depend on the configuration of the model."""
        return {}

    def fingerprint_fields(self) -> list[Any]:
        return [asdict(self.image), asdict(self.video)]

    def patches(self, kind: PartKind) -> Patches:
        return self.image if kind == "image" else self.video

    @property
    def pixel_norm(self) -> Patches:
        return self.image

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int]:
        height, width = self.patches(kind).fit(size.height, size.width, size.frames)
        return width, height

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        times = self.times(t, size) if kind == "video" else ()
        return MediaLayout(tokens=(patches.tokens((t, h, w)),), lengths=(h * w,) * t, grid=(t, h, w), times=times)

    def times(self, count: int, size: MediaSize) -> tuple[float, ...]:
        """Return the time positions of the `count` temporal patches of a video; an empty result means 0, 1, 2, ..."""
        return ()

    def seconds(self, size: MediaSize) -> np.float32:
        """Return the seconds between two temporal patches. Without a frame rate, `sampling.fps` is assumed."""
        return np.float32(self.video.temporal / (size.fps or self.sampling.fps))

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        t, h, w = layout.grid
        frames = [to_rgb(media)] if isinstance(media, Image.Image) else np.asarray(media)
        positions = np.tile(block_positions(h, w, self.image.merge), (t, 1))
        order = None
        # A token is a block of merge x merge consecutive patches, so the order of tokens determines that of patches.
        if layout.token_order is not None:
            block = self.image.merge**2
            order = (layout.token_order[:, None] * block + np.arange(block)).reshape(-1)
            positions = positions[order]
        return {"pixels": self.patches(kind).cut(frames, layout.grid, order), "patch_positions": positions}

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        # If each temporal patch has its own run of placeholder tokens, its positions start at that run.
        grids = [
            (1, *layout.grid[1:]) if len(layout.tokens) > 1 else layout.grid
            for layout in layouts
            for _ in layout.tokens
        ]
        times = [layout.times for layout in layouts for _ in layout.tokens]
        return grid_positions(length, spans, grids, self.image.merge, times)

    def save_preprocessor(self, folder: Path) -> None:
        self.files.write(folder, self.image, self.video, self.sampling)


def grid_positions(
    length: int,
    spans: Sequence[tuple[int, int]],
    grids: Sequence[Sequence[int]],
    merge: int,
    times: Sequence[Sequence[float]] = (),
) -> np.ndarray:
    """Return positions [3, length] (time, height, width) of tokens of text, images and videos.

    Text advances all three axes. Tokens of an image or video count along each axis from the position where it begins;
    the text after it continues one past the largest position of any axis. Qwen2-VL and Qwen2.5-VL were published with
    this rule (in their authors' code). transformers 5.3 to 5.23 continues after the longer side of a video
    instead, so positions after a long video differ there.

    `times`: time position of each temporal patch of each image or video, by default 0, 1, 2, ...
    """
    positions = np.empty((3, length), dtype=np.int64)
    at = position = 0
    for (start, count), size, its_times in zip(spans, grids, times or [()] * len(grids), strict=True):
        positions[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        grid = token_grid(size, merge, its_times)
        positions[:, start : start + count] = grid + position
        at, position = start + count, position + int(grid.max()) + 1
    positions[:, at:] = np.arange(position, position + length - at)
    return positions


def token_grid(size: Sequence[int], merge: int, times: Sequence[float] = ()) -> np.ndarray:
    """Return time, height and width of the tokens of a grid, [3, tokens]. `times`: time of each temporal patch."""
    t, h, w = size
    grid = np.indices((t, h // merge, w // merge), dtype=np.int64).reshape(3, -1)
    return np.stack([np.asarray(times)[grid[0]], *grid[1:]]) if times else grid


DEFAULT_RATE = 24.0  # frames per second of videos of unknown frame rate, as in transformers


@dataclass(frozen=True, eq=False)
class TableGridProcessor(GridProcessor):
    """Interpolate the learned position embeddings of a vision encoder to the size of each image."""

    table_side: int = 1  # number of rows and of columns of the learned position embedding

    @staticmethod
    @abstractmethod
    def position_table(
        positions: np.ndarray, height: int, width: int, side: int, /
    ) -> tuple[np.ndarray, np.ndarray]: ...  # a `PositionTable`

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        t, h, w = layout.grid
        index, weights = self.position_table(block_positions(h, w, self.image.merge), h, w, self.table_side)
        return {
            **super().elements(kind, media, layout),
            "patch_index": np.tile(index, (t, 1)),
            "patch_weights": np.tile(weights, (t, 1)),
        }


@dataclass(frozen=True, eq=False)
class TimestampedVideoProcessor(TableGridProcessor):
    """Write the time of each temporal patch of a video as text beside its tokens, as GLM-4.1V and Qwen3-VL do."""

    @abstractmethod
    def timestamp(self, first: float, last: float) -> str:
        """Return the timestamp text of a temporal patch. `first`, `last`: seconds of its first and last frame."""
        ...

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        patches = self.patches(kind)
        t, h, w = patches.grid(size.height, size.width, size.frames)
        timestamps = tuple(self.timestamp(*seconds) for seconds in self._seconds(size, t, patches.temporal))
        return MediaLayout(
            tokens=(h * w // patches.merge**2,) * t,
            lengths=(h * w,) * t,
            grid=(t, h, w),
            timestamps=timestamps if kind == "video" else (),
        )

    def _seconds(self, size: MediaSize, steps: int, temporal: int) -> list[tuple[float, float]]:
        """Return the seconds of the first and of the last frame of each temporal patch."""
        chosen = self.sampling.choose(size.total, size.rate) if size.total else []
        if len(chosen) != size.frames:  # the caller has sampled the frames itself: assume equal distances
            chosen = self.sampling.spread(size.frames, size.total or size.frames)
        rate, last = size.rate or DEFAULT_RATE, size.frames - 1
        ends = [(chosen[min(n * temporal, last)], chosen[min((n + 1) * temporal - 1, last)]) for n in range(steps)]
        return [(first / rate, end / rate) for first, end in ends]
