"""The thinker of Qwen2.5-Omni: the vision encoder of Qwen2.5-VL, a Whisper-style audio encoder with windows of
attention, and the decoder of Qwen2.5.

The names are those that transformers writes for the thinker alone. The names of full folders (`thinker.*`) and of
transformers' modules are also read.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from tessera.config.reader import Section
from tessera.models.audio.family import audio_rules
from tessera.models.audio.thinker import THINKER_NAMES, ThinkerFamily
from tessera.models.qwen2_5_omni.config import FULL_MODEL, THINKER, Qwen25OmniConfig
from tessera.models.qwen2_5_vl.model import Qwen25VL
from tessera.models.qwen2_vl.model import RENAMES
from tessera.nn.audio import AudioShape, PooledProjector
from tessera.weights.map import Rule
from tessera.weights.operations import GroupByHead

POOL = 2  # number of audio frames that become one token


class OmniAudioProjector(PooledProjector):
    """Project sound. `ends`: embeddings of its begin and end, which the model does not use but weight files contain."""

    def __init__(self, features: int, hidden: int, pool: int) -> None:
        super().__init__(features, hidden, pool)
        self.ends = nn.Parameter(torch.empty(2, hidden), requires_grad=False)


class Qwen25Omni(ThinkerFamily, Qwen25VL):
    name: ClassVar[str] = "qwen2_5_omni"
    config: ClassVar[type[Section]] = Qwen25OmniConfig
    processor: ClassVar[str] = "Qwen25OmniProcessor"
    hf_types: ClassVar[tuple[str, ...]] = (THINKER, FULL_MODEL)
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*THINKER_NAMES, *RENAMES)
    unread: ClassVar[tuple[str, ...]] = ("talker.", "token2wav.")

    def audio_shape(self, config: Qwen25OmniConfig) -> AudioShape:
        return config.audio.shape(
            config.attention,
            norm_after=False,  # the features are normalised after they are averaged
            pool=POOL,
        )

    def audio_projector(self, config: Qwen25OmniConfig, shape: AudioShape) -> nn.Module:
        return OmniAudioProjector(shape.hidden, config.text.hidden_size, shape.pool)

    def rules(self, config: Qwen25OmniConfig) -> list[Rule]:
        qkv = tuple(f"visual.blocks.{{i}}.attn.{part}.{{kind}}" for part in "qkv")
        return [
            *audio_rules(self.audio_shape(config), "audio_tower.", "audio_projector.norm"),
            Rule("audio_projector.proj.{kind}", "audio_tower.proj.{kind}"),
            Rule("audio_projector.ends", "audio_tower.audio_bos_eos_token.weight"),
            Rule("vision.blocks.{i}.attn.qkv.{kind}", qkv, GroupByHead(config.vision.num_heads, separate=True)),
        ]
