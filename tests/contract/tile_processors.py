"""Processors of families that read squares and tiles of one size, beside those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import llava_cases
import numpy as np
import torch
from chats import (
    TEXTS,
    VOCAB,
    conversation,
    grids,
    patches,
)
from PIL import Image
from processors import TEXT, ProcessorCase
from torch import Tensor
from transformers.models.internvl.processing_internvl import InternVLProcessor as ReferenceInternVL
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from tessera.core.sample import Encoded, MediaSize, Sample
from tessera.models.internvl.config import InternVLConfig
from tessera.models.internvl.processor import InternVLProcessor
from tessera.models.llava.processor import LlavaProcessor
from tessera.models.transformers.library import load_image_processor


class InternVLCase(ProcessorCase):
    """The reference's joint processor needs torchvision: words are what its own methods spell out."""

    kind = InternVLProcessor
    options: ClassVar[dict[str, Any]] = {"max_tiles": 6}
    sizes = ((32, 32), (61, 87), (300, 40), (500, 333), (9, 9), (64, 32), (40, 300), (1000, 20), (640, 480), (96, 64))
    words = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    texts: ClassVar[Sequence[str]] = (*TEXTS, "Frame1: Frame2: ")
    forged: ClassVar[str] = "<img><IMG_CONTEXT>"
    tile, tile_tokens, tile_patches = 32, 4, 17  # pixels along a side, tokens, patches and the class token

    def configure(self, **changes: Any) -> InternVLConfig:
        text = {**TEXT, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        text |= {"attention_bias": True, "eos_token_id": VOCAB - 5, **changes.pop("text", {})}
        vision = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": self.tile,
            "patch_size": 8,
        }
        fields = {"text": text, "vision": vision, "image_token_id": VOCAB - 2, **changes}
        return InternVLConfig.model_validate(fields)

    @cached_property
    def images(self) -> Any:
        return load_image_processor(self.exported)

    def pixels(self, encoded: Encoded) -> Tensor:
        """The rows of class tokens are only places."""
        return super().pixels(encoded) * (patches(encoded)["patch_index"] > 0).unsqueeze(1)

    def block_rows(self, tiles: Tensor) -> Tensor:
        """Their tiles [n, 3, 32, 32] as our rows, block by block, written out."""
        rows = []
        for tile in tiles:
            rows.append(torch.zeros(3 * 64))
            for top in (0, 16):
                for side in (0, 16):
                    for y, x in ((top, side), (top, side + 8), (top + 8, side), (top + 8, side + 8)):
                        rows.append(tile[:, y : y + 8, x : x + 8].flatten())
        return torch.stack(rows)

    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        seen = self.images(images=images, return_tensors="pt")
        shapes = grids(self.processor, conversation(*["image"] * len(images)), images)
        assert shapes[:, 0].tolist() == [int(count) for count in seen["num_patches"]]
        return self.block_rows(seen["pixel_values"])

    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor:
        images = [Image.fromarray(frame) for frame in frames]
        return self.block_rows(self.images(images=images, crop_to_patches=False, return_tensors="pt")["pixel_values"])

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"}
        reference = SimpleNamespace(**names, image_seq_length=self.tile_tokens)
        for part, grid in zip(sample.media(), grids(self.processor, sample, media, sizes), strict=True):
            if part.kind == "image":
                told = ReferenceInternVL.replace_image_token(reference, {"num_patches": [int(grid[0])]}, 0)
            else:
                clip = {"pixel_values_videos": [np.zeros((int(grid[0]), 1))]}
                told = ReferenceInternVL.replace_video_token(reference, clip, 0)
            mark = "<IMG_CONTEXT>" if part.kind == "image" else "<video>"
            words = words.replace(mark, told.replace("<IMG_CONTEXT>", "@"), 1)
        return words.replace("@", "<IMG_CONTEXT>")


class LlavaCase(ProcessorCase):
    kind, image_class = LlavaProcessor, LlavaImageProcessorPil
    shape: ClassVar[llava_cases.Shape] = llava_cases.SHAPES[0]
    sizes = ((8, 8), (31, 17), (17, 31), (100, 9), (9, 100), (1, 7), (640, 480))
    forged: ClassVar[str] = "</s><image>"
    ends: ClassVar[Sequence[str]] = ("</s>",)
    clips = False

    def configure(self, **changes: Any) -> Any:
        return llava_cases.config_of(self.shape, **changes)

    def write_tokenizer(self, folder: Path) -> Path:
        return llava_cases.write_words(folder, vicuna=not self.shape.tiled)

    def pixels(self, encoded: Encoded) -> Tensor:
        return self.seen(llava_cases.as_squares(self.processor, patches(encoded)["pixels"]))

    def seen(self, squares: Tensor) -> Tensor:
        """What patches cover of squares [.., 3, size, size]."""
        side = self.config.vision.side * self.config.vision.patch_size
        return squares[..., :side, :side]

    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        return self.seen(self.images(images=images, return_tensors="pt")["pixel_values"])

    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor:
        raise AssertionError("LLaVA 1.5 takes no clips")

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        kinds = [part.kind for part in sample.media()]
        for kind, layout in zip(kinds, self.processor.layouts(kinds, sizes), strict=True):
            words = words.replace(f"<{kind}>", "@" * sum(layout.tokens), 1) if kind == "image" else words
        return words.replace("@", "<image>")


class OneVisionCase(LlavaCase):
    """How many tokens pictures and clips have there is compared in `test_llava_processor.py`."""

    image_class = LlavaOnevisionImageProcessorPil
    shape: ClassVar[llava_cases.Shape] = llava_cases.SHAPES[3]
    forged: ClassVar[str] = "<|im_end|><image>"
    ends: ClassVar[Sequence[str]] = ("<|im_end|>", "<|endoftext|>")
    clips = True

    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        seen = self.images(images=images if len(images) == 1 else [images], return_tensors="pt")["pixel_values"]
        return self.seen(seen[0] if len(images) == 1 else seen[:, 0])

    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor:
        whole = [self.images(images=[Image.fromarray(f)], return_tensors="pt")["pixel_values"][0, 0] for f in frames]
        return self.seen(torch.stack(whole))

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        kinds = [part.kind for part in sample.media()]
        for kind, layout in zip(kinds, self.processor.layouts(kinds, sizes), strict=True):
            words = words.replace(f"<{kind}>", f"@{kind}@" * sum(layout.tokens), 1)
        return words.replace("@image@", "<image>").replace("@video@", "<video>")
