"""A text encoder that ranks share computes what a whole one does, and takes its part of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.config.run_config import ParallelSection
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, Residence
from tessera.core.task import FrozenModule
from tessera.diffusion.captions import Captions
from tessera.diffusion.edit_images import EMPTY_IDS, SHOWN, SHOWN_GRIDS, EditImages
from tessera.diffusion.encoders import Encoders
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.qwen_image.config import QwenImageConfig
from tessera.parallel.frozen import frozen_bytes, place_frozen
from tessera.parallel.mesh import Mesh, make_axes
from tessera.runtime.modules import local_shard
from tests.dist.spawn import run_ranks
from tests.toys.pipeline_folder import write_pipeline_folder
from tests.toys.sampling_folders import write_qwen_image

CAPTIONS = [[3, 4, 5, 1], [6, 1]]


def embed(rank: int, world: int, folder: Path, residence: Residence) -> dict[str, Any]:
    cpu = torch.device("cpu")
    axes = make_axes(ParallelSection(), ModelPlan((), {}), world)
    parts, reader = PipelineFolder(folder), Captions(length=6)
    component = Component(lambda _: parts.text_encoder(reader, meta=True), residence=residence, stage="first")
    planned = frozen_bytes(component.build(None), component, axes, None)
    module = place_frozen(parts.text_encoder(reader), residence, Mesh(axes, cpu), cpu)
    frozen = FrozenModule(module, cpu, residence)
    with frozen.use() as encoder:
        tokens = [one.tokens.tolist() for one in encoder.encode([torch.tensor(ids) for ids in CAPTIONS])]  # type: ignore[operator]
    held = sum(local_shard(p).numel() * p.element_size() for p in module.parameters())
    return {"tokens": tokens, "held": held, "planned": planned.size}


@pytest.mark.slow
def test_a_shared_text_encoder_embeds_as_a_whole_one(tmp_path: Path) -> None:
    folder = write_pipeline_folder(tmp_path / "pipeline")
    with torch.no_grad():
        whole = PipelineFolder(folder).text_encoder(Captions(length=6))
        wanted = [one.tokens for one in whole.encode([torch.tensor(ids) for ids in CAPTIONS])]
    size = sum(p.numel() * p.element_size() for p in whole.parameters())
    for residence, share in (("sharded", 2), ("device", 1), ("offloaded", 1)):
        for result in run_ranks(embed, 2, folder, residence):
            for tokens, expected in zip(result["tokens"], wanted, strict=True):
                assert expected is not None
                assert torch.allclose(torch.tensor(tokens), expected, atol=1e-6)
            assert result["planned"] == -(-size // share)
            assert abs(result["held"] - result["planned"]) < 0.02 * size  # what does not divide is padded


def embed_with_image(rank: int, world: int, folder: Path) -> list[list[float]]:
    """Embed a caption with an image on the first rank, and nothing on the others, which have padding alone."""
    cpu, family = torch.device("cpu"), QwenImageConfig(in_channels=16, out_channels=4).generation()
    images = EditImages.load(folder, family.edits[0])
    module = PipelineFolder(folder).text_encoder(family.captions[0])
    word: int = module.encoder.config.image_token_id  # type: ignore[union-attr, assignment]
    axes = make_axes(ParallelSection(), ModelPlan((), {}), world)
    frozen = FrozenModule(place_frozen(module, "sharded", Mesh(axes, cpu), cpu), cpu, "sharded")
    others = [id for id in range(4, 80) if id != word][:64]
    ids = torch.tensor([*others, word, 9, 10]) if rank == 0 else torch.empty(0, dtype=torch.int64)
    tensors, segments = {"text_ids": ids, "frames": torch.empty(0, 3)}, {"text_ids": Segments.of([len(ids)])}
    if rank == 0:
        patches = torch.arange(4 * images.patches.width).remainder(251).view(4, -1).to(torch.uint8)
        tensors |= {EMPTY_IDS: ids, SHOWN: patches, SHOWN_GRIDS: torch.tensor([[1, 2, 2]])}
        segments[EMPTY_IDS] = segments["text_ids"]
    encoders = Encoders(family, {"text_encoder": frozen}, PipelineFolder(folder))
    rows: list[list[float]] = encoders._with_text([Batch(tensors, segments)], [()])[0]["text"].tolist()
    return rows


@pytest.mark.slow
def test_a_shared_text_encoder_reads_an_image_that_one_rank_has(tmp_path: Path) -> None:
    write_qwen_image(tmp_path, edit=True)
    (alone,) = run_ranks(embed_with_image, 1, tmp_path)
    first, second = run_ranks(embed_with_image, 2, tmp_path)
    assert len(alone) == 67 - 64
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), atol=1e-6)
    assert second == []
