"""Qwen3-Omni: the thinker, which reads text, images, videos and sound. Its talker is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tessera.models.family import QUICKSTART_AUDIO, experts, preset, quickstart_preset
from tessera.models.qwen3_omni.model import Qwen3Omni
from tessera.models.qwen3_vl import QUICKSTART_TOWER

# Token 502 is end-of-text and padding. 503 begins and 504 ends a message. Ids are in the order of the template.
_WORDS = (
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "image_token_id",
    "video_token_id",
    "audio_token_id",
)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            head_dim=32,
            rope_theta=1e4,
            max_position_embeddings=4096,
            mrope_section=(6, 5, 5),
            experts=experts(8, 2, 96),
            bos_token_id=None,
            eos_token_id=504,
            pad_token_id=502,
        ),
        "vision": QUICKSTART_TOWER,
        "audio": {**QUICKSTART_AUDIO, "downsample_hidden_size": 16},
        **{name: 505 + number for number, name in enumerate(_WORDS)},
    },
    "30b-a3b": preset(152064, 2048, 768, 48, (32, 4), experts=experts(128, 8, 768)),
}
SPEC = replace(Qwen3Omni().spec(PRESETS), speech_family="qwen3_omni_talker")
