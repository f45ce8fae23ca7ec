"""Turn given images into what a generation model reads: first and last frames, references, and their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tessera.data.media.files import Limits
from tessera.data.media.images import read_image, to_rgb
from tessera.diffusion.forms import GenerationForm, Grid
from tessera.diffusion.pipeline_parts import Autoencoder
from tessera.diffusion.sample_encoders import given_channels, patchify


def open_images(images: Sequence[str | Path | Image.Image]) -> list[Image.Image]:
    """Return the images, in RGB and upright, that paths lead to."""
    return [to_rgb(one) if isinstance(one, Image.Image) else read_image(Path(one), Limits()) for one in images]


def pixels_of(image: Image.Image, height: int, width: int) -> Tensor:
    """Return an image, uint8 [H, W, 3], in this size."""
    resized = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(resized))


def cropped(image: Image.Image, height: int, width: int) -> Image.Image:
    """Return the middle of an image that is resized to cover this size."""
    if image.width * height > image.height * width:  # wider than asked for
        cover = image.width * height // image.height, height
    else:
        cover = width, image.height * width // image.width
    resized = image if image.size == cover else image.resize(cover, Image.Resampling.LANCZOS)
    left, top = (cover[0] - width) // 2, (cover[1] - height) // 2
    return resized.crop((left, top, left + width, top + height))


def frame_condition(
    vae: Autoencoder,
    form: GenerationForm,
    first: Image.Image,
    last: Image.Image | None,
    size: Grid,
    device: torch.device,
) -> Tensor:
    """Return the channels [n, values] that tell a model the first (and the last) frame of a video. `size`: frames,
    height and width in pixels."""
    frames, height, width = size
    video = torch.zeros(frames, height, width, 3, dtype=torch.uint8)
    video[0] = pixels_of(first, height, width)
    if last is not None:
        video[-1] = pixels_of(last, height, width)
    shape = (form.channels, *vae.form.latent_shape(*size))
    return given_channels(form, vae, video.to(device), shape, "first" if last is None else "first_last")


def image_tokens(vae: Autoencoder, form: GenerationForm, pixels: Tensor, device: torch.device) -> tuple[Tensor, Grid]:
    """Return the latents of an image, uint8 [H, W, 3], as tokens [n, values], and their grid."""
    (latents,) = vae.encode([pixels.unsqueeze(0).to(device)])
    frames, rows, columns = (size // step for size, step in zip(latents.shape[1:], form.patch, strict=True))
    return patchify(latents, form.patch), (frames, rows, columns)
