"""Tiny feature models with random weights, and folders of drawn images and videos to score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from tessera.diffusion.sampling.files import encoded
from tessera.evaluation.generation.inception import Inception
from tests.toys.pipeline_components import clip_words

PROMPTS = ("a red kite", "the dog", "a cat")


def _stronger(model: nn.Module) -> nn.Module:
    """Make random weights large enough that embeddings of different inputs differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def write_clip(folder: Path, seed: int = 0) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    torch.manual_seed(seed)
    words = clip_words()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    text = {**sizes, **ends, "vocab_size": 64, "max_position_embeddings": 16}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    model = _stronger(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)))
    model.save_pretrained(folder)  # type: ignore[operator]
    words.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28).save_pretrained(folder)
    return folder


def write_dinov2(folder: Path) -> Path:
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    _stronger(Dinov2Model(Dinov2Config(**sizes))).save_pretrained(folder)  # type: ignore[operator]
    BitImageProcessorPil(size={"shortest_edge": 28}, crop_size=28).save_pretrained(folder)
    return folder


def inception_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a random state dict with the names of the published file."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in Inception().state_dict().items():
        if tensor.ndim == 4:
            tensor = torch.randn(tensor.shape, generator=chance) * (2 / tensor[0].numel()) ** 0.5
        elif name.endswith("running_var") or (name.endswith("weight") and tensor.ndim == 1):
            tensor = torch.rand(tensor.shape, generator=chance) + 0.5
        tensors[name] = tensor
    return tensors


def drawn(seed: int, frames: int = 1, height: int = 40, width: int = 32) -> np.ndarray:
    """Return a patch of a colour that moves over a gradient."""
    chance = np.random.default_rng(seed)
    color, ground = chance.integers(0, 256, (2, 3))
    top, start, speed = *chance.integers(0, 16, 2), 2
    video = np.zeros((frames, height, width, 3), np.uint8)
    for number, frame in enumerate(video):
        frame[:] = (ground * np.linspace(0.3, 1, height)[:, None, None]).astype(np.uint8)
        frame[top : top + 16, start + speed * number : start + speed * number + 12] = color
    return video


def write_images(folder: Path, count: int, first: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.fromarray(drawn(first + number)[0]).save(folder / f"{number:03d}.png")
    return folder


def write_clips(folder: Path, count: int, frames: int = 5, suffix: str = ".mp4") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:03d}{suffix}").write_bytes(encoded(drawn(number, frames), suffix, 8.0))
    return folder
