"""The configuration of Qwen-Image, with the fields of `QwenImageTransformer2DModel` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.core.batch import Batch
from tessera.diffusion.captions import Captions
from tessera.diffusion.edit_images import EditPipeline
from tessera.diffusion.family import EvenLevels, GenerationFamily, NoiseInModelType, SamplingDefaults, grid_positions
from tessera.diffusion.given_images import Grid
from tessera.diffusion.joint import JointConfig
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import TransformerShape

# The template of captions. Embeddings of the template's tokens before the caption are dropped.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
# The template of captions for image editing: the text encoder also reads the images to edit.
_EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{images}{}<|im_end|>\n<|im_start|>assistant\n"
)
_EDIT_TEMPLATE_TOKENS = 64
_IMAGE = "<|image_pad|>"
_SHOWN = f"<|vision_start|>{_IMAGE}<|vision_end|>"
# The text encoder of Edit reads one image in the VAE's size. Edit-2509 and 2511 read several smaller, numbered images.
EDIT = EditPipeline(
    "QwenImageEditPipeline",
    Captions(length=1024, template=_EDIT_TEMPLATE.replace("{images}", _SHOWN), skip=_EDIT_TEMPLATE_TOKENS),
    _IMAGE,
)
EDIT_PLUS = EditPipeline(
    "QwenImageEditPlusPipeline",
    Captions(length=1024, template=_EDIT_TEMPLATE, skip=_EDIT_TEMPLATE_TOKENS),
    _IMAGE,
    each=f"Picture {{}}: {_SHOWN}",
    shown_pixels=384 * 384,
)


class QwenImageFamily(EvenLevels, NoiseInModelType, GenerationFamily):
    """Count rows and columns from the center of an image; text positions continue diagonally after the largest
    image."""

    @property
    def edits(self) -> tuple[EditPipeline, ...]:
        return (EDIT, EDIT_PLUS)

    def positions(self, text: int, grids: Sequence[Grid]) -> Tensor:
        begin = max((max(rows // 2, columns // 2) for _, rows, columns in grids), default=0)
        parts = [torch.arange(begin, begin + text).expand(3, -1)]
        for number, (frames, rows, columns) in enumerate(grids):
            start = (number, -(rows - rows // 2), -(columns - columns // 2))
            parts.append(grid_positions(start, (frames, rows, columns)))
        return torch.cat(parts, dim=1)

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Rescale the guided prediction of each token to the norm of the prediction with the prompt."""
        guided = super().guide(with_prompt, without, scale)
        return guided * (with_prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


class QwenImageConfig(JointConfig):
    class_name: ClassVar[str] = "QwenImageTransformer2DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "guidance_embeds": (False,),
        "use_additional_t_cond": (False,),
        "use_layer3d_rope": (False,),
    }

    patch_size: int = Field(2, gt=0, le=10**4)
    in_channels: int = Field(64, gt=0, le=10**6, description="number of values in an input token")
    out_channels: int | None = Field(16, gt=0, le=10**6, description="latent channels of the prediction")
    num_layers: int = Field(60, gt=0, le=10**4)
    attention_head_dim: int = Field(128, gt=0, le=10**6)
    num_attention_heads: int = Field(24, gt=0, le=10**6)
    joint_attention_dim: int = Field(3584, gt=0, le=10**8, description="width of text embeddings")
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    zero_cond_t: bool = Field(False, description="whether latents of reference images have time 0")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        # Published config.json files have a key for a pooled embedding that the model does not read.
        return super().from_hf({name: value for name, value in data.items() if name != "pooled_projection_dim"})

    @model_validator(mode="after")
    def _fits(self) -> QwenImageConfig:
        self.check_rope(self.axes_dims_rope, self.attention_head_dim)
        return self

    @property
    def shape(self) -> TransformerShape:
        hidden = self.num_attention_heads * self.attention_head_dim
        return TransformerShape(
            JointShape(hidden, self.num_attention_heads, 4 * hidden, attention=self.attention),
            double=self.num_layers,
            single=0,
            latent_values=self.in_channels,
            out_values=self.patch_size**2 * (self.out_channels or self.in_channels),
            text_width=self.joint_attention_dim,
            text_norm=True,
            rope_axes=self.axes_dims_rope,
            reference_time=self.zero_cond_t,
        )

    def generation(self) -> GenerationFamily:
        return QwenImageFamily(
            channels=self.out_channels or self.in_channels,
            patch=(1, self.patch_size, self.patch_size),
            joint=True,
            captions=(Captions(length=512, template=TEMPLATE, skip=TEMPLATE_TOKENS),),
            sampling=SamplingDefaults(height=1024, width=1024, steps=50, guidance=4.0, negative=None),
        )

    def diffusers_inputs(self, batch: Batch, latents: Tensor) -> dict[str, Any]:
        return {
            "hidden_states": batch["latents"][None],
            "encoder_hidden_states": batch["text"][None],
            "timestep": batch["timesteps"] / 1000,
            "img_shapes": [list(batch.shapes["latents"])],
        }
