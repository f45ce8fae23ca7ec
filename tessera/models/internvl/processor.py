"""The processor of InternVL: conversations with images and videos to batches, and tokens back to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, Part, PartKind
from tessera.data.media.images import to_rgb
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError, foreign_values
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, VIDEO_FILE
from tessera.models.internvl.config import InternVLConfig, InternVLVisionConfig
from tessera.models.internvl.original import CONTEXT, is_original, system_message, tile_settings
from tessera.models.processing.chat import ChatSpan, ChatTemplate, MediaWords
from tessera.models.processing.conversation import check_rope_length, check_special_tokens, with_system
from tessera.models.processing.grounding import Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import ChatEncoder, load_tokenizer, read_chat_template
from tessera.models.vision.patches import Patches, block_positions
from tessera.models.vision.preprocessor_files import (
    VideoOptions,
    check_fields,
    pixel_fields,
    read_files,
    read_norm,
    sampling_fields,
    write_json,
)
from tessera.models.vision.processor import VisionProcessor

OPEN, CLOSE, VIDEO = "<img>", "</img>", "<video>"
# For each image or video, the chat template of a folder writes one placeholder, which transformers expands later.
QWEN = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", OPEN, CLOSE),
    media={
        "image": MediaWords(CONTEXT, OPEN, CLOSE + "\n", mark=CONTEXT + "\n"),
        "video": MediaWords(CONTEXT, OPEN, CLOSE + "\n", mark=VIDEO + "\n"),
    },
    system=None,
)
# Template for the tokenizer of InternLM, which begins every text with <s>.
INTERNLM = replace(QWEN, special=("<s>", *QWEN.special), begin="<s>", end_of_text="</s>")


class TileOptions(VideoOptions):
    """Declare the keys of `data.processor`. Missing keys get the values of the model's folder."""

    min_tiles: int | None = Field(None, gt=0, le=10**6, description="least number of tiles of an image")
    max_tiles: int | None = Field(
        None, gt=0, le=10**6, description="largest number of tiles, not counting the scaled-down image; 1: never cut"
    )
    fps: float = Field(1.0, ge=1e-6, le=1e6, description="frames taken from each second of a video")
    max_frames: int = Field(32, gt=0, le=10**6, description="taken even from a long video")


