"""Embed given frames with the vision model of a diffusers folder, as models read them that continue images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError, foreign_values
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CONFIG_FILE

IMAGE_ENCODER = "image_encoder"
SIGLIP = "SiglipVisionModel"
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # mean and deviation of images
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class FrameForm:
    """Describe how frames are prepared for a vision model, and which of its states are the embeddings.

    SigLIP is shown a frame that is stretched to a square, and its output is read. CLIP is shown the middle of a frame,
    and the states before its last layer are read.
    """

    size: int  # of both sides, in pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stretched: bool


def image_processor_name(encoder: str) -> str:
    """Return the part of a diffusers folder that says how images are prepared for a class of vision models."""
    return "feature_extractor" if encoder == SIGLIP else "image_processor"


def read_frame_form(folder: Path, encoder: str, config: Any) -> FrameForm:
    """Return how frames are prepared for the vision model of a diffusers folder, of this class and configuration."""
    file = folder / image_processor_name(encoder) / "preprocessor_config.json"
    known = read_json_mapping(file) if file.is_file() else {}
    usual = (_HALF, _HALF) if encoder == SIGLIP else _CLIP
    with foreign_values(str(file)):
        size: Any = known.get("size" if encoder == SIGLIP else "crop_size") or config.image_size
        side = int(size["height"] if isinstance(size, Mapping) else size)
        keys = zip(("image_mean", "image_std"), usual, strict=True)
        mean, std = (tuple(float(one) for one in known.get(key) or plain) for key, plain in keys)
    return FrameForm(side, mean, std, encoder == SIGLIP)


def frame_embeddings(folder: Path | None) -> int:
    """Return how many embeddings the SigLIP model of a diffusers folder makes of a frame: one for each patch."""
    file = None if folder is None else folder / IMAGE_ENCODER / CONFIG_FILE
    if file is None or not file.is_file():
        raise TesseraError(
            "this model reads embeddings of the first frame, and no image encoder lies beside it",
            where="model.path" if file is None else str(file),
            fix="name the folder of a diffusers pipeline as model.path, or train on features (tessera data features)",
        )
    config = read_json_mapping(file)
    with foreign_values(str(file)):
        return (int(config["image_size"]) // int(config["patch_size"])) ** 2


class FrameEncoder(nn.Module):
    """Embed given frames, as models read them that continue images."""

    def __init__(self, encoder: nn.Module, form: FrameForm) -> None:
        super().__init__()
        self.encoder = encoder
        self.form = form

    def encode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the embeddings [M, D] of frames, uint8 [H, W, 3] each."""
        if not frames:
            return []
        dtype = next(self.encoder.parameters()).dtype
        pixels = torch.stack([prepared(frame, self.form) for frame in frames]).to(dtype)
        return list(self(pixels).unbind())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [B, M, D] of prepared pixels [B, 3, H, W]."""
        found = self.encoder(pixels, output_hidden_states=not self.form.stretched)
        states: Tensor = found.last_hidden_state if self.form.stretched else found.hidden_states[-2]
        return states


def prepared(frame: Tensor, form: FrameForm) -> Tensor:
    """Return a frame, uint8 [H, W, 3], resized, cropped around its middle where it is not stretched, and normalised."""
    tall = wide = side = form.size
    if not form.stretched:
        height, width = frame.shape[:2]
        scale = side / min(height, width)
        tall, wide = max(side, int(height * scale)), max(side, int(width * scale))
    image = frame.permute(2, 0, 1)[None].float()
    image = nn.functional.interpolate(image, (tall, wide), mode="bicubic", antialias=True)
    top, left = (tall - side) // 2, (wide - side) // 2
    image = image[0, :, top : top + side, left : left + side].round().clamp(0, 255) / 255
    mean, std = (torch.tensor(some, device=frame.device).view(3, 1, 1) for some in (form.mean, form.std))
    return (image - mean) / std
