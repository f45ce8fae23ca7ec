"""A generation family small enough for tests of data and features: latents that are told the mean of their text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, Stream
from tessera.core.outputs import LATENTS, Outputs
from tessera.core.spec import Component
from tessera.diffusion.captions import Captions, ZeroPaddedCaptions
from tessera.diffusion.family import GenerationFamily, GenerationSpec
from tessera.diffusion.spec import generation_processor


class MixerConfig(Section):
    channels: int = 4
    text: int = 16
    width: int = 32
    joint: bool = False
    padding: Literal["none", "zeros"] = "none"


def family_of(config: MixerConfig) -> GenerationFamily:
    captions = Captions(length=8) if config.padding == "none" else ZeroPaddedCaptions(length=8)
    return GenerationFamily(config.channels, (1, 2, 2), config.joint, captions=(captions,))


class Mixer(nn.Module):
    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        values = family_of(config).patch_values
        self.inlet = nn.Linear(values + 1, config.width)
        self.words = nn.Linear(config.text, config.width)
        self.outlet = nn.Linear(config.width, values)

    def forward(self, batch: Batch) -> Outputs:
        index = batch["sample_index"]
        index = index.index_select(0, batch["latent_index"]) if "latent_index" in batch else index
        times = batch["timesteps"].index_select(0, index).unsqueeze(1) / 1000
        x = self.inlet(torch.cat([batch["latents"], times], 1))
        lengths = torch.tensor(batch.segments["text"].lengths)
        sums = x.new_zeros(len(lengths), batch["text"].shape[1])
        sums = sums.index_add(0, torch.repeat_interleave(lengths), batch["text"].to(x))
        x = x + self.words(sums / lengths.clamp(min=1).unsqueeze(1)).index_select(0, index)
        return {LATENTS: self.outlet(nn.functional.silu(x))}

    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.zero_() if name.endswith("bias") else tensor.normal_(0, 0.1, generator=generator)


def _plan(config: MixerConfig) -> ModelPlan:
    styles = {f"{name}.{{*}}": "replicate" for name in ("inlet", "words", "outlet")}
    return ModelPlan(blocks=(), tensor=styles, streams={"latents": Stream(("sample_index",), "latents")})  # type: ignore[arg-type]


SPEC = GenerationSpec(
    name="latent_mixer",
    config=MixerConfig,
    main=Component(build=Mixer, plan=_plan),
    processor=generation_processor(family_of),
    generation=family_of,
)
