"""Qwen2-Audio: a Whisper encoder over 30 seconds, whose features are averaged in pairs, and the decoder of Qwen2.

The names are those of published files (`audio_tower.*`, `language_model.model.*`). The names of transformers' modules,
and those that its release 5.22 writes, are also read.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from tessera.config.reader import Section
from tessera.models.audio.family import AudioFamily, audio_rules
from tessera.models.qwen2_audio.config import Qwen2AudioConfig
from tessera.models.text.decoder import language_weights
from tessera.nn.audio import AudioShape, PooledProjector
from tessera.weights.map import Rule, WeightMap

POOL = 2


class Qwen2Audio(AudioFamily):
    name: ClassVar[str] = "qwen2_audio"
    config: ClassVar[type[Section]] = Qwen2AudioConfig
    processor: ClassVar[str] = "Qwen2AudioProcessor"

    def audio_shape(self, config: Qwen2AudioConfig) -> AudioShape:
        return config.audio.shape(
            config.attention,
            positions=config.audio.max_source_positions,
            norm_after=False,  # the features are normalised after they are averaged
            pool=POOL,
        )

    def audio_projector(self, config: Qwen2AudioConfig, shape: AudioShape) -> nn.Module:
        return PooledProjector(shape.hidden, config.text.hidden_size, shape.pool)

    def weights(self, config: Qwen2AudioConfig) -> WeightMap:
        return language_weights(
            config.text,
            config.tie_word_embeddings,
            [
                *audio_rules(self.audio_shape(config), "audio_tower.", "audio_projector.norm"),
                Rule("audio_projector.proj.{kind}", "multi_modal_projector.linear.{kind}"),
            ],
            prefix="language_model.model.",
            head="language_model.lm_head.weight",
            renames=(
                ("language_model.model.model.", "language_model.model."),
                ("model.language_model.", "language_model.model."),
                ("model.audio_tower.", "audio_tower."),
                ("model.multi_modal_projector.", "multi_modal_projector."),
                ("lm_head.", "language_model.lm_head."),
            ),
        )
