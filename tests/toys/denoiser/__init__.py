"""A second family, in one folder and nowhere else: a small image denoiser without tokens or vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, ModelSpec, Training


class DenoiserConfig(Section):
    side: int = 8
    width: int = 64
    depth: int = 2


class Denoiser(nn.Module):
    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        pixels = config.side**2
        self.inlet = nn.Linear(pixels + 1, config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.outlet = nn.Linear(config.width, pixels)

    def forward(self, batch: Batch) -> Tensor:
        x = self.inlet(torch.cat([batch["noisy"], batch["time"]], dim=1))
        for block in self.blocks:
            x = x + torch.nn.functional.silu(block(x))
        return self.outlet(x)

    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


def _plan(config: DenoiserConfig) -> ModelPlan:
    styles = {"inlet.{*}": "replicate", "blocks.{*}.{*}": "replicate", "outlet.{*}": "replicate"}
    return ModelPlan(blocks=("blocks.{*}",), tensor=styles)  # type: ignore[arg-type]


def _flops(config: DenoiserConfig, batch: Batch, training: Training) -> float:
    """Goes to worker processes with the rows, so it is no lambda."""
    return 6.0 * len(batch["clean"]) * config.width * (2 * config.side**2 + 1 + config.depth * config.width)


SPEC = ModelSpec(
    name="denoiser",
    config=DenoiserConfig,
    main=Component(build=Denoiser, plan=_plan),
    flops=_flops,
    presets={"tiny": {"side": 8, "width": 64, "depth": 2}},
    task="tests.toys.denoise_task",
)
