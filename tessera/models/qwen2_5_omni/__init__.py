"""Qwen2.5-Omni: the thinker, which reads text, images, videos and sound. Its talker is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_AUDIO, preset, quickstart_preset
from tessera.models.qwen2_5_omni.model import Qwen25Omni
from tessera.models.qwen2_5_vl import SMALL_TOWER

# Token 502 is end-of-text and padding. 503 begins and 504 ends a message. Ids are in the order of the template.
_WORDS = (
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "image_token_index",
    "video_token_index",
    "audio_token_index",
)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            rope_theta=1e4,
            max_position_embeddings=4096,
            mrope_section=(4, 6, 6),
            bos_token_id=None,
            eos_token_id=504,
            pad_token_id=502,
        ),
        "vision": SMALL_TOWER,
        "audio": {**QUICKSTART_AUDIO, "n_window": 50},
        **{name: 505 + number for number, name in enumerate(_WORDS)},
    },
    "3b": preset(151936, 2048, 11008, 36, (16, 2)),
    "7b": preset(152064, 3584, 18944, 28, (28, 4)),
}
SPEC = Qwen25Omni().spec(PRESETS)