@dataclass(frozen=True, eq=False)
class InternVLProcessor(VisionProcessor):
    version: ClassVar[str] = "internvl 2"
    axes: ClassVar[int] = 1
    replaced_words: ClassVar[tuple[str, ...]] = (VIDEO,)
    grounding: ClassVar[Grounding | None] = Grounding(
        box="[[{}, {}, {}, {}]]",
        point="[[{}, {}]]",
        around=("<box>", "</box>"),
        around_name=("<ref>", "</ref>"),
    )

    image: TileCutter
    video: TileCutter
    max_length: int | None
    text_only: bool = False  # the folder's chat template, which transformers uses, ignores images

    @classmethod
    def load(cls, config: InternVLConfig, folder: Path, **options: Any) -> InternVLProcessor:
        folder = Path(folder)
        chosen = build(TileOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        internlm = encoder.find(QWEN.end_of_text) is None and encoder.find("<s>") is not None
        template, original, jinja = INTERNLM if internlm else QWEN, is_original(folder), read_chat_template(folder)
        if not original or "system" in chosen.model_fields_set:
            template = with_system(template, chosen, folder)
        else:  # the chat template of an original folder has the system message of the text decoder alone
            template = replace(template, system=system_message(folder))
        text_only = not original and jinja is not None and CONTEXT not in jinja
        check_special_tokens(encoder, template, {CONTEXT: config.image_token_id}, config.text.vocab_size, folder)
        with foreign_values(str(folder)):
            image, video = read_tiles(folder, config.vision, chosen.min_tiles, chosen.max_tiles)
        sampling = replace(chosen.sampling(folder), multiple=1, rule="middles")
        return cls(encoder, template, sampling, chosen.train_on, False, image, video, config.max_length, text_only)

    def fingerprint_fields(self) -> list[Any]:
        return [asdict(self.image), asdict(self.video), self.max_length, *[self.text_only] * self.text_only]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        if kind == "video":
            grid, tiles, tokens = (size.frames, 1, 1), size.frames, (self.video.tokens,) * size.frames
        else:
            tiles = self.image.count(size.height, size.width)
            grid, tokens = (tiles, *self.image.fit(size.height, size.width)), (tiles * self.image.tokens,)
        return MediaLayout(
            tokens, (self.image.tile_patches,) * tiles, grid, selected=self.image.without_class_tokens(tiles)
        )

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Return the size of a tile; None if the image is cut into several tiles, which need its full resolution."""
        if kind == "image" and self.image.fit(size.height, size.width) != (1, 1):
            return None
        return self.image.size, self.image.size

    @property
    def pixel_norm(self) -> Patches:
        return self.image.patches

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        tiles, columns, rows = layout.grid
        if kind == "video":
            pixels = self.video.frames(np.asarray(media))
        else:
            image = media if isinstance(media, Image.Image) else Image.fromarray(np.asarray(media)[0])
            pixels = self.image.cut(to_rgb(image), columns, rows)
        return {"pixels": pixels, "patch_index": np.tile(self.image.index, tiles)}

    def show(self, part: Part, role: str, layout: MediaLayout) -> list[ChatSpan]:
        """Return the text of an image or video in the prompt. Each frame of a video has a label such as "Frame1: "."""
        if part.kind != "video":
            return self.template.show(part, role)
        spans: list[ChatSpan] = []
        for number in range(1, len(layout.tokens) + 1):
            spans += [ChatSpan(f"Frame{number}: ", role), *self.template.show(part, role)]
        return spans

    def positions(self, length: int, spans: Sequence[tuple[int, int]], layouts: Sequence[MediaLayout]) -> np.ndarray:
        check_rope_length(length, self.max_length)
        return np.arange(length)

    def named_tokens(self) -> dict[str, str]:
        return {
            "start_image_token": OPEN,
            "end_image_token": CLOSE,
            "context_image_token": CONTEXT,
            "video_token": VIDEO,
        }

    def save_preprocessor(self, folder: Path) -> None:
        write_tiles(folder, self.image, self.video, self.sampling)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class TileCutter:
    """Cut an image into `least` to `most` tiles of `size` x `size` pixels. Several tiles are followed by the
    scaled-down image.

    Patches of a tile are in block order, so patches that are merged into a token are adjacent. A patch of zeros comes
    first. It is a placeholder of the class token.
    """

    size: int
    patch: int
    merge: int
    least: int = 1
    most: int = 12
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    scale: float = 1 / 255

    @property
    def side(self) -> int:
        return self.size // self.patch

    @property
    def tile_patches(self) -> int:
        """Return the number of patches of a tile, class token included."""
        return self.side**2 + 1

    @property
    def tokens(self) -> int:
        return (self.side // self.merge) ** 2

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of columns and rows of tiles whose aspect ratio is nearest to the image's.

        If several are equally near, return the largest one that the image fills by more than half, else the first one.
        """
        if self.most == 1:
            return 1, 1
        aspect, area = width / height, width * height
        nearest, best = float("inf"), (1, 1)
        for columns, rows in self._arrangements:
            apart = abs(aspect - columns / rows)
            if apart < nearest or (apart == nearest and area > 0.5 * self.size**2 * columns * rows):
                nearest, best = apart, (columns, rows)
        return best

    def count(self, height: int, width: int) -> int:
        columns, rows = self.fit(height, width)
        return columns * rows + (columns * rows > 1)

    def cut(self, image: Image.Image, columns: int, rows: int) -> np.ndarray:
        """Return uint8 [patches, values] of the tiles, row by row, then of the scaled-down image."""
        size = self.size
        canvas = _resized(image, (columns * size, rows * size))
        tiles = canvas.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, _resized(image, (size, size))[None]])
        return self._patches_of(tiles)

    def frames(self, frames: np.ndarray) -> np.ndarray:
        """Return uint8 [patches, values] of a video [F, H, W, 3], with one tile per frame."""
        shape = (len(frames), self.size, self.size, 3)
        if frames.shape != shape:
            frames = np.stack([_resized(Image.fromarray(frame), (self.size, self.size)) for frame in frames])
        return self._patches_of(frames)

    @cached_property
    def index(self) -> np.ndarray:
        """Return the index of the position embedding of each patch in a tile."""
        positions = block_positions(self.side, self.side, self.merge)
        return np.concatenate([[0], 1 + positions[:, 0] * self.side + positions[:, 1]])

    def without_class_tokens(self, tiles: int) -> np.ndarray:
        """Return the indices of the patches of `tiles` tiles that become tokens: all except class tokens."""
        numbers = np.arange(tiles * self.tile_patches)
        return numbers[numbers % self.tile_patches > 0]

    def _patches_of(self, tiles: np.ndarray) -> np.ndarray:
        cut = self.patches.cut(np.ascontiguousarray(tiles), (len(tiles), self.side, self.side))
        rows = np.zeros((len(tiles), self.tile_patches, self.patches.width), dtype=np.uint8)
        rows[:, 1:] = cut.reshape(len(tiles), -1, self.patches.width)
        return rows.reshape(-1, self.patches.width)

    @cached_property
    def _arrangements(self) -> Sequence[tuple[int, int]]:
        """Return all allowed (columns, rows) of tiles, sorted by number of tiles, then by columns."""
        sides = range(1, self.most + 1)
        shapes = [(columns, rows) for columns in sides for rows in sides if self.least <= columns * rows <= self.most]
        return sorted(shapes, key=lambda shape: shape[0] * shape[1])

    @cached_property
    def patches(self) -> Patches:
        return Patches(1, self.size**2, self.patch, self.merge, 1, self.mean, self.std, self.scale)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for a worker process without cached tables, which it computes faster than they are sent."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))


