"""Embed conditioning frames with the vision model of a diffusers folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError, foreign_values
from tessera.models.vision.patches import CLIP_MEAN, CLIP_STD
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CONFIG_FILE

IMAGE_ENCODER = "image_encoder"
SIGLIP = "SiglipVisionModel"
IMAGE_ENCODERS = ("CLIPVisionModel", "CLIPVisionModelWithProjection", SIGLIP)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class FrameForm:
    """Describe the preprocessing of frames for a vision model, and which of its hidden states are the embeddings.

    SigLIP: frames are stretched to a square; the embeddings are its output. CLIP: frames are center-cropped; the
    embeddings are the hidden states before the last layer.
    """

    size: int  # height and width in pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stretched: bool


def image_processor_name(encoder: str) -> str:
    """Return the folder name of the image processor in diffusers folders, for a class of vision models."""
    return "feature_extractor" if encoder == SIGLIP else "image_processor"


def read_frame_form(folder: Path, encoder: str, config: Any) -> FrameForm:
    """Read the preprocessing of frames from a diffusers folder. `encoder`, `config`: class and configuration of the
    vision model."""
    file = folder / image_processor_name(encoder) / "preprocessor_config.json"
    settings = read_json_mapping(file) if file.is_file() else {}
    defaults = (_HALF, _HALF) if encoder == SIGLIP else (CLIP_MEAN, CLIP_STD)
    with foreign_values(str(file)):
        size: Any = settings.get("size" if encoder == SIGLIP else "crop_size") or config.image_size
        side = int(size["height"] if isinstance(size, Mapping) else size)
        keys = zip(("image_mean", "image_std"), defaults, strict=True)
        mean, std = (tuple(float(value) for value in settings.get(key) or default) for key, default in keys)
    return FrameForm(side, mean, std, encoder == SIGLIP)


def frame_embeddings(folder: Path | None) -> int:
    """Return how many embeddings the SigLIP model of a diffusers folder computes for a frame: one for each patch."""
    file = None if folder is None else folder / IMAGE_ENCODER / CONFIG_FILE
    if file is None or not file.is_file():
        raise TesseraError(
            "this model needs embeddings of the first frame, and its folder has no image encoder",
            where="model.path" if file is None else str(file),
            fix="set model.path to the folder of a diffusers pipeline, or train on features (tessera data features)",
            code="generation.missing-image-encoder",
        )
    config = read_json_mapping(file)
    with foreign_values(str(file)):
        return (int(config["image_size"]) // int(config["patch_size"])) ** 2


class FrameEncoder(nn.Module):
    """Embed conditioning frames."""

    def __init__(self, encoder: nn.Module, form: FrameForm) -> None:
        super().__init__()
        self.encoder = encoder
        self.form = form

    def encode(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """Return the embeddings [M, D] of each frame. `frames`: uint8 [H, W, 3], or normalized floats [3, H, W]."""
        if not frames:
            return []
        ready = [frame if frame.is_floating_point() else prepared(frame, self.form) for frame in frames]
        return list(self(torch.stack(ready).to(next(self.encoder.parameters()).dtype)).unbind())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings [B, M, D] of normalized pixels [B, 3, H, W]."""
        outputs = self.encoder(pixels, output_hidden_states=not self.form.stretched)
        return outputs.last_hidden_state if self.form.stretched else outputs.hidden_states[-2]


def prepared(frame: Tensor, form: FrameForm) -> Tensor:
    """Return a frame, uint8 [H, W, 3], as a normalized square: stretched, or resized and center-cropped."""
    tall = wide = side = form.size
    if not form.stretched:
        height, width = frame.shape[:2]
        scale = side / min(height, width)
        tall, wide = max(side, int(height * scale)), max(side, int(width * scale))
    image = frame.permute(2, 0, 1)[None].float()
    image = nn.functional.interpolate(image, (tall, wide), mode="bicubic", antialias=True)
    top, start = (tall - side) // 2, (wide - side) // 2
    image = image[0, :, top : top + side, start : start + side].round().clamp(0, 255) / 255
    mean, std = (torch.tensor(values, device=frame.device).view(3, 1, 1) for values in (form.mean, form.std))
    return (image - mean) / std
