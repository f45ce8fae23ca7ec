"""A family that derives from both bases has both encoders: model, plan, FLOPs and pipeline units follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tessera.config.pattern import matches
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.models import resolve
from tessera.models.audio.family import AudioFamily, with_clips
from tessera.models.qwen2_vl.model import Qwen2VL
from tessera.nn.audio import AudioShape, PooledProjector


class BothSenses(Qwen2VL, AudioFamily):
    def audio_shape(self, config: Any) -> AudioShape:
        return AudioShape(16, 24, 48, 2, 2, norm_after=False, pool=2)

    def audio_projector(self, config: Any, shape: AudioShape) -> nn.Module:
        return PooledProjector(shape.hidden, config.text.hidden_size, shape.pool)

    def example(self, config: Any, tokens: int) -> Batch:
        return with_clips(super().example(config, tokens), self.audio_shape(config), tokens // 4)


def test_a_family_may_have_both_encoders() -> None:
    family = BothSenses()
    _, config = resolve(ModelSection(family="qwen2_vl", preset="quickstart"))
    spec = family.spec({})
    model, plan = spec.main.build(config), spec.main.plan(config)
    for path, parameter in model.named_parameters():
        assert sum(matches(pattern, path) for pattern in plan.tensor) == 1, path
        model.initialize(path, parameter, torch.Generator().manual_seed(0))
    assert list(plan.encoders) == ["vision", "audio"]
    # Inside of the second encoder, embeddings of the first travel along: at most one for each token.
    rows = {unit.pattern: unit.output for unit in plan.units if unit.output is not None}
    hearing = rows["audio.blocks.{*}"]
    assert (hearing.per_token, hearing.width) == (3, config.text.hidden_size)
    batch = spec.example(config, 128)  # type: ignore[misc]
    with torch.no_grad():
        logits = model(batch, logits=True)["logits"]
        deaf = model(without(batch, "audio_slots", "mel", "mel_positions"), logits=True)["logits"]
    assert not torch.equal(logits, deaf)  # it hears
    seen = Qwen2VL().flops(config, batch)
    heard = family.audio_shape(config)
    elements, blocks = len(batch["mel"]), heard.layers * heard.block_weights
    least = 3 * 2 * elements * blocks  # the matrix products of the blocks, forward and backward
    assert seen + least < family.flops(config, batch) < seen + 3 * least


def without(batch: Batch, *names: str) -> Batch:
    return replace(batch, tensors={name: tensor for name, tensor in batch.tensors.items() if name not in names})
