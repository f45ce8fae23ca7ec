"""Conversations with pictures and clips -> what an InternVL model reads, and back to text.

Pixels are those of the reference's Pillow preprocessor bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.core.config import build
from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, Part, PartKind
from tessera.data.chat import ChatTemplate, MediaWords, Piece
from tessera.data.media.images import to_rgb
from tessera.data.patches import Patches
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template
from tessera.models._chat.options import ClipOptions
from tessera.models._chat.processor import ConversationProcessor, View, check_words
from tessera.models.internvl.config import InternVLConfig
from tessera.models.internvl.preprocessor_files import read_tiles, write_tiles
from tessera.models.internvl.tiles import Tiles

CONTEXT, OPEN, CLOSE, VIDEO = "<IMG_CONTEXT>", "<img>", "</img>", "<video>"
# Folders write one word for a picture or clip; transformers' processor spells it out as we do here.
QWEN = ChatTemplate(
    special=("<|im_start|>", "<|im_end|>", OPEN, CLOSE),
    media={
        "image": MediaWords(CONTEXT, OPEN, CLOSE + "\n", mark=CONTEXT + "\n"),
        "video": MediaWords(CONTEXT, OPEN, CLOSE + "\n", mark=VIDEO + "\n"),
    },
    system=None,
)
# With the words of InternLM, whose tokenizer puts a word before everything.
INTERNLM = replace(QWEN, special=("<s>", *QWEN.special), begin="<s>", end_of_text="</s>")


class TileOptions(ClipOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    min_tiles: int | None = Field(None, gt=0, le=10**6, description="a picture is cut into so many tiles at least")
    max_tiles: int | None = Field(
        None, gt=0, le=10**6, description="and so many at most, beside one of the whole; 1: never cut"
    )
    fps: float = Field(1.0, ge=1e-6, le=1e6, description="frames taken from each second of a clip")
    max_frames: int = Field(32, gt=0, le=10**6, description="taken even from a long clip")


@dataclass(frozen=True, eq=False)
class InternVLProcessor(ConversationProcessor):
    meaning: ClassVar[str] = "internvl 2"
    axes: ClassVar[int] = 1

    image: Tiles
    video: Tiles
    longest: int | None

    @classmethod
    def load(cls, config: InternVLConfig, folder: Path, **options: Any) -> InternVLProcessor:
        folder = Path(folder)
        chosen = build(TileOptions, options, "data.processor")
        encoder = PieceEncoder(load_tokenizer(folder))
        internlm = encoder.find(QWEN.end_of_text) is None and encoder.find("<s>") is not None
        template, jinja = INTERNLM if internlm else QWEN, read_chat_template(folder)
        if "system" in chosen.model_fields_set:
            template = replace(template, system=chosen.system)
        elif jinja is not None:
            template = replace(template, system=template.system_in(jinja))
        check_words(encoder, template, {CONTEXT: config.image_token_id}, config.text.vocab_size, folder)
        image, video = read_tiles(folder, config.vision, chosen.min_tiles, chosen.max_tiles)
        sampling = replace(chosen.sampling(folder), multiple=1, rule="middles")
        return cls(encoder, template, sampling, chosen.train_on, False, image, video, config.longest)

    def facts(self) -> list[Any]:
        return [asdict(self.image), asdict(self.video), self.longest]

    def view(self, kind: PartKind, size: MediaSize) -> View:
        if kind == "video":
            grid, tiles, tokens = (size.frames, 1, 1), size.frames, (self.video.tokens,) * size.frames
        else:
            tiles = self.image.count(size.height, size.width)
            grid, tokens = (tiles, *self.image.fit(size.height, size.width)), (tiles * self.image.tokens,)
        return View(tokens, (self.image.rows,) * tiles, grid, kept=self.image.kept(tiles))

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        """Of a picture that is cut nothing is left out: its tiles and the one of the whole are made from all of it."""
        if kind == "image" and self.image.fit(size.height, size.width) != (1, 1):
            return None
        return self.image.size, self.image.size

    @property
    def bytes_mean(self) -> Patches:
        return self.image.patches

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        tiles, columns, rows = view.grid
        if kind == "video":
            pixels = self.video.frames(np.asarray(media))
        else:
            picture = media if isinstance(media, Image.Image) else Image.fromarray(np.asarray(media)[0])
            pixels = self.image.cut(to_rgb(picture), columns, rows)
        return {"pixels": pixels, "patch_index": np.tile(self.image.index, tiles)}

    def show(self, part: Part, role: str, view: View) -> list[Piece]:
        """A clip is its frames one by one, with their numbers."""
        if part.kind != "video":
            return self.template.show(part, role)
        pieces: list[Piece] = []
        for number in range(1, len(view.tokens) + 1):
            pieces += [Piece(f"Frame{number}: ", role), *self.template.show(part, role)]
        return pieces

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        if self.longest is not None and length > self.longest:
            raise TesseraError(
                f"a sample of {length} tokens, the model is computed alike up to {self.longest}",
                where="model.config.dynamic_rope_factor",
                fix="leave such samples out, or set it to null to have positions as they are at any length",
            )
        return np.arange(length)

    def named_words(self) -> dict[str, str]:
        return {
            "start_image_token": OPEN,
            "end_image_token": CLOSE,
            "context_image_token": CONTEXT,
            "video_token": VIDEO,
        }

    def save_preprocessor(self, folder: Path) -> None:
        write_tiles(folder, self.image, self.video, self.sampling)
