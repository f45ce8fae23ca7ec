"""Conversations with pictures and clips -> what a LLaVA model reads, and back to text.

Pixels are those of the reference's Pillow preprocessors bit for bit; frames of clips take the same road (the reference
resizes clips with torchvision, whose bicubic filter differs from Pillow's by rounding).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from pydantic import Field

from tessera.core.config import build
from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, PartKind
from tessera.data.chat import ChatTemplate, MediaWords, Turn
from tessera.data.media.images import to_rgb
from tessera.data.patches import Patches
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, read_chat_template, write_tokenizer
from tessera.models._chat.options import ClipOptions
from tessera.models._chat.processor import ConversationProcessor, View, check_words
from tessera.models.llava.config import LlavaConfig
from tessera.models.llava.files import read_squares, write_files
from tessera.models.llava.pictures import Squares
from tessera.models.llava.tiles import Made, Tiles

_LINES: dict[PartKind, MediaWords] = {
    "image": MediaWords("<image>", after="\n"),
    "video": MediaWords("<video>", after="\n"),
}
CHATML = ChatTemplate(special=("<|im_start|>", "<|im_end|>"), media=_LINES, system=None, media_first=True)
# The template that the hub's first OneVision folders carry: a space after the role, and line ends before texts. A model
# goes on from "assistant\n" there too, so that is how its turns are written.
SPACED = replace(
    CHATML,
    turns={
        "assistant": Turn("<|im_start|>assistant\n", "<|im_end|>"),
        "": Turn("<|im_start|>{role} ", "<|im_end|>", text_before="\n"),
    },
    media={"image": MediaWords("<image>"), "video": MediaWords("<video>")},
)
_SPACED = re.compile(r"<\|im_start\|>('\s*\+\s*message(\['role'\]|\.role)\s*\+\s*' '|\{\{ message\.role \}\} )")
# As the hub's 1.5 folders write it, and with the end of text that the model was trained to end its answers with.
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


class LlavaOptions(ClipOptions):
    """The `data.processor` section of a recipe. What is left out comes from the model's folder, if it says."""

    max_frames: int = Field(
        32, gt=0, le=10**6, description="taken even from a long clip: as many as OneVision was trained with"
    )


