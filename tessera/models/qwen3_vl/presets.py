"""Sizes by name: the published ones, and small ones that learn something in minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": (5, 11, 17),
}
_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": (8, 16, 24),
}


def _experts(count: int, chosen: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}


def _published(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: Sequence[int],
    vision: Mapping[str, Any],
    *,
    tied: bool = False,
    experts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`heads`: of queries, and of keys and values."""
    return {
        "text": {
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "experts": experts,
        },
        "vision": vision,
        "tie_word_embeddings": tied,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }


def _quickstart(experts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "text": {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_theta": 1e4,
            "mrope_section": (6, 5, 5),
            "experts": experts,
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
            "patch_size": 8,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": (0, 1),
        },
        "tie_word_embeddings": True,
        # 504 end of text (and padding), 505 and 506 open and close a message, as the published models order theirs.
        "vision_start_token_id": 507,
        "vision_end_token_id": 508,
        "image_token_id": 509,
        "video_token_id": 510,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": _quickstart(),
    "quickstart-moe": _quickstart(_experts(8, 2, 96)),
    "2b": _published(2048, 6144, 28, (16, 8), _SMALL_TOWER, tied=True),
    "4b": _published(2560, 9728, 36, (32, 8), _SMALL_TOWER, tied=True),
    "8b": _published(4096, 12288, 36, (32, 8), _LARGE_TOWER),
    "32b": _published(5120, 25600, 64, (64, 8), _LARGE_TOWER),
    "30b-a3b": _published(2048, 6144, 48, (32, 4), _LARGE_TOWER, experts=_experts(128, 8, 768)),
    "235b-a22b": _published(4096, 12288, 94, (64, 4), _LARGE_TOWER, experts=_experts(128, 8, 1536)),
}
