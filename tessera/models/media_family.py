"""Make the `ModelSpec` of a family with encoders of media, projectors and a text decoder.

A family describes each of its encoders as a `Tower`. `VisionFamily` and `AudioFamily` make theirs; a class that derives
from both has both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from tessera.core.batch import Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, TensorStyle
from tessera.core.spec import Training
from tessera.models.family import Family
from tessera.models.processing.streams import MediaStream
from tessera.models.text.costs import Measures, batch_flops, text_work
from tessera.models.text.decoder import (
    ATTENTION,
    BLOCKS,
    TEXT_STREAM,
    build_head,
    build_text,
    text_experts,
    text_heads,
    text_styles,
    text_units,
)
from tessera.nn.multimodal import Encoder, MultimodalModel


@dataclass(frozen=True)
class Tower:
    """Describe an encoder and its projector. `media.stream` has their paths in the model."""

    media: MediaStream
    encoder: Encoder
    build: Callable[[], Mapping[str, nn.Module]]  # returns a new encoder and projector, by path
    blocks: str  # pattern of the blocks that are computed
    heads: Mapping[str, int]  # module pattern -> number of heads in its output features, as in `ModelPlan.heads`
    styles: Mapping[str, TensorStyle]
    units: tuple[PipelineUnit, ...]
    work: Callable[[Measures, Training], np.ndarray]  # returns the FLOPs of encoder and projector for each sample
    text_layers: int = 0  # number of first text layers that add features of this encoder (DeepStack)


class MediaFamily(Family):
    """Declare a family with encoders and a text decoder.

    Its `config` is a section with the fields `text`, `tie_word_embeddings` and `attention`.
    """

    def towers(self, config: Any) -> dict[str, Tower]:
        """Return the encoders in order of execution. Keys: names of their streams."""
        return {}

    def styles(self, config: Any) -> dict[str, TensorStyle]:
        """Return tensor-parallel styles that differ from the defaults."""
        return {}

    def build(self, config: Any) -> MultimodalModel:
        text, towers = build_text(config.text, config.attention), self.towers(config).values()
        modules = {path: module for tower in towers for path, module in tower.build().items()}
        head = build_head(text, config.tie_word_embeddings)
        return MultimodalModel([t.encoder for t in towers], modules, text, head, config.text.initializer_range)

    def work(self, config: Any, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
        towers = {name: tower.work(measures, training) for name, tower in self.towers(config).items()}
        return {"text": text_work(config.text, measures, training), **towers}

    def flops(self, config: Any, batch: Batch, training: Training = MappingProxyType({})) -> float:
        streams = {name: tower.media for name, tower in self.towers(config).items()}
        return batch_flops(self.work, streams, config, batch, training)

    def plan(self, config: Any) -> ModelPlan:
        text, tied, named = config.text, config.tie_word_embeddings, self.towers(config)
        towers = list(named.values())
        styles = {path: style for tower in towers for path, style in tower.styles.items()}
        return ModelPlan(
            blocks=(*(tower.blocks for tower in towers), BLOCKS),
            tensor={**text_styles(text, tied), **styles, **self.styles(config)},
            units=(*_units(towers), *text_units(text, whole=max((t.text_layers for t in towers), default=0))),
            streams={**{name: tower.media.stream for name, tower in named.items()}, "text": TEXT_STREAM},
            experts=text_experts(text),
            # Modules used outside of their blocks: the loss reads the head, and a tied head reads the embedding.
            fsdp_root=("text.embed", "head"),
            attention=(*(f"{tower.blocks}.attn.core" for tower in towers), ATTENTION),
            heads={**{path: heads for tower in towers for path, heads in tower.heads.items()}, **text_heads(text)},
            tied={"head": "text.embed"} if tied else {},
        )


def _units(towers: Sequence[Tower]) -> list[PipelineUnit]:
    """Return the pipeline units of all encoders.

    Stages of a later encoder also pass on the embeddings of earlier encoders: at most one for each token.
    """
    units: list[PipelineUnit] = []
    width = 0
    for tower in towers:
        for unit in tower.units:
            if unit.output is not None and width:
                unit = replace(unit, output=StageActivation(unit.output.per_token + 1, max(unit.output.width, width)))
            units.append(unit)
        width = max(width, tower.encoder.width)
    return units
