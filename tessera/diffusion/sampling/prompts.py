"""Turn prompts into embeddings with the tokenizers and text encoders of a diffusers folder, as its pipeline does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tessera.diffusion.captions import CaptionEncoder
from tessera.diffusion.edit_images import EditReader
from tessera.diffusion.forms import EditForm, TextForm
from tessera.diffusion.pipeline_parts import PipelineFolder, TextEmbedding, TextEncoder, joined
from tessera.errors import TesseraError, first_line, foreign_values
from tessera.weights.layouts import DiffusersFolder

_TOGETHER = 8  # prompts that are encoded in one call


class PromptEncoder:
    """Encode prompts with all text encoders of a folder. Encoders are in host memory between uses."""

    def __init__(self, parts: PipelineFolder, forms: Sequence[TextForm], device: torch.device, dtype: torch.dtype):
        self._parts, self._forms, self._device, self._dtype = parts, forms, device, dtype
        self._encoders: dict[str, TextEncoder] = {}
        self._captions: dict[TextForm, CaptionEncoder] = {}

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], frame: Image.Image | None = None, *, negative: bool = False
    ) -> list[TextEmbedding]:
        """Return the embeddings of each prompt, by all encoders together. `frame`: of an encoder that reads it, too;
        `negative`: whether the prompts are what is led away from, of which such an encoder gives other states."""
        found: list[list[TextEmbedding]] = [[] for _ in prompts]
        for form in self._forms:
            captions = self._captions_of(form)
            ids = [self._tensor(captions.cut(captions.ids(prompt, may_be_empty=True))) for prompt in prompts]
            encoder = self._encoder(form).to(self._device)
            for at in range(0, len(ids), _TOGETHER):
                part = ids[at : at + _TOGETHER]
                if form.shown is None or frame is None:
                    made = encoder.encode(part)
                else:
                    every = form.shown.negative_every if negative else None
                    made = encoder.encode(part, [self._prepared(frame)] * len(part), every)
                for number, embedding in enumerate(made, at):
                    found[number].append(embedding)
            encoder.to("cpu")
        return [joined(self._forms, one) for one in found]

    @torch.no_grad()
    def encode_with_images(
        self, form: EditForm, prompts: Sequence[str], images: Sequence[Image.Image], pixels: int
    ) -> list[TextEmbedding]:
        """Return the embeddings of prompts by an encoder that reads the images to edit, too."""
        reader = EditReader.load(self._parts.folder, form, pixels)
        sizes = [image.size for image in images]
        shown = torch.cat([reader.images.cut(image) for image in images]).to(self._device)
        grids = torch.tensor([reader.images.grid(*size) for size in sizes], device=self._device)
        encoder = self._encoder(next(own for own in self._forms if own.encoder == form.text.encoder)).to(self._device)
        found = []
        for prompt in prompts:
            ids = self._tensor(reader.ids(prompt, sizes, may_be_empty=True))
            found += reader.images.encode(encoder, [ids], shown, grids)
        encoder.to("cpu")
        return found

    def _prepared(self, frame: Image.Image) -> Tensor:
        """Return an image as the folder's own processor prepares it, [3, H, W]."""
        pixels: Tensor = image_processor(self._parts, "image_processor")(images=frame, return_tensors="pt").pixel_values
        return pixels[0].to(self._device)

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _captions_of(self, form: TextForm) -> CaptionEncoder:
        if form not in self._captions:
            self._captions[form] = CaptionEncoder.load(self._parts.folder, form)
        return self._captions[form]

    def _encoder(self, form: TextForm) -> TextEncoder:
        if form.encoder not in self._encoders:
            self._encoders[form.encoder] = self._parts.text_encoder(form, dtype=self._dtype).eval()
        return self._encoders[form.encoder]


def image_processor(parts: PipelineFolder, name: str) -> Any:
    """Return an image processor of a diffusers folder, made by transformers."""
    folder = DiffusersFolder(parts.folder).component_folder(name)
    try:
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise TesseraError(
            f"images are prepared by transformers, which is not installed: {first_line(error)}",
            where=str(folder),
            fix="pip install tessera-mm[hf]",
        ) from None
    try:
        with foreign_values(str(folder)):
            return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise TesseraError(f"{name} cannot be read: {first_line(error)}", where=str(folder)) from None
