"""Sizes by name: the published ones, and small ones that learn something in minutes on two cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLIP = {
    "kind": "clip",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {
    "kind": "siglip",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def _plain(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "text": {
            "vocab_size": 32064,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision": _CLIP,
        "image_token_id": 32000,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _onevision(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "text": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "attention_bias": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
        "vision": _SIGLIP,
        "tiles": {"most": 9},
        "tie_word_embeddings": tied,
        "image_token_id": 151646,
        "video_token_id": 151647,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


_TINY_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,  # about 1/sqrt(hidden): the published 0.02 suits widths of thousands
    "bos_token_id": None,
}
_TINY_VISION: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
# 507 end of text (and padding), 508 and 509 open and close a message.
_QUICKSTART: dict[str, Any] = {
    "text": {**_TINY_TEXT, "attention_bias": True, "eos_token_id": 509, "pad_token_id": 507},
    "vision": {**_SIGLIP, **_TINY_VISION},
    "tiles": {"pinpoints": [(28, 28), (28, 56), (56, 28), (56, 56), (28, 84), (84, 28)], "most": 3},
    "tie_word_embeddings": True,
    "image_token_id": 510,
    "video_token_id": 511,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
# 508 and 509 begin and end a conversation.
_QUICKSTART_PLAIN: dict[str, Any] = {
    "text": {**_TINY_TEXT, "bos_token_id": 508, "eos_token_id": 509},
    "vision": {**_CLIP, **_TINY_VISION},
    "image_token_id": 510,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": _QUICKSTART,
    "quickstart-1.5": _QUICKSTART_PLAIN,
    "1.5-7b": _plain(4096, 11008, 32, 32),
    "1.5-13b": _plain(5120, 13824, 40, 40),
    "onevision-0.5b": _onevision(152000, 896, 4864, 24, 14, 2, tied=True),
    "onevision-7b": _onevision(152128, 3584, 18944, 28, 28, 4, tied=False),
    "onevision-72b": _onevision(152128, 8192, 29568, 80, 64, 8, tied=False),
}
