"""A family over text and latents with any options, whose initial weights are all drawn: as published, predictions begin
as zero and nothing else learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.joint import JointConfig, joint_family
from tessera.nn.joint_attention import JointShape
from tessera.nn.joint_transformer import JointTransformer, TransformerShape
from tessera.weights.map import WeightMap
from tests.toys.image_rows import CHANNELS, POOLED_WIDTH, TEXT_WIDTH


class DrawnConfig(JointConfig):
    class_name: ClassVar[str] = "DrawnJoint"

    double: int = 2
    single: int = 2
    dual: bool = False
    reference_time: bool = False
    table: int = 0

    @property
    def shape(self) -> TransformerShape:
        return TransformerShape(
            JointShape(hidden=32, heads=4, intermediate=64),
            double=self.double,
            single=self.single,
            latent_values=4 * CHANNELS,
            out_values=4 * CHANNELS,
            text_width=TEXT_WIDTH,
            pooled_width=0 if self.reference_time else POOLED_WIDTH,
            rope_axes=(2, 2, 4),
            table=self.table,
            table_base=self.table,
            dual_blocks=(0,) if self.dual else (),
            reference_time=self.reference_time,
        )

    def generation(self) -> GenerationFamily:
        return GenerationFamily(CHANNELS, (1, 2, 2), joint=True)


class DrawnTransformer(JointTransformer):
    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)


def build(config: Any) -> DrawnTransformer:
    return DrawnTransformer(config.shape)


_FAMILY = joint_family("drawn_joint", DrawnConfig, {}, lambda _: WeightMap(()))
SPEC = replace(_FAMILY, main=replace(_FAMILY.main, build=build), hf_types=())
