"""The configuration of Flux, with the fields of `FluxTransformer2DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import EncodedPaddingCaptions
from tessera.diffusion.family import EvenLevels, GenerationFamily, NoiseInModelType, SamplingDefaults
from tessera.diffusion.given_images import FirstFrameChannels, GivenImages
from tessera.diffusion.joint import PATCH, JointConfig
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import TransformerShape


class FluxFamily(EvenLevels, NoiseInModelType, GenerationFamily):
    """Sample at evenly spaced noise levels, from noise in the data type of the model."""


class FluxConfig(JointConfig):
    class_name: ClassVar[str] = "FluxTransformer2DModel"
    # Latents arrive as patches: a token has `in_channels` values, so the model's patch size is 1.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,)}

    in_channels: int = Field(
        64, gt=0, le=10**6, description="number of values in an input token, with condition channels"
    )
    out_channels: int | None = Field(None, gt=0, le=10**6, description="default: in_channels")
    num_layers: int = Field(19, ge=0, le=10**4, description="blocks with separate weights for text and latents")
    num_single_layers: int = Field(38, ge=0, le=10**4, description="blocks with shared weights for text and latents")
    attention_head_dim: int = Field(128, gt=0, le=10**6)
    num_attention_heads: int = Field(24, gt=0, le=10**6)
    joint_attention_dim: int = Field(4096, gt=0, le=10**8, description="width of text embeddings")
    pooled_projection_dim: int = Field(768, gt=0, le=10**8, description="width of the pooled text embedding")
    guidance_embeds: bool = Field(False, description="whether the guidance scale is an input")
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)

    @model_validator(mode="after")
    def _fits(self) -> FluxConfig:
        self.check_rope(self.axes_dims_rope, self.attention_head_dim)
        if self.in_channels % PATCH**2 or (self.out_channels or 0) % PATCH**2:
            raise ValueError(f"in_channels and out_channels must be multiples of {PATCH**2}, the size of a patch")
        if not self.num_layers + self.num_single_layers:
            raise ValueError("num_layers and num_single_layers must not both be 0")
        return self

    @property
    def shape(self) -> TransformerShape:
        hidden = self.num_attention_heads * self.attention_head_dim
        return TransformerShape(
            JointShape(hidden, self.num_attention_heads, 4 * hidden, attention=self.attention),
            double=self.num_layers,
            single=self.num_single_layers,
            latent_values=self.in_channels,
            out_values=self.out_channels or self.in_channels,
            text_width=self.joint_attention_dim,
            pooled_width=self.pooled_projection_dim,
            guidance=self.guidance_embeds,
            rope_axes=self.axes_dims_rope,
        )

    def generation(self) -> GenerationFamily:
        shape = self.shape
        steps = 28 if self.guidance_embeds else 4
        return FluxFamily(
            channels=shape.out_values // PATCH**2,
            patch=(1, PATCH, PATCH),
            joint=True,
            captions=(
                EncodedPaddingCaptions(length=77, masked=False, tokens=False, pooled=True),
                EncodedPaddingCaptions("text_encoder_2", "tokenizer_2", length=512, masked=False),
            ),
            images=FirstFrameChannels(required=True) if shape.latent_values > shape.out_values else GivenImages(),
            guidance_input=self.guidance_embeds,
            sampling=SamplingDefaults(height=1024, width=1024, steps=steps, guidance=3.5, negative=None),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        places = batch["positions"].T.to(latents.dtype)
        return {
            "hidden_states": batch["latents"][None],
            "encoder_hidden_states": batch["text"][None],
            "pooled_projections": batch["pooled"],
            "timestep": batch["timesteps"] / 1000,
            "img_ids": places[batch["latent_index"]],
            "txt_ids": places[batch["text_index"]],
            "guidance": batch.get("guidance"),
        }
