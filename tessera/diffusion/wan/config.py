"""The configuration of Wan, with the fields of `WanTransformer3DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import ZeroPaddedCaptions
from tessera.diffusion.cross import CrossConfig, CrossShape
from tessera.diffusion.family import GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import GivenImages, MaskedVideoChannels, ReplacedFrames

_LATENTS_22 = 48  # latent channels of Wan 2.2 TI2V, the model with per-token timesteps
_IMAGE_EMBEDS = 257  # number of CLIP embeddings per image


class WanConfig(CrossConfig):
    class_name: ClassVar[str] = "WanTransformer3DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"qk_norm": ("rms_norm_across_heads",)}
    native: ClassVar[tuple[str, ...]] = ("attention", "token_times", "text_length")

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = Field(40, gt=0, le=10**6)
    attention_head_dim: int = Field(128, gt=0, le=10**6)
    in_channels: int = Field(16, gt=0, le=10**6, description="channels of noisy latents and conditions together")
    out_channels: int = Field(16, gt=0, le=10**6)
    text_dim: int = Field(4096, gt=0, le=10**8)
    freq_dim: int = Field(256, gt=0, le=10**8)
    ffn_dim: int = Field(13824, gt=0, le=10**8)
    num_layers: int = Field(40, gt=0, le=10**4)
    cross_attn_norm: bool = True
    eps: float = Field(1e-6, gt=0)
    image_dim: int | None = Field(None, gt=0, le=10**8, description="width of image embeddings; null: none are read")
    added_kv_proj_dim: int | None = Field(None, gt=0, le=10**8)
    rope_max_seq_len: int = Field(1024, gt=0, description="size of diffusers' table of positions; has no effect here")
    pos_embed_seq_len: int | None = Field(
        None, gt=0, le=10**6, description="number of image embeddings per sample, if their positions are learned"
    )
    token_times: bool | None = Field(
        None, description="whether each token has its own time, which given frames need; default: with 48 channels"
    )
    text_length: int = Field(
        512, gt=0, le=10**6, description="text embeddings; short captions are padded with zeros, which are attended to"
    )

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_values(self) -> int:
        """Return the number of values in one input token."""
        return self.in_channels * prod(self.patch_size)

    @property
    def rope_sizes(self) -> tuple[int, int, int]:
        """Return how many dimensions of an attention head encode each position axis: frames, rows, columns."""
        side = 2 * (self.attention_head_dim // 6)
        return self.attention_head_dim - 2 * side, side, side

    @property
    def shape(self) -> CrossShape:
        embeds = 0 if self.image_dim is None else self.pos_embed_seq_len or _IMAGE_EMBEDS
        return CrossShape(
            width=self.hidden,
            heads=self.num_attention_heads,
            layers=self.num_layers,
            block=6 * self.hidden**2 + 2 * self.hidden * self.ffn_dim,
            latent_values=self.patch_values,
            out_values=self.out_channels * prod(self.patch_size),
            text_width=self.text_dim,
            time_features=self.freq_dim,
            image_width=self.image_dim or 0,
            image_embeds=embeds,
        )

    def generation(self) -> GenerationFamily:
        times = self.out_channels == _LATENTS_22 if self.token_times is None else self.token_times
        images = GivenImages()
        if self.in_channels > self.out_channels:
            images = MaskedVideoChannels(required=True)
        return GenerationFamily(
            channels=self.out_channels,
            patch=self.patch_size,
            # Published models attend to the zeros that pad short captions.
            captions=(ZeroPaddedCaptions(length=self.text_length, tidy=True),),
            images=ReplacedFrames() if times else images,
            image_embeds=self.image_dim is not None,
            token_times=times,
            sampling=SamplingDefaults(704, 1280, 121, fps=24.0) if times else SamplingDefaults(480, 832, 81),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        images = batch.get("image_embeds")
        if images is not None:  # diffusers takes the first and the last frame as two batch entries
            images = images.view(1 if self.pos_embed_seq_len is None else 2, -1, images.shape[1])
        return {
            "hidden_states": latents[None],
            "timestep": batch["timesteps"],
            "encoder_hidden_states": batch["text"][None],
            "encoder_hidden_states_image": images,
        }

    @model_validator(mode="after")
    def _fits(self) -> WanConfig:
        if self.attention_head_dim % 2:
            raise ValueError(f"attention_head_dim {self.attention_head_dim} must be even for rotary positions")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            raise ValueError("set both image_dim and added_kv_proj_dim, or neither")
        if self.added_kv_proj_dim not in (None, self.hidden):
            raise ValueError(f"added_kv_proj_dim must be the width of the model, {self.hidden}")
        if self.pos_embed_seq_len is not None and self.image_dim is None:
            raise ValueError("pos_embed_seq_len needs image_dim")
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size {list(self.patch_size)} must be positive")
        return self
