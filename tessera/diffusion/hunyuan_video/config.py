"""The configuration of HunyuanVideo, with the fields of `HunyuanVideoTransformer3DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import Captions, FrameCaptions
from tessera.diffusion.family import EvenLevels, GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import GivenImages, MarkedFrameChannels, ReplacedFrames
from tessera.diffusion.joint import JointConfig
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import GUIDANCE_UNIT, TransformerShape

# The template of captions. Embeddings of the template's tokens before the caption are dropped.
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


IMAGE_TEMPLATE = (
    TEMPLATE.replace("\n\nDescribe", "\n\n<image>\nDescribe", 1)
    .replace("aspects:", "aspects according to the reference image:", 1)
    .replace("video:<|eot_id|>", "video:<|eot_id|>\n\n", 1)
    + "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


class HunyuanVideoFamily(EvenLevels, GenerationFamily):
    """Sample at evenly spaced noise levels."""


class FromImageFamily(HunyuanVideoFamily):
    """Mix a small share of the conditioning image's latents into the noise of every frame."""

    image_share: ClassVar[float] = 0.001

    def mix_noise(self, noise: Tensor, image: Tensor | None, frames: int) -> Tensor:
        if image is None:
            return noise
        return noise * (1 - self.image_share) + image.to(noise).repeat(frames, 1) * self.image_share


class ConcatenatedImageFamily(FromImageFamily):
    """Drop the first frames of a generated video, which repeat the conditioning image."""

    def trim(self, video: Tensor) -> Tensor:
        return video[4:]


class HunyuanConfig(JointConfig):
    """Define the fields that HunyuanVideo and HunyuanVideo 1.5 share."""

    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"qk_norm": ("rms_norm",)}

    in_channels: int = Field(16, gt=0, le=10**6)
    out_channels: int = Field(16, gt=0, le=10**6)
    num_attention_heads: int = Field(24, gt=0, le=10**5)
    attention_head_dim: int = Field(128, gt=0, le=10**5, multiple_of=2)
    num_layers: int = Field(20, gt=0, le=10**4, description="blocks with separate weights for text and latents")
    num_refiner_layers: int = Field(2, gt=0, le=10**4)
    mlp_ratio: float = Field(4.0, gt=0, le=1024)
    patch_size: int = Field(2, gt=0, le=1024)
    patch_size_t: int = Field(1, gt=0, le=1024)
    text_embed_dim: int = Field(4096, gt=0, le=10**7)
    rope_theta: float = Field(256.0, gt=0)
    rope_axes_dim: tuple[int, int, int] = (16, 56, 56)

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def intermediate_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def patch(self) -> tuple[int, int, int]:
        """Return the frames, rows and columns of latents in a patch."""
        return (self.patch_size_t, self.patch_size, self.patch_size)

    @property
    def patch_values(self) -> int:
        """Return the number of values of one channel in a patch."""
        return self.patch_size_t * self.patch_size**2

    def transformer(self, single: int) -> TransformerShape:
        """Return the sizes of the transformer. `single`: number of blocks with shared weights for text and latents."""
        size, heads = self.hidden_size, self.num_attention_heads
        return TransformerShape(
            block=JointShape(size, heads, self.intermediate_size, attention=self.attention),
            double=self.num_layers,
            single=single,
            latent_values=self.in_channels * self.patch_values,
            out_values=self.out_channels * self.patch_values,
            text_width=self.text_embed_dim,
        )

    @model_validator(mode="after")
    def _axes_fill_a_head(self) -> HunyuanConfig:
        axes, size = list(self.rope_axes_dim), self.attention_head_dim
        if sum(axes) != size or any(axis < 0 or axis % 2 for axis in axes):
            raise ValueError(f"rope_axes_dim {axes} must be even and add up to attention_head_dim {size}")
        if self.intermediate_size % self.num_attention_heads:
            raise ValueError(
                f"mlp_ratio {self.mlp_ratio} gives {self.intermediate_size} features, not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self


class HunyuanVideoConfig(HunyuanConfig):
    class_name: ClassVar[str] = "HunyuanVideoTransformer3DModel"

    num_single_layers: int = Field(40, ge=0, le=10**4, description="blocks with shared weights for text and latents")
    guidance_embeds: bool = True
    pooled_projection_dim: int = Field(768, gt=0, le=10**7)
    image_condition_type: Literal["latent_concat", "token_replace"] | None = Field(
        None, description="how a given first frame is read: as channels, or instead of its noisy latents"
    )

    @property
    def shape(self) -> TransformerShape:
        return replace(
            self.transformer(self.num_single_layers),
            pooled_width=self.pooled_projection_dim,
            guidance=self.guidance_embeds,
            reference_time=self.image_condition_type == "token_replace",
        )

    def generation(self) -> GenerationFamily:
        kinds = {None: HunyuanVideoFamily, "token_replace": FromImageFamily, "latent_concat": ConcatenatedImageFamily}
        captions = Captions(length=256, template=TEMPLATE, skip=95, layer=-3)
        images: GivenImages = GivenImages()
        if self.image_condition_type is not None:
            replaces = self.image_condition_type == "token_replace"
            images = ReplacedFrames(required=True) if replaces else MarkedFrameChannels(required=True)
            captions = FrameCaptions(
                length=256,
                template=IMAGE_TEMPLATE,
                skip=103,
                layer=-3,
                every=4 if replaces else 2,
                mark="<|end_header_id|>",
            )
        return kinds[self.image_condition_type](
            channels=self.out_channels,
            patch=self.patch,
            joint=True,
            whole_text=True,
            captions=(captions, Captions("text_encoder_2", "tokenizer_2", length=77, tokens=False, pooled=True)),
            images=images,
            guidance_input=self.guidance_embeds,
            sampling=SamplingDefaults(720, 1280, 129, 24.0, guidance=6.0, negative=None),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        guidance = batch.get("guidance")
        return {
            "hidden_states": latents[None],
            "timestep": batch["timesteps"],
            "encoder_hidden_states": batch["text"][None],
            "encoder_attention_mask": torch.ones(1, len(batch["text"])),
            "pooled_projections": batch["pooled"],
            "guidance": None if guidance is None else guidance * GUIDANCE_UNIT,
        }
