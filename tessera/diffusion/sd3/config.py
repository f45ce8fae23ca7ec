"""The configuration of Stable Diffusion 3 and 3.5, with the fields of `SD3Transformer2DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import EncodedPaddingCaptions
from tessera.diffusion.family import GenerationFamily, NoiseInModelType, SamplingDefaults, grid_positions
from tessera.diffusion.given_images import FirstFrameChannels, GivenImages, Grid
from tessera.diffusion.joint import JointConfig
from tessera.errors import TesseraError
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import TransformerShape


@dataclass(frozen=True)
class SD3Family(NoiseInModelType, GenerationFamily):
    """Describe SD3. An image gets the center of a table of `table` x `table` positions; text is at position 0."""

    table: int = 0

    def check_grids(self, grids: Sequence[Grid]) -> None:
        for _, rows, columns in grids:
            if max(rows, columns) > self.table:
                raise TesseraError(
                    f"an image has {rows} x {columns} tokens, and the model has positions for {self.table} x "
                    f"{self.table}",
                    where="latents",
                    fix="use a smaller image",
                    code="generation.size-has-no-positions",
                )

    def positions(self, text: int, grids: Sequence[Grid]) -> Tensor:
        self.check_grids(grids)
        parts = []
        for number, (frames, rows, columns) in enumerate(grids):
            start = (number, (self.table - rows) // 2, (self.table - columns) // 2)
            parts.append(grid_positions(start, (frames, rows, columns)))
        return torch.cat([torch.zeros(3, text, dtype=torch.int64), *parts], dim=1)


class SD3Config(JointConfig):
    class_name: ClassVar[str] = "SD3Transformer2DModel"

    sample_size: int = Field(
        128, gt=0, le=10**6, description="rows and columns of latents in training images; scales positions"
    )
    patch_size: int = Field(2, gt=0, le=10**4)
    in_channels: int = Field(16, gt=0, le=10**6)
    num_layers: int = Field(18, gt=0, le=10**4)
    attention_head_dim: int = Field(64, gt=0, le=10**6)
    num_attention_heads: int = Field(18, gt=0, le=10**6)
    joint_attention_dim: int = Field(4096, gt=0, le=10**8, description="width of text embeddings")
    caption_projection_dim: int = Field(1152, gt=0, le=10**8, description="the width of the model")
    pooled_projection_dim: int = Field(2048, gt=0, le=10**8, description="width of the pooled text embedding")
    out_channels: int | None = Field(16, gt=0, le=10**6)
    pos_embed_max_size: int = Field(96, gt=0, le=10**4, description="rows and columns of the table of positions")
    dual_attention_layers: tuple[int, ...] = Field((), description="blocks with an additional attention among latents")
    qk_norm: Literal["rms_norm"] | None = None

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @model_validator(mode="after")
    def _fits(self) -> SD3Config:
        if self.caption_projection_dim != self.hidden:
            raise ValueError(f"caption_projection_dim must be the width of the model, {self.hidden}")
        if self.hidden % 4:
            raise ValueError(f"the width {self.hidden} must be a multiple of 4, for sine positions of rows and columns")
        if self.sample_size < self.patch_size:
            raise ValueError("sample_size must be at least patch_size")
        outside = [number for number in self.dual_attention_layers if not 0 <= number < self.num_layers]
        if outside or len(set(self.dual_attention_layers)) != len(self.dual_attention_layers):
            raise ValueError(f"dual_attention_layers must be different block numbers from 0 to {self.num_layers - 1}")
        return self

    @property
    def shape(self) -> TransformerShape:
        heads, patch = self.num_attention_heads, self.patch_size**2
        return TransformerShape(
            JointShape(self.hidden, heads, 4 * self.hidden, qk_norm=self.qk_norm is not None, attention=self.attention),
            double=self.num_layers,
            single=0,
            latent_values=self.in_channels * patch,
            out_values=(self.out_channels or self.in_channels) * patch,
            text_width=self.joint_attention_dim,
            pooled_width=self.pooled_projection_dim,
            table=self.pos_embed_max_size,
            table_base=self.sample_size // self.patch_size,
            dual_blocks=self.dual_attention_layers,
            last_rest="absent",
        )

    def generation(self) -> GenerationFamily:
        channels = self.out_channels or self.in_channels
        # Features of the two CLIP encoders are concatenated for each token. The tokens of T5 follow the CLIP tokens.
        clip = EncodedPaddingCaptions(length=77, masked=False, layer=-2, pooled=True)
        return SD3Family(
            channels=channels,
            patch=(1, self.patch_size, self.patch_size),
            joint=True,
            captions=(
                clip,
                replace(clip, encoder="text_encoder_2", tokenizer="tokenizer_2", pad=0, beside=True),
                EncodedPaddingCaptions("text_encoder_3", "tokenizer_3", length=256, masked=False),
            ),
            images=FirstFrameChannels(required=True) if self.in_channels > channels else GivenImages(),
            sampling=SamplingDefaults(height=1024, width=1024, steps=28, guidance=7.0),
            table=self.pos_embed_max_size,
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        return {
            "hidden_states": latents[None, :, 0],
            "encoder_hidden_states": batch["text"][None],
            "pooled_projections": batch["pooled"],
            "timestep": batch["timesteps"],
        }
