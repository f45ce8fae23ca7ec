"""Rows of latents and embeddings that were made beforehand. A module of its own: the loader's processes import it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.core.spec import ModelSpec
from tessera.diffusion.family import family_of

TEXT = 512  # tokens of a caption


class OneSample(RowSource):
    """Rows of one sample each: latents and embeddings that were made beforehand."""

    def __init__(self, spec: ModelSpec, config: Any, grid: tuple[int, int, int]) -> None:
        assert spec.example is not None
        family, tokens = family_of(spec, config), grid[0] * grid[1] * grid[2]
        assert family is not None
        example = spec.example(config, tokens + TEXT if family.joint else tokens)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator).bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in example.tensors.items()
            if name not in ("timesteps", "latents", "guidance")
        }
        tensors["clean"] = torch.randn(tokens, family.patch_values, generator=generator).bfloat16()
        tensors["trained"] = torch.arange(tokens)
        self.sample = Batch(tensors, example.segments, shapes={"latents": (grid,)})
        self.flops = spec.flops(config, example) if spec.flops is not None else 0.0

    def __len__(self) -> int:
        return 64

    def batch(self, rows: Sequence[int]) -> Batch:
        (row,) = rows
        return replace(
            self.sample,
            sample_ids=(f"sample-{row}",),
            rows=((row, 1),),
            counts={"tokens": len(self.sample["trained"]), "samples": 1},
            seeds=(row,),
            flops=self.flops,
        )