@dataclass(frozen=True, eq=False)
class LlavaProcessor(ConversationProcessor):
    meaning: ClassVar[str] = "llava 1"
    axes: ClassVar[int] = 1

    config: LlavaConfig
    squares: Squares
    tiles: Tiles | None

    @classmethod
    def load(cls, config: LlavaConfig, folder: Path, **options: Any) -> LlavaProcessor:
        folder = Path(folder)
        chosen = build(LlavaOptions, options, "data.processor")
        encoder = PieceEncoder(load_tokenizer(folder))
        jinja = read_chat_template(folder)
        template = _template(encoder, config, jinja, folder)
        if "system" in chosen.model_fields_set:
            template = replace(template, system=chosen.system)
        elif jinja is not None:
            template = replace(template, system=template.system_in(jinja))
        ids = {"<image>": config.image_token_id}
        tiles = None
        if config.tiles is not None and config.video_token_id is not None:
            ids["<video>"] = config.video_token_id
            tiles = Tiles(config.vision.side, config.vision.image_size, config.tiles.pinpoints, config.tiles.most)
        check_words(encoder, template, ids, config.text.vocab_size, folder)
        sampling = replace(chosen.sampling(folder), multiple=1)
        squares = read_squares(folder, config)
        return cls(encoder, template, sampling, chosen.train_on, False, config, squares, tiles)

    def facts(self) -> list[Any]:
        return [asdict(self.squares), None if self.tiles is None else asdict(self.tiles), self.config.features]

    # ------------------------------------------------------------------------------------------ pictures

    def target(self, kind: PartKind, size: MediaSize) -> tuple[int, int] | None:
        if kind == "video":
            return self.squares.size, self.squares.size
        # Tiles and bars are made of the picture as it is.
        return None if self.tiles is not None or self.squares.pad else self.squares.resized(size.width, size.height)

    def views(self, kinds: Sequence[PartKind], sizes: Sequence[MediaSize]) -> list[View]:
        """A picture that is the only one of its conversation is seen in tiles."""
        alone = list(kinds).count("image") == 1
        return [
            self._tiled(size) if alone and kind == "image" and self.tiles is not None else self.view(kind, size)
            for kind, size in zip(kinds, sizes, strict=True)
        ]

    def view(self, kind: PartKind, size: MediaSize) -> View:
        if self.tiles is None:
            return self._view(1, (1, 0, 0), None)
        if kind == "video":
            return self._view(size.frames, (size.frames, 0, 0), self.tiles.clip(size.frames))
        return self._view(1, (1, 0, 0), self.tiles.one())

    def _tiled(self, size: MediaSize) -> View:
        assert self.tiles is not None
        down, across = self.tiles.grid(size.height, size.width)
        return self._view(1 + down * across, (1, down, across), self.tiles.single(size.height, size.width))

    def _view(self, squares: int, grid: tuple[int, int, int], made: Made | None) -> View:
        """`grid`: frames, and tiles down and across; no tiles for what is one square each."""
        patches, first = self.config.vision.patches, self.config.first_feature
        kept = None
        if first:
            kept = np.delete(np.arange(squares * patches).reshape(squares, patches), 0, axis=1).reshape(-1)
        return View(
            tokens=(squares * self.config.features if made is None else len(made.index),),
            pieces=(patches,) * squares,
            grid=grid,
            kept=kept,
            index=None if made is None else made.index,
            weights=None if made is None else made.weights,
        )

    @property
    def bytes_mean(self) -> Patches:
        return self.squares.patches

    def pixels(self, kind: PartKind, media: Any, view: View) -> dict[str, np.ndarray]:
        _, down, across = view.grid
        if kind == "video":
            seen = np.stack([self.squares.stretched(Image.fromarray(frame)) for frame in np.asarray(media)])
        elif down:
            seen = self.squares.tiled(to_rgb(media), down, across)
        elif self.tiles is not None:
            seen = self.squares.stretched(self.squares.padded(to_rgb(media)))[None]
        else:
            seen = self.squares.square(to_rgb(media))[None]
        return {
            "pixels": self.squares.cut(seen),
            "patch_index": np.tile(np.arange(self.config.vision.patches), len(seen)),
        }

    def positions(self, length: int, spans: Sequence[tuple[int, int]], views: Sequence[View]) -> np.ndarray:
        return np.arange(length)

    # ------------------------------------------------------------------------------------------ files

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.template.begin:
            self._save_llama_tokenizer(folder)

    def _save_llama_tokenizer(self, folder: Path) -> None:
        """Its tokenizer writes the beginning itself, so that templates of these folders leave it out."""
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

        found = Tokenizer.from_str(self.encoder.json).encode("a").ids
        return found[:1] == [self.encoder.find(self.template.begin)]

    def save_preprocessor(self, folder: Path) -> None:
        write_files(folder, self.config, self.squares, self.sampling)


def _template(encoder: PieceEncoder, config: LlavaConfig, jinja: str | None, folder: Path) -> ChatTemplate:
    chatml = SPACED if jinja is not None and _SPACED.search(jinja) else CHATML
    if config.tiles is None:
        chatml = replace(chatml, media={"image": chatml.media["image"]})
    for template in (chatml, VICUNA):
        if all(encoder.find(word) is not None for word in template.special):
            return template
    raise TesseraError(
        "the tokenizer has the special words of no conversation this family knows",
        where=str(folder / "tokenizer.json"),
        allowed=[" ".join(one.special) for one in (chatml, VICUNA)],
        fix="use the tokenizer of an instruction-tuned model",
    )
