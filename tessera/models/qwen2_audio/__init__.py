"""Qwen2-Audio: recordings of up to 30 seconds, and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_AUDIO, preset, quickstart_preset
from tessera.models.qwen2_audio.model import Qwen2Audio

_TEXT: dict[str, Any] = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 8192,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        # Token 505 is end-of-text and padding. 506 begins and 507 ends a message, 508 and 509 enclose a recording.
        "text": quickstart_preset(attention_bias=True, eos_token_id=507, pad_token_id=505)["text"],
        "audio": {**QUICKSTART_AUDIO, "max_source_positions": 100},
        "audio_token_id": 510,
    },
    "7b": {"text": preset(156032, 4096, 11008, 32, (32, 32), **_TEXT)["text"]},
}
SPEC = Qwen2Audio().spec(PRESETS)
