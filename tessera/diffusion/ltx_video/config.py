"""The configuration of LTX-Video, with the fields of `LTXVideoTransformer3DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import PaddedInputCaptions
from tessera.diffusion.cross import CrossConfig, CrossShape
from tessera.diffusion.family import EvenLevels, GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import GivenImages, ReplacedFrames

TIME_FEATURES = 256


class LTXVideoFamily(EvenLevels, GenerationFamily):
    """Sample at evenly spaced noise levels."""


class LTXVideoConfig(CrossConfig):
    class_name: ClassVar[str] = "LTXVideoTransformer3DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation_fn": ("gelu-approximate",),
        "qk_norm": ("rms_norm_across_heads",),
        "norm_elementwise_affine": (False,),
        "attention_bias": (True,),
        "attention_out_bias": (True,),
    }
    native: ClassVar[tuple[str, ...]] = (
        *CrossConfig.native,
        "vae_compression",
        "frame_rate",
        "coordinates",
        "condition",
    )

    in_channels: int = Field(128, gt=0, le=10**6, description="number of values in a token: channels x patch size")
    out_channels: int | None = Field(128, gt=0, le=10**6)
    patch_size: int = Field(1, gt=0, le=1024)
    patch_size_t: int = Field(1, gt=0, le=1024)
    num_attention_heads: int = Field(32, gt=0, le=10**5)
    attention_head_dim: int = Field(64, gt=0, le=10**5, multiple_of=2)
    cross_attention_dim: int = Field(2048, gt=0, le=10**7)
    num_layers: int = Field(28, gt=0, le=10**4)
    norm_eps: float = Field(1e-6, gt=0)
    caption_channels: int = Field(4096, gt=0, le=10**7)
    vae_compression: tuple[int, int, int] = Field(
        (8, 32, 32), description="frames, rows and columns of pixels per latent; positions are in pixels"
    )
    frame_rate: float = Field(25.0, gt=0, description="frames per second of samples without their own frame rate")
    coordinates: Literal["latents", "frames"] = Field(
        "latents",
        description="unit of time positions: latent frames (0.9.0, 0.9.1), or frames of the video (from 0.9.5 on)",
    )
    condition: Literal["none", "replace"] = Field(
        "none", description="replace: given frames replace their noisy latents, at time zero"
    )

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch(self) -> tuple[int, int, int]:
        """Return the frames, rows and columns of latents in a patch."""
        return (self.patch_size_t, self.patch_size, self.patch_size)

    @property
    def predicted(self) -> int:
        """Return the number of values in a predicted token."""
        return self.out_channels or self.in_channels

    @property
    def shape(self) -> CrossShape:
        return CrossShape(
            width=self.hidden_size,
            heads=self.num_attention_heads,
            layers=self.num_layers,
            block=14 * self.hidden_size**2,
            latent_values=self.in_channels,
            out_values=self.predicted,
            text_width=self.caption_channels,
            time_features=TIME_FEATURES,
        )

    def generation(self) -> GenerationFamily:
        newer, replaces = self.coordinates == "frames", self.condition == "replace"
        return LTXVideoFamily(
            channels=self.predicted // prod(self.patch),
            patch=self.patch,
            # The text encoder gets no attention mask for padding; the model reads only embeddings of the caption.
            captions=(PaddedInputCaptions(length=256 if newer else 128, masked=False),),
            images=ReplacedFrames() if replaces else GivenImages(),
            token_times=replaces,
            sampling=SamplingDefaults(512, 704, frames=161, fps=self.frame_rate, guidance=3.0),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        frames, rows, columns = batch.shapes["latents"][0]
        time, *space = self.vae_compression
        places = batch["positions"].to(latents.dtype)
        if self.coordinates == "frames":
            first = (places[0] * self.patch_size_t * time + (1 - time)).clamp(min=0) / self.frame_rate
            pixels = [at * self.patch_size * step for at, step in zip(places[1:], space, strict=True)]
            positions: dict[str, Any] = {"video_coords": torch.stack([first, *pixels])[None]}
        else:
            positions = {"rope_interpolation_scale": (time / self.frame_rate, *space)}
        return {
            "hidden_states": batch["latents"][None],
            "encoder_hidden_states": batch["text"][None],
            "timestep": batch["timesteps"],
            "encoder_attention_mask": torch.ones(1, len(batch["text"])),
            "num_frames": frames,
            "height": rows,
            "width": columns,
            **positions,
        }

    @model_validator(mode="after")
    def _widths_agree(self) -> LTXVideoConfig:
        if self.cross_attention_dim != self.hidden_size:
            raise ValueError(
                f"cross_attention_dim {self.cross_attention_dim} must be the width of the model, "
                f"num_attention_heads x attention_head_dim = {self.hidden_size}"
            )
        return self
