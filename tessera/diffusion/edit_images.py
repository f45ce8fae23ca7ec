"""Show the images to edit to a text encoder that reads them, too: their sizes, token ids and patches.

Training, features and sampling do it here: an image is resized as the published pipeline does it, cut into patches, and
stands in the caption's template as so many tokens. Sizes and token counts follow from headers alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.diffusion.captions import CaptionEncoder
from tessera.diffusion.forms import EditForm, GenerationForm
from tessera.diffusion.pipeline_parts import TextEmbedding, TextEncoder
from tessera.errors import TesseraError, foreign_values
from tessera.models.files.preprocessor_files import GridFiles, read_json
from tessera.models.files.side_files import BOTH_FILE, IMAGE_FILE, copy_side_files
from tessera.models.vision.patches import Patches
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CLASS_NAME, CONFIG_FILE, DiffusersFolder

Size = tuple[int, int]  # width and height, in pixels
SHOWN, SHOWN_GRIDS = "shown", "shown_grids"  # of a batch: patches of bytes [P, W], and their grid by image [N, 3]
SAVED_FILE = "edit_pipeline.json"  # of a run: which pipeline its model belongs to, and how images are cut
_GEOMETRY = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}  # as the class has it by default
EMPTY_IDS = "empty_ids"  # of a batch: token ids of the empty caption, with the images of its sample


def edit_form(folder: Path | None, form: GenerationForm) -> EditForm | None:
    """Return how the pipeline in a folder reads images to edit; None: it is none whose text encoder reads them."""
    if folder is None or not form.edit:
        return None
    if DiffusersFolder.detect(folder):
        return form.edit_of(DiffusersFolder(folder).index.get(CLASS_NAME))
    known = (read_json(folder / one.processor / SAVED_FILE).get(CLASS_NAME) for one in form.edit)
    return next((found for found in map(form.edit_of, known) if found is not None), None)


def reference_size(width: int, height: int, pixels: int, multiple: int) -> Size:
    """Return the size of about so many pixels in an image's aspect ratio, with sides that are such multiples."""
    ratio = width / height
    wide = math.sqrt(pixels * ratio)
    found = round(wide / multiple) * multiple, round(wide / ratio / multiple) * multiple
    if not all(found):
        raise TesseraError(f"an image to edit of {width}x{height} is too long and narrow")
    return found


