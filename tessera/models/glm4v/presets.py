"""Sizes by name: the published ones, and one small enough to learn something in minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_9B: dict[str, Any] = {
    "text": {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": (8, 12, 12),
        "max_position_embeddings": 65536,
        # End of text, the words with which a user and a tool begin to speak, and the end of an answer.
        "eos_token_id": (151329, 151336, 151338, 151348),
        "pad_token_id": 151329,
    },
    "vision": {"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "image_size": 336},
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
    "image_token_id": 151343,
    "video_token_id": 151344,
}

_QUICKSTART: dict[str, Any] = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": (2, 3, 3),
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,  # about 1/sqrt(hidden): the published 0.02 suits widths of thousands
        "eos_token_id": (499, 503, 505),
        "pad_token_id": 499,
    },
    "vision": {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": 7,
        "image_size": 84,
    },
    "tie_word_embeddings": True,
    # 499 end of text (and padding), 500 to 505 what begins a conversation and its turns, as the published model has.
    "image_start_token_id": 506,
    "image_end_token_id": 507,
    "video_start_token_id": 508,
    "video_end_token_id": 509,
    "image_token_id": 510,
    "video_token_id": 511,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {"quickstart": _QUICKSTART, "9b": _9B}
