"""The processor of LLaVA: conversations with images and videos to batches, and tokens back to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.config.reader import build
from tessera.core.sample import MediaSize, PartKind
from tessera.data.media.images import to_rgb
from tessera.errors import foreign_values
from tessera.models.llava.config import LlavaConfig
from tessera.models.llava.preprocessing import (
    AnyResTiles,
    FeatureInterpolation,
    SquareImages,
    read_squares,
    write_files,
)
from tessera.models.processing.chat import ChatTemplate, MediaWords, Turn
from tessera.models.processing.conversation import check_special_tokens, first_template, with_system
from tessera.models.processing.grounding import BoxScale, Grounding
from tessera.models.processing.streams import MediaLayout
from tessera.models.processing.tokenizer import (
    ChatEncoder,
    load_tokenizer,
    read_chat_template,
    write_tokenizer,
)
from tessera.models.vision.patches import Patches
from tessera.models.vision.preprocessor_files import VideoOptions
from tessera.models.vision.processor import VisionProcessor

_LINES: dict[PartKind, MediaWords] = {
    "image": MediaWords("<image>", after="\n"),
    "video": MediaWords("<video>", after="\n"),
}
CHATML = ChatTemplate(special=("<|im_start|>", "<|im_end|>"), media=_LINES, system=None, media_first=True)
# Template of the first OneVision folders: a space after the role and a newline before the text. Answers have a newline
# alone, because the generation prompt ends with "assistant\n".
SPACED = replace(
    CHATML,
    turns={
        "assistant": Turn("<|im_start|>assistant\n", "<|im_end|>"),
        "": Turn("<|im_start|>{role} ", "<|im_end|>", text_before="\n"),
    },
    media={"image": MediaWords("<image>"), "video": MediaWords("<video>")},
)
_SPACED = re.compile(r"<\|im_start\|>('\s*\+\s*message(\['role'\]|\.role)\s*\+\s*' '|\{\{ message\.role \}\} )")
# Template of published LLaVA 1.5 folders, plus the end-of-text token after answers, as in training.
VICUNA = ChatTemplate(
    special=("<s>", "</s>"),
    turns={
        "system": Turn("", "", text_after=" "),
        "assistant": Turn("ASSISTANT:", "</s>", text_before=" "),
        "": Turn("USER: ", "", text_after=" "),
    },
    media={"image": MediaWords("<image>", after="\n")},
    begin="<s>",
    system=None,
    end_of_text="</s>",
    media_first=True,
)


class LlavaOptions(VideoOptions):
    """Declare the keys of `data.processor`. Missing keys get the values of the model's folder."""

    max_frames: int = Field(
        32, gt=0, le=10**6, description="largest number of frames of a video; OneVision was trained with 32"
    )