def resized(image: Image.Image, size: Size) -> Image.Image:
    """Return an image to edit in this size, by the filter of the published pipelines."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class _Geometry:
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int


@dataclass(frozen=True)
class EditImages:
    """Resize images to edit and cut them into patches for a text encoder. `pixels`: of what the VAE encodes; None: as
    many as in the published pipeline."""

    form: EditForm
    patches: Patches
    pixels: int | None = None

    @staticmethod
    def load(folder: Path, form: EditForm, pixels: int | None = None) -> EditImages:
        """Return those of a diffusers folder."""
        own, encoder = folder / form.processor, folder / form.text.encoder
        if not any((own / name).is_file() for name in (IMAGE_FILE, BOTH_FILE)):
            raise TesseraError(
                f"{form.pipeline} reads the images to edit, and nothing says how they are prepared for it",
                where=str(own),
                fix=f"copy {IMAGE_FILE} of the published folder there",
            )
        with foreign_values(str(encoder)):
            saved = read_json(own / SAVED_FILE)
            vision = saved or read_json_mapping(encoder / CONFIG_FILE)["vision_config"]
            geometry = _Geometry(*(int(vision.get(name, usual)) for name, usual in _GEOMETRY.items()))
        with foreign_values(str(own)):
            patches, _ = GridFiles().read(own, geometry, image_bounds=(None, None), video_bounds=(None, None))
        return EditImages(form, patches, pixels)

    def save(self, source: Path, folder: Path) -> None:
        """Write what `load` reads of `source` to a folder that has no more of a pipeline than its processor."""
        own = folder / self.form.processor
        copy_side_files(source / self.form.processor, own)
        sizes = (self.patches.patch, self.patches.merge, self.patches.temporal)
        settings = {CLASS_NAME: self.form.pipeline, **dict(zip(_GEOMETRY, sizes, strict=True))}
        (own / SAVED_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def size(self, width: int, height: int) -> Size:
        """Return the size in which the VAE encodes an image."""
        return reference_size(width, height, self.pixels or self.form.pixels, self.form.multiple)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the grid of patches that the text encoder reads of an image of this size."""
        shown = self._shown_size(width, height)
        return self.patches.grid(shown[1], shown[0])

    def tokens(self, width: int, height: int) -> int:
        """Return how many tokens an image is for the text encoder."""
        return self.patches.tokens(self.grid(width, height))

    def cut(self, image: Image.Image) -> Tensor:
        """Return the patches of an image, bytes [P, W]."""
        shown = resized(image, self._shown_size(*image.size))
        return torch.from_numpy(self.patches.cut([shown], self.grid(*image.size)))

    def _shown_size(self, width: int, height: int) -> Size:
        if self.form.shown_pixels is None:
            return self.size(width, height)
        return reference_size(width, height, self.form.shown_pixels, self.form.multiple)

    def blank(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return patches and grid of the smallest image, which is one token."""
        side = self.patches.merge
        grid = torch.tensor([[1, side, side]], device=device)
        return torch.zeros(side**2, self.patches.width, dtype=torch.uint8, device=device), grid

    @cached_property
    def _affine(self) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.patches.affine))

    def encode(
        self, encoder: TextEncoder, captions: Sequence[Tensor], shown: Tensor, grids: Tensor
    ) -> list[TextEmbedding]:
        """Return what the text encoder makes of captions, as token ids, with their images in the captions' order.

        The kind of every token is told: without it, transformers counts the positions of image tokens as those of text,
        and not along rows and columns, as the published models have learned them.
        """
        longest = max(len(ids) for ids in captions)
        ids = captions[0].new_full((len(captions), longest), encoder.pad)
        mask = torch.zeros_like(ids)
        for row, kept, caption in zip(ids, mask, captions, strict=True):
            row[: len(caption)], kept[: len(caption)] = caption, 1
        image: int = encoder.encoder.config.image_token_id  # type: ignore[union-attr, assignment]
        scale, offset = self._affine.to(shown.device).unbind()
        states, _ = encoder(
            ids,
            mask,
            pixel_values=(shown * scale + offset).to(next(encoder.parameters()).dtype),
            image_grid_thw=grids,
            mm_token_type_ids=((ids == image) & (mask == 1)).int(),
            logits_to_keep=1,  # nobody reads them, nor what later tokens would
            use_cache=False,
        )
        return [
            TextEmbedding(state[self.form.text.skip : len(caption)], None)
            for state, caption in zip(states, captions, strict=True)
        ]


@dataclass(frozen=True)
class EditReader:
    """Turn a caption and the images to edit into token ids: every image stands there as so many tokens."""

    images: EditImages
    captions: CaptionEncoder

    @staticmethod
    def load(folder: Path, form: EditForm, pixels: int | None = None) -> EditReader:
        """Return the reader of a diffusers folder."""
        return EditReader(EditImages.load(folder, form, pixels), CaptionEncoder.load(folder, form.text))

    def ids(self, caption: str, sizes: Sequence[Size], *, may_be_empty: bool = False) -> list[int]:
        """Return the ids of a caption with images of these sizes. They are not cut: no published pipeline does."""
        form = self.images.form
        template, word = form.template(len(sizes)), self.captions.id_of(form.text.image)
        found = self.captions.ids(caption, may_be_empty=may_be_empty, template=template)
        if found.count(word) != len(sizes):  # type: ignore[arg-type]
            raise TesseraError(f"{form.text.tokenizer} has no word {form.text.image}, which stands for an image")
        counts = iter([self.images.tokens(*size) for size in sizes])
        return [one for id in found for one in ([id] * next(counts) if id == word else [id])]
