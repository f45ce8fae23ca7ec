"""Sizes by name: the published ones, and one small enough to learn something in minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _published(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, vision: int, tied: bool = False
) -> dict[str, Any]:
    """`vision`: width of the MLPs in the tower, all that differs there."""
    return {
        "text": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "mrope_section": (16, 24, 24),
            "max_position_embeddings": 128000,
        },
        "vision": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": vision,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": (7, 15, 23, 31),
            "tokens_per_second": 2,
        },
        "tie_word_embeddings": tied,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }


_QUICKSTART: dict[str, Any] = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "mrope_section": (4, 6, 6),
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,  # about 1/sqrt(hidden): the published 0.02 suits widths of thousands
        "bos_token_id": None,
        "eos_token_id": 506,
        "pad_token_id": 504,
    },
    "vision": {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": 7,
        "window_size": 28,
        "fullatt_block_indexes": (1,),
    },
    "tie_word_embeddings": True,
    # 504 end of text (and padding), 505 and 506 open and close a message, as the published models order theirs.
    "vision_start_token_id": 507,
    "vision_end_token_id": 508,
    "image_token_id": 509,
    "video_token_id": 510,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": _QUICKSTART,
    "3b": _published(2048, 11008, 36, 16, 2, 151936, vision=3420, tied=True),
    "7b": _published(3584, 18944, 28, 28, 4, 152064, vision=3420),
    "32b": _published(5120, 27648, 64, 40, 8, 152064, vision=3456),
    "72b": _published(8192, 29568, 80, 64, 8, 152064, vision=3456),
}
