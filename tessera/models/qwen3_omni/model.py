"""The thinker of Qwen3-Omni: the vision encoder of Qwen3-VL, the audio encoder of Qwen3-ASR, and the decoder of Qwen3
with experts.

The names are those that transformers writes for the thinker alone. The names of full folders (`thinker.*`) and of
transformers' modules are also read.
"""

from __future__ import annotations

from typing import ClassVar

from tessera.config.reader import Section
from tessera.models.audio.family import ChunkAudioFamily, audio_rules
from tessera.models.audio.thinker import THINKER_NAMES, ThinkerFamily
from tessera.models.qwen2_vl.model import RENAMES
from tessera.models.qwen3_omni.config import FULL_MODEL, THINKER, Qwen3OmniConfig
from tessera.models.qwen3_vl.model import BLOCKS, Qwen3VL
from tessera.weights.map import Rule


class Qwen3Omni(ThinkerFamily, ChunkAudioFamily, Qwen3VL):
    name: ClassVar[str] = "qwen3_omni"
    config: ClassVar[type[Section]] = Qwen3OmniConfig
    processor: ClassVar[str] = "Qwen3OmniProcessor"
    hf_types: ClassVar[tuple[str, ...]] = (THINKER, FULL_MODEL)
    tower: ClassVar[str] = "visual."
    text_prefix: ClassVar[str] = "model."
    stacked: ClassVar[bool] = False
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*THINKER_NAMES, *RENAMES)
    together: ClassVar[str] = "; model.family=qwen3_omni_talker with model.config.trains_thinker=true trains both"
    unread: ClassVar[tuple[str, ...]] = ("talker.", "code2wav.")
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        *BLOCKS,
        *(
            (f"projector.{ours}.{part}.{{kind}}", f"{theirs}.{layer}.{{kind}}")
            for ours, theirs in (("last", "merger"), ("taps.{i}", "merger_list.{i}"))
            for part, layer in (("norm", "ln_q"), ("up", "mlp.0"), ("down", "mlp.2"))
        ),
    )

    def rules(self, config: Qwen3OmniConfig) -> list[Rule]:
        return [
            *audio_rules(self.audio_shape(config), "audio_tower.", "audio.norm_after"),
            Rule("audio_projector.up.{kind}", "audio_tower.proj1.{kind}"),
            Rule("audio_projector.down.{kind}", "audio_tower.proj2.{kind}"),
        ]