@dataclass(frozen=True, eq=False)
class LlavaProcessor(VisionProcessor):
    version: ClassVar[str] = "llava 1"
    axes: ClassVar[int] = 1
    grounding: ClassVar[Grounding | None] = Grounding(scale=1, decimals=2)

    config: LlavaConfig
    squares: SquareImages
    tiles: AnyResTiles | None

    @classmethod
    def load(cls, config: LlavaConfig, folder: Path, **options: Any) -> LlavaProcessor:
        folder = Path(folder)
        chosen = build(LlavaOptions, options, "data.processor")
        encoder = ChatEncoder(load_tokenizer(folder))
        template = with_system(_template(encoder, config, folder), chosen, folder)
        ids = {"<image>": config.image_token_id}
        tiles = None
        if config.tiles is not None and config.video_token_id is not None:
            ids["<video>"] = config.video_token_id
            tiles = AnyResTiles(config.vision.side, config.vision.image_size, config.tiles.pinpoints, config.tiles.most)
        check_special_tokens(encoder, template, ids, config.text.vocab_size, folder)
        sampling = replace(chosen.sampling(folder), multiple=1)
        with foreign_values(str(folder)):
            squares = read_squares(folder, config)
        return cls(encoder, template, sampling, chosen.train_on, False, config, squares, tiles)

    def fingerprint_fields(self) -> list[Any]:
        return [asdict(self.squares), None if self.tiles is None else asdict(self.tiles), self.config.features]

    # ------------------------------------------------------------------------------------------ images

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        if kind == "video":
            return self.squares.size, self.squares.size
        # Tiles and padding need the full resolution.
        return None if self.tiles is not None or self.squares.pad else self.squares.resized(size.width, size.height)

    def layouts(self, kinds: Sequence[PartKind], sizes: Sequence[MediaSize]) -> list[MediaLayout]:
        """Return the layouts of all media. An image is cut into tiles if its conversation has no other image."""
        alone = list(kinds).count("image") == 1
        return [
            self._tiled(size) if alone and kind == "image" and self.tiles is not None else self.layout(kind, size)
            for kind, size in zip(kinds, sizes, strict=True)
        ]

    def layout(self, kind: PartKind, size: MediaSize) -> MediaLayout:
        if self.tiles is None:
            return self._layout(1, (1, 0, 0), None)
        if kind == "video":
            return self._layout(size.frames, (size.frames, 0, 0), self.tiles.video(size.frames))
        return self._layout(1, (1, 0, 0), self.tiles.image())

    def _tiled(self, size: MediaSize) -> MediaLayout:
        assert self.tiles is not None
        down, across = self.tiles.grid(size.height, size.width)
        return self._layout(1 + down * across, (1, down, across), self.tiles.tiled_image(size.height, size.width))

    def _layout(
        self, squares: int, grid: tuple[int, int, int], interpolation: FeatureInterpolation | None
    ) -> MediaLayout:
        """Return a layout.

        `grid`: number of frames, tile rows and tile columns; the numbers of rows and columns are 0 without tiles.
        """
        patches, first = self.config.vision.patches, self.config.first_feature
        selected = None
        if first:
            selected = np.delete(np.arange(squares * patches).reshape(squares, patches), 0, axis=1).reshape(-1)
        return MediaLayout(
            tokens=(squares * self.config.features if interpolation is None else len(interpolation.index),),
            lengths=(patches,) * squares,
            grid=grid,
            selected=selected,
            feature_index=None if interpolation is None else interpolation.index,
            feature_weights=None if interpolation is None else interpolation.weights,
        )

    @property
    def pixel_norm(self) -> Patches:
        return self.squares.patches

    def elements(self, kind: PartKind, media: Any, layout: MediaLayout) -> dict[str, np.ndarray]:
        _, down, across = layout.grid
        if kind == "video":
            squares = np.stack([self.squares.stretched(Image.fromarray(frame)) for frame in np.asarray(media)])
        elif down:
            squares = self.squares.tiled(to_rgb(media), down, across)
        elif self.tiles is not None:
            squares = self.squares.stretched(self.squares.padded(to_rgb(media)))[None]
        else:
            squares = self.squares.square(to_rgb(media))[None]
        return {
            "pixels": self.squares.cut(squares),
            "patch_index": np.tile(np.arange(self.config.vision.patches), len(squares)),
        }

    def box_scale(self, size: MediaSize) -> BoxScale:
        """Return the scale of boxes. Boxes of LLaVA 1.5 are fractions of the image padded to a square."""
        if self.tiles is not None or not self.squares.pad:
            return super().box_scale(size)
        side = max(size.width, size.height)
        return BoxScale(1 / side, 1 / side, (side - size.width) // 2, (side - size.height) // 2)

    # ------------------------------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.template.begin:
            self._save_llama_tokenizer(folder)

    def _save_llama_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer that adds the beginning-of-text token, which is then removed from the chat template."""
        template = replace(self.template, begin="") if self._begins_itself() else self.template
        end = self.template.end_of_text
        pad = next((word for word in ("<pad>", "<unk>") if self.encoder.find(word) is not None), end)
        write_tokenizer(
            folder,
            self.encoder.json,
            chat_template=template.jinja(),
            end=end,
            pad=pad,
            kind="PreTrainedTokenizerFast",
            begin=self.template.begin,
        )

    def _begins_itself(self) -> bool:
        from tokenizers import Tokenizer

        ids = Tokenizer.from_str(self.encoder.json).encode("a").ids
        return ids[:1] == [self.encoder.find(self.template.begin)]

    def save_preprocessor(self, folder: Path) -> None:
        write_files(folder, self.config, self.squares, self.sampling)


def _template(encoder: ChatEncoder, config: LlavaConfig, folder: Path) -> ChatTemplate:
    """Return the first chat template whose special tokens the tokenizer has."""
    jinja = read_chat_template(folder)
    chatml = SPACED if jinja is not None and _SPACED.search(jinja) else CHATML
    if config.tiles is None:
        chatml = replace(chatml, media={"image": chatml.media["image"]})
    return first_template(encoder, (chatml, VICUNA), folder)
