"""Video families whose initial weights are all drawn: as published, predictions begin as zero."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tessera.core.spec import ModelSpec


@torch.no_grad()
def initialize(self: object, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)


def drawn(spec: ModelSpec) -> ModelSpec:
    kind = spec.main.build
    assert isinstance(kind, type)
    build = type(f"Drawn{kind.__name__}", (kind,), {"initialize": initialize})
    return replace(spec, name=f"drawn_{spec.name}", main=replace(spec.main, build=build), hf_types=())
