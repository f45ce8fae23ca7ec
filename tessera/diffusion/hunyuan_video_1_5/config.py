"""The configuration of HunyuanVideo 1.5, with the fields of `HunyuanVideo15Transformer3DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import Captions
from tessera.diffusion.edit_images import resized
from tessera.diffusion.family import GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import MarkedFrameChannels
from tessera.diffusion.hunyuan_video.config import HunyuanConfig, HunyuanVideoFamily
from tessera.nn.joint_transformer import TransformerShape

# Part of the caption template, written exactly as published. Embeddings of tokens before the caption are dropped.
_ASPECTS = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
TEMPLATE = (
    f"<|im_start|>system\n{(' ' * 9).join(_ASPECTS)}<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class HunyuanVideo15Family(HunyuanVideoFamily):
    """Resize a conditioning image and crop its centre to the size of the video."""

    def fit_image(self, image: Image.Image, height: int, width: int) -> Image.Image:
        if image.width * height > image.height * width:  # the image is wider than the video
            size = image.width * height // image.height, height
        else:
            size = width, image.height * width // image.width
        start, top = (size[0] - width) // 2, (size[1] - height) // 2
        return resized(image, size).crop((start, top, start + width, top + height))


class HunyuanVideo15Config(HunyuanConfig):
    class_name: ClassVar[str] = "HunyuanVideo15Transformer3DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HunyuanConfig.fixed, "use_meanflow": (False,)}

    in_channels: int = Field(65, gt=0, le=10**6)
    out_channels: int = Field(32, gt=0, le=10**6)
    num_attention_heads: int = Field(16, gt=0, le=10**5)
    num_layers: int = Field(54, gt=0, le=10**4)
    patch_size: int = Field(1, gt=0, le=1024)
    text_embed_dim: int = Field(3584, gt=0, le=10**7)
    text_embed_2_dim: int = Field(1472, gt=0, le=10**7)
    image_embed_dim: int = Field(1152, gt=0, le=10**7)
    target_size: int = Field(640, gt=0, le=10**6, description="side length in pixels for which the model was trained")
    task_type: str = "i2v"

    @property
    def shape(self) -> TransformerShape:
        return self.transformer(single=0)

    def generation(self) -> GenerationFamily:
        rows, columns = (480, 848) if self.target_size <= 640 else (720, 1280)
        from_image = self.task_type == "i2v"
        return HunyuanVideo15Family(
            channels=self.out_channels,
            patch=self.patch,
            joint=True,
            whole_text=True,
            # The published pipeline also encodes quoted words with a second encoder (`text_2`). Batches without
            # `text_2` are treated as captions without quoted words.
            captions=(Captions(length=1000, template=TEMPLATE, blank=" ", skip=108, layer=-3),),
            images=MarkedFrameChannels(required=from_image),
            image_embeds=from_image,
            sampling=SamplingDefaults(rows, columns, 121, 24.0, guidance=6.0),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        text = batch["text"][None]
        return {
            "hidden_states": latents[None],
            "timestep": batch["timesteps"],
            "encoder_hidden_states": text,
            "encoder_attention_mask": torch.ones(text.shape[:2]),
            # Inputs of a sample without quoted words (masked) and without an image (zeros).
            "encoder_hidden_states_2": text.new_zeros(1, 1, self.text_embed_2_dim),
            "encoder_attention_mask_2": torch.zeros(1, 1),
            "image_embeds": text.new_zeros(1, 1, self.image_embed_dim),
        }
