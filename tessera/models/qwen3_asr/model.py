"""Qwen3-ASR: an encoder with 2D convolutions over chunks of one second, an MLP projector, and the decoder of Qwen3."""

from __future__ import annotations

from typing import ClassVar

from tessera.config.reader import Section
from tessera.models.audio.family import ChunkAudioFamily, audio_rules
from tessera.models.qwen3_asr.config import Qwen3ASRConfig
from tessera.models.text.decoder import language_weights
from tessera.weights.map import Rule, WeightMap


class Qwen3ASR(ChunkAudioFamily):
    name: ClassVar[str] = "qwen3_asr"
    config: ClassVar[type[Section]] = Qwen3ASRConfig
    processor: ClassVar[str] = "Qwen3ASRProcessor"

    def weights(self, config: Qwen3ASRConfig) -> WeightMap:
        return language_weights(
            config.text,
            config.tie_word_embeddings,
            [
                *audio_rules(self.audio_shape(config), "model.audio_tower.", "audio.norm_after"),
                Rule("audio_projector.up.{kind}", "model.multi_modal_projector.linear_1.{kind}"),
                Rule("audio_projector.down.{kind}", "model.multi_modal_projector.linear_2.{kind}"),
            ],
            prefix="model.language_model.",
            renames=(
                ("language_model.", "model.language_model."),
                ("audio_tower.", "model.audio_tower."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            ),
        )
