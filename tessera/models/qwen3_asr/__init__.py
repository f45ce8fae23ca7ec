"""Qwen3-ASR: speech recognition in many languages. An answer is `language NAME<asr_text>TEXT`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import QUICKSTART_AUDIO, preset, quickstart_preset
from tessera.models.qwen3_asr.model import Qwen3ASR


def _published(hidden: int, intermediate: int, tower: Mapping[str, int]) -> dict[str, Any]:
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": (151643, 151645), "pad_token_id": 151645}
    text = preset(151936, hidden, intermediate, 28, (16, 8), tied=True, max_position_embeddings=65536, **tokens)
    return {**text, "audio": tower}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        # Token 506 is end-of-text and padding. 507 begins and 508 ends a message, 509 and 510 enclose a recording.
        **quickstart_preset(head_dim=32, rope_theta=1e4, bos_token_id=None, eos_token_id=508, pad_token_id=506),
        "audio": {**QUICKSTART_AUDIO, "downsample_hidden_size": 16},
        "audio_token_id": 511,
        "timestamp_token_id": 505,
    },
    "0.6b": _published(
        1024,
        3072,
        {"d_model": 896, "encoder_layers": 18, "encoder_attention_heads": 14, "encoder_ffn_dim": 3584},
    ),
    "1.7b": _published(2048, 6144, {}),
}
SPEC = Qwen3ASR().spec(PRESETS)
