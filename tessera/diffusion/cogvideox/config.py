"""The configuration of CogVideoX, with the fields of `CogVideoXTransformer3DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import EncodedPaddingCaptions
from tessera.diffusion.family import GenerationFamily, SamplingDefaults
from tessera.diffusion.given_images import FirstFrameChannels, GivenImages, Grid
from tessera.diffusion.joint import JointConfig
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import TransformerShape

OFFSET = 2.0  # the constant `ofs`, which published image-to-video models embed in addition to the timestep


class CogVideoXFamily(GenerationFamily):
    """Describe CogVideoX. Its published pipeline draws noise with frames as the first dimension."""

    def draw_noise(self, shape: Grid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        frames, rows, columns = shape
        return torch.randn(frames, self.channels, rows, columns, generator=generator).transpose(0, 1)


class CogVideoXConfig(JointConfig):
    class_name: ClassVar[str] = "CogVideoXTransformer3DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "flip_sin_to_cos": (True,),
        "freq_shift": (0,),
        "dropout": (0.0,),
        "activation_fn": ("gelu-approximate",),
        "timestep_activation_fn": ("silu",),
        "attention_bias": (True,),
    }

    num_attention_heads: int = Field(30, gt=0, le=10**5)
    attention_head_dim: int = Field(64, gt=0, le=10**5)
    in_channels: int = Field(16, gt=0, le=10**6)
    out_channels: int = Field(16, gt=0, le=10**6)
    time_embed_dim: int = Field(512, gt=0, le=10**6)
    ofs_embed_dim: int | None = Field(None, gt=0, le=10**6, description="width of the embedding of the constant `ofs`")
    text_embed_dim: int = Field(4096, gt=0, le=10**7)
    num_layers: int = Field(30, gt=0, le=10**4)
    sample_width: int = Field(90, gt=0, le=10**6)
    sample_height: int = Field(60, gt=0, le=10**6)
    sample_frames: int = Field(49, gt=0, le=10**6)
    patch_size: int = Field(2, gt=0, le=1024)
    patch_size_t: int | None = Field(None, gt=0, le=1024)
    temporal_compression_ratio: int = Field(4, gt=0, le=1024)
    max_text_seq_length: int = Field(226, gt=0, le=10**6)
    norm_elementwise_affine: bool = True
    norm_eps: float = Field(1e-5, gt=0)
    spatial_interpolation_scale: float = Field(1.875, gt=0)
    temporal_interpolation_scale: float = Field(1.0, gt=0)
    use_rotary_positional_embeddings: bool = False
    use_learned_positional_embeddings: bool = False
    patch_bias: bool = True

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch(self) -> tuple[int, int, int]:
        """Return the frames, rows and columns of latents in a patch."""
        return (self.patch_size_t or 1, self.patch_size, self.patch_size)

    @property
    def patch_values(self) -> int:
        """Return the number of values of one channel in a patch."""
        return (self.patch_size_t or 1) * self.patch_size**2

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the video size for which the model was trained: latent frames, and rows and columns in patches."""
        frames = (self.sample_frames - 1) // self.temporal_compression_ratio + 1
        return (frames, self.sample_height // self.patch_size, self.sample_width // self.patch_size)

    @property
    def learned_places(self) -> int:
        """Return the number of learned positions: of the longest text, plus those of a video of the trained size."""
        frames, rows, columns = self.grid
        return self.max_text_seq_length + frames * rows * columns

    @property
    def shape(self) -> TransformerShape:
        size, values = self.hidden_size, self.patch_values
        return TransformerShape(
            block=JointShape(size, self.num_attention_heads, 4 * size),
            double=0,
            single=self.num_layers,
            latent_values=self.in_channels * values,
            out_values=self.out_channels * values,
            text_width=self.text_embed_dim,
        )

    def generation(self) -> GenerationFamily:
        newer = self.patch_size_t is not None
        size = (768, 1360, 81, 16.0) if newer else (480, 720, 49, 8.0)
        return CogVideoXFamily(
            channels=self.out_channels,
            patch=self.patch,
            joint=True,
            whole_text=True,
            # The model attends to states of padding tokens; the encoder gets no attention mask.
            captions=(EncodedPaddingCaptions(length=self.max_text_seq_length, masked=False),),
            objective="v",
            images=FirstFrameChannels(required=True) if self.in_channels > self.out_channels else GivenImages(),
            sampling=SamplingDefaults(*size, guidance=6.0),
        )

    def diffusers_tokens(self, prediction: Tensor) -> Tensor:
        return super().diffusers_tokens(prediction.transpose(0, 1))

    def proof_grid(self) -> Grid:
        return (2, *self.grid[1:]) if self.use_learned_positional_embeddings else super().proof_grid()

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        frames, rows, columns = batch.shapes["latents"][0]
        rotation = None
        if self.use_rotary_positional_embeddings:
            # Compute rotary positions with diffusers' functions: they handle differences between CogVideoX releases.
            from diffusers.models.embeddings import get_3d_rotary_pos_embed
            from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

            _, height, width = self.grid
            if self.patch_size_t is None:
                options: dict[str, Any] = {
                    "crops_coords": get_resize_crop_region_for_grid((rows, columns), width, height)
                }
            else:
                options = {"crops_coords": None, "grid_type": "slice", "max_size": (height, width)}
            rotation = get_3d_rotary_pos_embed(
                self.attention_head_dim, grid_size=(rows, columns), temporal_size=frames, **options
            )
        return {
            "hidden_states": latents.transpose(0, 1)[None],
            "encoder_hidden_states": batch["text"][None],
            "timestep": batch["timesteps"],
            "ofs": None if self.ofs_embed_dim is None else torch.tensor([OFFSET]),
            "image_rotary_emb": rotation,
        }

    @model_validator(mode="after")
    def _positions_exist(self) -> CogVideoXConfig:
        if self.use_learned_positional_embeddings and not self.use_rotary_positional_embeddings:
            raise ValueError("use_learned_positional_embeddings needs use_rotary_positional_embeddings")
        rotated = self.use_rotary_positional_embeddings
        name, size = ("attention_head_dim", self.attention_head_dim) if rotated else ("the width", self.hidden_size)
        if size % 16:
            raise ValueError(f"{name} {size} must be a multiple of 16 for positions on three axes")
        return self
