"""Qwen2-VL: its vision encoder and projector from the blocks in `nn`, and its parameter names in folders.

The names are those of published files (`visual.*`, `model.layers.*`, `lm_head.weight`), which transformers writes and
reads. The names of transformers' modules, and of a base model that was saved without its head, are also read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from tessera.config.reader import Section
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.vision.family import GridFamily
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionShape

RENAMES = (("model.visual.", "visual."), ("model.language_model.", "model."), ("language_model.", "model."))
MERGER = (
    ("projector.norm.{kind}", "merger.ln_q.{kind}"),
    ("projector.up.{kind}", "merger.mlp.0.{kind}"),
    ("projector.down.{kind}", "merger.mlp.2.{kind}"),
)


class Qwen2VL(GridFamily):
    name: ClassVar[str] = "qwen2_vl"
    config: ClassVar[type[Section]] = Qwen2VLConfig
    processor: ClassVar[str] = "Qwen2VLProcessor"
    tower: ClassVar[str] = "visual."
    renames: ClassVar[tuple[tuple[str, str], ...]] = RENAMES
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        ("vision.blocks.{i}.attn_norm.{kind}", "blocks.{i}.norm1.{kind}"),
        ("vision.blocks.{i}.attn.proj.{kind}", "blocks.{i}.attn.proj.{kind}"),
        ("vision.blocks.{i}.mlp_norm.{kind}", "blocks.{i}.norm2.{kind}"),
        ("vision.blocks.{i}.mlp.up.{kind}", "blocks.{i}.mlp.fc1.{kind}"),
        ("vision.blocks.{i}.mlp.down.{kind}", "blocks.{i}.mlp.fc2.{kind}"),
        *MERGER,
    )

    def encoder(self, config: Qwen2VLConfig) -> dict[str, Any]:
        return {"intermediate": config.vision.embed_dim * config.vision.mlp_ratio}

    def projector(self, config: Qwen2VLConfig, shape: VisionShape) -> nn.Module:
        return PatchMerger(shape.hidden, shape.merge, config.text.hidden_size)
