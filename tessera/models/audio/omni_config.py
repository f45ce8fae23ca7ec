"""Configurations of thinkers: models that see and hear, and that are one part of a published model that also speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from tessera.config.reader import build
from tessera.models.audio.config import AudioConfig
from tessera.models.text.hf import Check, check_supported
from tessera.models.vision.config import VisionLanguageConfig


class OmniConfig(VisionLanguageConfig):
    """Configure a thinker. It is read from the config.json of a thinker's folder or of the full model's folder."""

    full_model: ClassVar[str]  # `model_type` in folders of the full model; the types of its parts begin with it
    time_fields: ClassVar[tuple[str, ...]]  # names, in config.json and here, of the fields about time positions
    hf_fields: ClassVar[Mapping[str, Any]] = {}  # defaults of transformers that differ from those of a recipe
    tie_in_text: ClassVar[bool] = False

    audio: AudioConfig

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        (thinker,) = cls.formats
        if data.get("model_type") == cls.full_model:
            data = {**(data.get("thinker_config") or {}), "model_type": thinker}
        data = {**cls.hf_fields, **data}
        where = f"config.json ({thinker})"
        base = super().from_hf(data)
        audio, width = data.get("audio_config") or {}, base.text.hidden_size
        checks: list[Check] = [
            ("audio_config.output_dim", audio.get("output_dim", 3584), (width,)),
            ("audio_config.scale_embedding", bool(audio.get("scale_embedding")), (False,)),
        ]
        check_supported(checks, where)
        audio_config: Any = cls.model_fields["audio"].annotation
        times = {name: data[name] for name in cls.time_fields if data.get(name) is not None}
        return build(cls, {**base.model_dump(), "audio": audio_config.read(audio, where), **times}, where)

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf()
        fields["vision_config"]["model_type"] = f"{self.full_model}_vision_encoder"
        audio = self.audio.write(f"{self.full_model}_audio_encoder", self.text.initializer_range)
        fields["audio_config"] = {**audio, "output_dim": self.text.hidden_size}
        return {**fields, **{name: getattr(self, name) for name in self.time_fields}}