def read_tiles(
    folder: Path, vision: InternVLVisionConfig, least: int | None, most: int | None
) -> tuple[TileCutter, TileCutter]:
    """Return the tile cutters of images and of videos. Values of the recipe override those of the folder.

    `crop_to_patches` is ignored: it is false in published folders, but transformers' processor still cuts tiles.
    """
    image_file, video_file = read_files(folder)
    if is_original(folder):  # the authors' preprocessor file describes one tile; config.json describes the tiling
        single = {"size": vision.image_size, "crop_size": vision.image_size, "do_center_crop": True}
        wrong = [key for key, value in single.items() if image_file.get(key, value) != value]
        if wrong:
            raise TesseraError(
                f"{wrong[0]} = {image_file[wrong[0]]!r} of preprocessor_config.json does not describe one tile: size "
                "and crop_size must be vision_config.image_size of config.json, and do_center_crop must be true",
                where=str(folder),
                code="media.preprocessor-mismatch",
            )
        image_file = {key: value for key, value in image_file.items() if key not in single} | tile_settings(folder)
    fewest = least or image_file.get("min_patches") or 1
    largest = most or image_file.get("max_patches") or max(12, fewest)
    if fewest > largest:
        raise TesseraError(
            f"min_tiles ({fewest}) is more than max_tiles ({largest})",
            where="data.processor",
            code="media.bounds-crossed",
        )
    image = _tiles(image_file, vision, folder / IMAGE_FILE)
    video = _tiles(video_file or image_file, vision, folder / VIDEO_FILE)
    return replace(image, least=fewest, most=largest), replace(video, least=1, most=1)


def write_tiles(folder: Path, image: TileCutter, video: TileCutter, sampling: VideoSampling) -> None:
    processor, side = {"processor_class": "InternVLProcessor"}, {"height": image.size, "width": image.size}
    image_fields = {
        **processor,
        "image_processor_type": "GotOcr2ImageProcessor",
        **pixel_fields(image.patches),
        "size": side,
        "crop_to_patches": image.most > 1,
        "min_patches": image.least,
        "max_patches": image.most,
    }
    video_fields = {
        **processor,
        "video_processor_type": "InternVLVideoProcessor",
        **pixel_fields(video.patches),
        "size": side,
        # transformers uses all frames unless num_frames is set. fps and its bounds are written so that Tessera can read
        # them.
        "do_sample_frames": sampling.frames is not None,
        **sampling_fields(sampling),
    }
    write_json(folder / IMAGE_FILE, image_fields)
    write_json(folder / VIDEO_FILE, video_fields)
    write_json(folder / BOTH_FILE, {**processor, "image_seq_length": image.tokens})


def _tiles(data: Mapping[str, Any], vision: InternVLVisionConfig, path: Path) -> TileCutter:
    side = vision.image_size
    check_fields(data, path, size={"height": side, "width": side}, do_center_crop=False)
    return TileCutter(side, vision.patch_size, vision.spatial_merge_size, **read_norm(data, path))
