"""Declare thinkers: families with a vision and an audio encoder that are one part of a published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tessera.core.batch import Batch
from tessera.models.audio.family import AudioFamily, with_clips
from tessera.models.vision.family import GridFamily
from tessera.weights.layouts import CONFIG_FILE, folder_layout

# (prefix of names in a full model's folder or in transformers' modules, prefix in a thinker's folder)
THINKER_NAMES = (
    *((f"thinker.{part}", part) for part in ("model.", "visual.", "audio_tower.", "lm_head.")),
    ("model.audio_tower.", "audio_tower."),
)


class ThinkerFamily(AudioFamily, GridFamily):
    """Base class of thinker families, whose configuration is an `OmniConfig`.

    A family also derives from the family of its vision encoder, which comes after this class.
    """

    together: ClassVar[str] = ""  # how to train thinker and talker together

    def untrained_parts(self, folder: Path) -> str | None:
        fields = folder_layout(folder).config() if (folder / CONFIG_FILE).is_file() else {}
        full: str = self.config.full_model  # type: ignore[attr-defined]
        if fields.get("model_type") != full or not fields.get("enable_audio_output", True):
            return None
        return (
            f"only the thinker of {folder} is trained: its talker reads embeddings and hidden states of the thinker, "
            f"so its speech may not follow the texts of the tuned thinker{self.together}"
        )

    def example(self, config: Any, tokens: int) -> Batch:
        """Return a batch in which images and recordings make up about a quarter of the tokens each."""
        return with_clips(super(AudioFamily, self).example(config, tokens), self.audio_shape(config), tokens // 4)
