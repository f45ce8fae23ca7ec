"""A text encoder that ranks share computes what a whole one does, and takes its part of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.core.generation import TextForm
from tessera.core.modules import local_shard
from tessera.core.run_config import ParallelSection
from tessera.core.task import FrozenModule
from tessera.core.types import ModelPlan, Residence
from tessera.models.common.pipeline_parts import PipelineFolder
from tessera.parallel.frozen import frozen_bytes, place_frozen
from tessera.parallel.mesh import Mesh, make_axes
from tests.dist.spawn import run_ranks
from tests.toys.pipeline_folder import write_pipeline_folder

CAPTIONS = [[3, 4, 5, 1], [6, 1]]


def embed(rank: int, world: int, folder: Path, residence: Residence) -> dict[str, Any]:
    cpu = torch.device("cpu")
    axes = make_axes(ParallelSection(), ModelPlan((), {}), world)
    parts, form = PipelineFolder(folder), TextForm(length=6)
    planned = frozen_bytes(parts.text_encoder(form, meta=True), residence, axes)
    module = place_frozen(parts.text_encoder(form), residence, Mesh(axes, cpu), cpu)
    frozen = FrozenModule(module, cpu, residence)
    with frozen.use() as encoder:
        found = [one.tokens.tolist() for one in encoder.encode([torch.tensor(ids) for ids in CAPTIONS])]  # type: ignore[operator]
    held = sum(local_shard(p).numel() * p.element_size() for p in module.parameters())
    return {"tokens": found, "held": held, "planned": planned.size}


@pytest.mark.slow
def test_a_shared_text_encoder_embeds_as_a_whole_one(tmp_path: Path) -> None:
    folder = write_pipeline_folder(tmp_path / "pipeline")
    with torch.no_grad():
        whole = PipelineFolder(folder).text_encoder(TextForm(length=6))
        wanted = [one.tokens for one in whole.encode([torch.tensor(ids) for ids in CAPTIONS])]
    size = sum(p.numel() * p.element_size() for p in whole.parameters())
    for residence, share in (("sharded", 2), ("device", 1), ("offloaded", 1)):
        for found in run_ranks(embed, 2, folder, residence):
            for tokens, expected in zip(found["tokens"], wanted, strict=True):
                assert expected is not None
                assert torch.allclose(torch.tensor(tokens), expected, atol=1e-6)
            assert found["planned"] == -(-size // share)
            assert abs(found["held"] - found["planned"]) < 0.02 * size  # what does not divide is padded
