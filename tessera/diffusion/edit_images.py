"""Prepare images to edit for a text encoder that reads them: sizes, token ids and patches.

Training, features and sampling share this code. An image is resized as in the published pipeline and cut into patches,
and each merged patch takes one token in the caption's template. Sizes and token counts follow from image headers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.diffusion.captions import Captions, CaptionTokenizer, TextEmbedding, TextEncoder
from tessera.errors import TesseraError, foreign_values
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, copy_side_files
from tessera.models.vision.patches import Patches
from tessera.models.vision.preprocessor_files import GridFiles, read_json
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CLASS_NAME, CONFIG_FILE, DiffusersFolder

Size = tuple[int, int]  # width and height, in pixels
SHOWN, SHOWN_GRIDS = "shown", "shown_grids"  # images to edit: uint8 patches [P, W], (time, rows, columns) [N, 3]
EMPTY_IDS = "empty_ids"  # batch tensor: token ids of the empty caption with the images of the sample
SAVED_FILE = "edit_pipeline.json"  # file in run folders: class of the pipeline, and sizes of patches
_GEOMETRY = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}  # defaults of Qwen2.5-VL


@dataclass(frozen=True)
class EditPipeline:
    """Describe how the text encoder of a published pipeline reads captions together with the images to edit."""

    pipeline: str  # class name of the pipeline in model_index.json
    captions: Captions  # how captions are read; it replaces the captions of the family
    image: str = ""  # the token of the template that stands for an image
    each: str = ""  # text for each image; the joined texts replace {images} in the template, {} is the image number
    shown_pixels: int | None = None  # area of an image resized for the text encoder; None: same size as for the VAE
    pixels: int = 1 << 20  # area of an image resized for the VAE
    multiple: int = 32  # height and width of resized images are multiples of this
    processor: str = "processor"  # folder name of the text encoder's image preprocessor

    def template(self, images: int, where: str | None = None) -> str:
        """Return the template for `images` images; raise if the pipeline reads another number of images."""
        template = self.captions.template
        if self.each:
            numbered = (self.each.replace("{}", str(number + 1)) for number in range(images))
            template = template.replace("{images}", "".join(numbered))
        if images < 1 or template.count(self.image) != images:
            number = "one or more" if self.each else str(max(1, self.captions.template.count(self.image)))
            raise TesseraError(
                f"{images or 'no'} images to edit were given; this model edits {number}",
                where=where,
                code="generation.wrong-edit-image-count",
            )
        return template

    def facts(self) -> dict[str, Any]:
        """Return the settings that stored features depend on, as JSON. The keys are part of the format of feature
        folders."""
        names = ("pipeline", "each", "shown_pixels", "pixels", "multiple", "processor")
        text = {"blank": "", "shown": None, **self.captions.facts(), "image": self.image}
        return {"text": text, **{name: getattr(self, name) for name in names}}


def edit_of_folder(folder: Path | None, edits: Sequence[EditPipeline]) -> EditPipeline | None:
    """Return how the text encoder in a pipeline folder reads images to edit; None if it reads only text."""
    if folder is None or not edits:
        return None
    if DiffusersFolder.detect(folder):
        names = [DiffusersFolder(folder).index.get(CLASS_NAME)]
    else:
        names = [read_json(folder / edit.processor / SAVED_FILE).get(CLASS_NAME) for edit in edits]
    return next((edit for edit in edits if edit.pipeline in names), None)


def reference_size(width: int, height: int, pixels: int, multiple: int) -> Size:
    """Return the size with about `pixels` pixels that keeps the aspect ratio. Both sides are multiples of
    `multiple`."""
    ratio = width / height
    wide = math.sqrt(pixels * ratio)
    size = round(wide / multiple) * multiple, round(wide / ratio / multiple) * multiple
    if not all(size):
        raise TesseraError(
            f"an image to edit has {width}x{height} pixels, which is too narrow to be resized",
            fix="crop the image",
            code="generation.edit-image-too-narrow",
        )
    return size


def resized(image: Image.Image, size: Size) -> Image.Image:
    """Return an image resized with the filter of the published pipelines."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class EditImages:
    """Resize images to edit and cut them into patches for a text encoder. `pixels`: area of images for the VAE; None:
    as in the published pipeline."""

    edit: EditPipeline
    patches: Patches
    pixels: int | None = None

    @staticmethod
    def load(folder: Path, edit: EditPipeline, pixels: int | None = None) -> EditImages:
        """Read the image preprocessor of a diffusers folder."""
        files, encoder = folder / edit.processor, folder / edit.captions.encoder
        if not any((files / name).is_file() for name in (IMAGE_FILE, BOTH_FILE)):
            raise TesseraError(
                f"the image preprocessor of the text encoder of {edit.pipeline} is missing",
                where=str(files),
                fix=f"copy {IMAGE_FILE} of the published folder there",
                code="generation.missing-image-preprocessor",
            )
        with foreign_values(str(encoder)):
            saved = read_json(files / SAVED_FILE)
            vision = saved or read_json_mapping(encoder / CONFIG_FILE)["vision_config"]
            patch, merge, temporal = (int(vision.get(name, default)) for name, default in _GEOMETRY.items())
        with foreign_values(str(files)):
            sizes = (patch, merge, temporal)
            patches, _ = GridFiles().read(files, sizes, image_bounds=(None, None), video_bounds=(None, None))
        return EditImages(edit, patches, pixels)

    def save(self, source: Path, folder: Path) -> None:
        """Copy the files that `load` needs from the folder `source` to a folder without the rest of the pipeline."""
        files = folder / self.edit.processor
        copy_side_files(source / self.edit.processor, files)
        sizes = (self.patches.patch, self.patches.merge, self.patches.temporal)
        settings = {CLASS_NAME: self.edit.pipeline, **dict(zip(_GEOMETRY, sizes, strict=True))}
        (files / SAVED_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def size(self, width: int, height: int) -> Size:
        """Return the size to which an image is resized for the VAE."""
        return reference_size(width, height, self.pixels or self.edit.pixels, self.edit.multiple)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the grid of patches of an image for the text encoder. `width`, `height`: original size of the
        image."""
        size = self._shown_size(width, height)
        return self.patches.grid(size[1], size[0])

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image in the text encoder."""
        return self.patches.tokens(self.grid(width, height))

    def cut(self, image: Image.Image) -> Tensor:
        """Return the patches of an image, uint8 [P, W]."""
        image_in_size = resized(image, self._shown_size(*image.size))
        return torch.from_numpy(self.patches.cut([image_in_size], self.grid(*image.size)))

    def _shown_size(self, width: int, height: int) -> Size:
        if self.edit.shown_pixels is None:
            return self.size(width, height)
        return reference_size(width, height, self.edit.shown_pixels, self.edit.multiple)

    def blank(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return patches and grid of the smallest possible image, which takes one token."""
        side = self.patches.merge
        grid = torch.tensor([[1, side, side]], device=device)
        return torch.zeros(side**2, self.patches.width, dtype=torch.uint8, device=device), grid

    @cached_property
    def _affine(self) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.patches.affine))

    def embeddings(self, ids: int) -> int:
        """Return the number of embeddings of a caption with images. `ids`: its number of token ids."""
        return max(0, ids - self.edit.captions.skip)

    def encode(
        self, encoder: TextEncoder, captions: Sequence[Tensor], patches: Tensor, grids: Tensor
    ) -> list[TextEmbedding]:
        """Return the embeddings of captions from their token ids. `patches`, `grids`: images of all captions, in the
        order of the captions."""
        ids, mask = encoder.padded(captions, max(map(len, captions)))
        scale, offset = self._affine.to(patches.device).unbind()
        states, _ = encoder(
            ids,
            mask,
            pixel_values=(patches * scale + offset).to(encoder.dtype),
            image_grid_thw=grids,
            # Without token types, transformers gives image tokens the positions of text. The published models were
            # trained with positions by row and column.
            mm_token_type_ids=((ids == encoder.image_token) & (mask == 1)).int(),
            logits_to_keep=1,  # only hidden states are used, so compute logits of a single token
            use_cache=False,
        )
        assert states is not None, "encoders of this kind return the states of tokens"
        skip = self.edit.captions.skip
        pairs = zip(states, captions, strict=True)
        return [TextEmbedding(state[skip : len(caption)], None) for state, caption in pairs]


@dataclass(frozen=True)
class EditReader:
    """Turn a caption and the images to edit into token ids. An image takes one token per merged patch."""

    images: EditImages
    tokenizer: CaptionTokenizer

    def ids(self, caption: str, sizes: Sequence[Size], *, may_be_empty: bool = False) -> list[int]:
        """Return the token ids of a caption with images of these sizes, not truncated, as in the published
        pipelines."""
        edit = self.images.edit
        template, image = edit.template(len(sizes)), self.tokenizer.id_of(edit.image)
        ids = self.tokenizer.ids(caption, may_be_empty=may_be_empty, template=template)
        if ids.count(image) != len(sizes):  # type: ignore[arg-type]
            raise TesseraError(
                f"{edit.captions.tokenizer} has no token {edit.image}, the placeholder of images",
                fix="use the tokenizer that belongs to this model",
                code="tokenizer.missing-image-token",
            )
        counts = iter([self.images.tokens(*size) for size in sizes])
        return [token for id in ids for token in ([id] * next(counts) if id == image else [id])]
