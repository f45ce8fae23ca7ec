"""LLaVA 1.5 and LLaVA-OneVision: a CLIP or SigLIP encoder, an MLP projector and a language model.

OneVision cuts the only image of a sample into tiles. Several images are not cut. It also reads videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.models.family import preset, quickstart_preset
from tessera.models.llava.model import Llava

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
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = (32064, hidden, intermediate, layers, (heads, heads))
    text = preset(*sizes, rms_norm_eps=1e-5, max_position_embeddings=4096, **tokens)
    return {**text, "vision": _CLIP, "image_token_id": 32000, **_PENULTIMATE}


def _onevision(*sizes: Any, tied: bool = False) -> dict[str, Any]:
    tokens: dict[str, Any] = {"bos_token_id": 151643, "eos_token_id": 151645}
    text = preset(*sizes, tied=tied, attention_bias=True, rope_theta=1e6, **tokens)
    media = {"tiles": {"most": 9}, "image_token_id": 151646, "video_token_id": 151647}
    return {**text, "vision": _SIGLIP, **media, **_ALL_FEATURES}


_TINY_VISION: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
_PENULTIMATE = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
_ALL_FEATURES = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        # Token 507 is end-of-text and padding. 508 begins and 509 ends a message.
        **quickstart_preset(attention_bias=True, max_position_embeddings=4096, eos_token_id=509, pad_token_id=507),
        "vision": {**_SIGLIP, **_TINY_VISION},
        "tiles": {"pinpoints": [(28, 28), (28, 56), (56, 28), (56, 56), (28, 84), (84, 28)], "most": 3},
        "image_token_id": 510,
        "video_token_id": 511,
        **_ALL_FEATURES,
    },
    "quickstart-1.5": {
        # Token 508 begins and 509 ends a conversation.
        **quickstart_preset(tied=False, max_position_embeddings=4096, bos_token_id=508, eos_token_id=509),
        "vision": {**_CLIP, **_TINY_VISION},
        "image_token_id": 510,
        **_PENULTIMATE,
    },
    "1.5-7b": _plain(4096, 11008, 32, 32),
    "1.5-13b": _plain(5120, 13824, 40, 40),
    "onevision-0.5b": _onevision(152000, 896, 4864, 24, (14, 2), tied=True),
    "onevision-7b": _onevision(152128, 3584, 18944, 28, (28, 4)),
    "onevision-72b": _onevision(152128, 8192, 29568, 80, (64, 8)),
}
SPEC = Llava().spec(PRESETS)
