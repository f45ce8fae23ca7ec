"""Qwen3-Omni: the thinker, which reads text, images, videos and sound. Its talker is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tessera.models.family import preset, quickstart_preset
from tessera.models.qwen3_omni.model import Qwen3Omni

_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 8,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": (0, 1),
}
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 80,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "d_model": 96,
    "downsample_hidden_size": 16,
}
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


def _experts(count: int, chosen: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            head_dim=32,
            rope_theta=1e4,
            max_position_embeddings=4096,
            mrope_section=(6, 5, 5),
            experts=_experts(8, 2, 96),
            bos_token_id=None,
            eos_token_id=504,
            pad_token_id=502,
        ),
        "vision": _VISION,
        "audio": _AUDIO,
        **{name: 505 + number for number, name in enumerate(_WORDS)},
    },
    "30b-a3b": preset(152064, 2048, 768, 48, (32, 4), experts=_experts(128, 8, 768)),
}
SPEC = replace(Qwen3Omni().spec(PRESETS), speech_family="qwen3_omni_talker")
