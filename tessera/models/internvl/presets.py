"""Sizes by name: the published ones, and one small enough to learn something in minutes on two cores.

Names begin with the version: 2.5, 3, 3.5. Of the published heads none is tied to the table of words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_300M = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": True,
}
_6B = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "attention_bias": False,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
}
_STRETCHED = {"dynamic_rope_factor": 2.0}


def _tower(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": 1e6,
        **more,
    }


def _qwen2(text: Mapping[str, Any], vision: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    words = {"vocab_size": 151674, "attention_bias": True, "bos_token_id": 151643, "eos_token_id": 151645}
    return {"text": {**words, **text}, "vision": vision, "image_token_id": 151667, **more}


def _qwen3(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    words = {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645}
    shape = {"head_dim": 128, "qk_norm": True, "max_position_embeddings": 40960}
    return {"text": {**words, **shape, **text}, "vision": vision, "image_token_id": 151671}


def _internlm(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    words = {"vocab_size": 92553, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rms_norm_eps": 1e-5}
    return {"text": {**words, **text}, "vision": vision, "image_token_id": 92546, **_STRETCHED}


def _experts(count: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": 8, "moe_intermediate_size": width}


_QUICKSTART: dict[str, Any] = {
    "text": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,  # about 1/sqrt(hidden): the published 0.02 suits widths of thousands
        "bos_token_id": None,
        "eos_token_id": 507,
        "pad_token_id": 505,
    },
    "vision": {
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_bias": True,
        "image_size": 56,
        "patch_size": 7,
        "layer_scale_init_value": 1.0,  # a small one delays a tower that begins from nothing
    },
    "tie_word_embeddings": True,
    # 505 end of text (and padding), 506 and 507 open and close a message, 508 and 509 a picture, 511 is a clip.
    "image_token_id": 510,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": _QUICKSTART,
    "2.5-1b": _qwen2(_tower(896, 4864, 24, 14, 2), _300M),
    "2.5-2b": _internlm(_tower(2048, 8192, 24, 16, 8), _300M),
    "2.5-4b": _qwen2(_tower(2048, 11008, 36, 16, 2), _300M),
    "2.5-8b": _internlm(_tower(4096, 14336, 32, 32, 8), _300M),
    "2.5-26b": _internlm(_tower(6144, 16384, 48, 48, 8), _6B),
    "2.5-38b": _qwen2(_tower(5120, 27648, 64, 40, 8), _6B),
    "2.5-78b": _qwen2(_tower(8192, 29568, 80, 64, 8), _6B),
    "3-1b": _qwen2(_tower(896, 4864, 24, 14, 2), _300M, **_STRETCHED),
    "3-2b": _qwen2(_tower(1536, 8960, 28, 12, 2), _300M, **_STRETCHED),
    "3-8b": _qwen2(_tower(3584, 18944, 28, 28, 4), _300M, **_STRETCHED),
    "3-14b": _qwen2(_tower(5120, 13824, 48, 40, 8), _300M, **_STRETCHED),
    "3-38b": _qwen2(_tower(5120, 27648, 64, 40, 8), _6B, **_STRETCHED),
    "3-78b": _qwen2(_tower(8192, 29568, 80, 64, 8), _6B, **_STRETCHED),
    "3.5-1b": _qwen3(_tower(1024, 3072, 28, 16, 8), _300M),
    "3.5-2b": _qwen3(_tower(2048, 6144, 28, 16, 8), _300M),
    "3.5-4b": _qwen3(_tower(2560, 9728, 36, 32, 8), _300M),
    "3.5-8b": _qwen3(_tower(4096, 12288, 36, 32, 8), _300M),
    "3.5-14b": _qwen3(_tower(5120, 17408, 40, 40, 8), _300M),
    "3.5-38b": _qwen3(_tower(5120, 25600, 64, 64, 8), _6B),
    "3.5-30b-a3b": _qwen3(_tower(2048, 6144, 48, 32, 4, experts=_experts(128, 768)), _300M),
    "3.5-241b-a28b": _qwen3(_tower(4096, 12288, 94, 64, 4, experts=_experts(128, 1536)), _6B),
}
