"""InternVL 2.5, 3 and 3.5, in the Hugging Face format and in their authors' format. Images are cut into equal tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.models.family import experts, preset, quickstart_preset
from tessera.models.internvl.model import InternVL

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
_DYNAMIC_ROPE = {"dynamic_rope_factor": 2.0}


def _qwen2(sizes: Sequence[Any], vision: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    text = preset(151674, *sizes, rope_theta=1e6, attention_bias=True, bos_token_id=151643, eos_token_id=151645)
    return {**text, "vision": vision, "image_token_id": 151667, **fields}


def _qwen3(sizes: Sequence[Any], vision: Mapping[str, Any], experts: Any = None) -> dict[str, Any]:
    shape = {"head_dim": 128, "qk_norm": True, "max_position_embeddings": 40960, "experts": experts}
    text = preset(151936, *sizes, rope_theta=1e6, bos_token_id=151643, eos_token_id=151645, **shape)
    return {**text, "vision": vision, "image_token_id": 151671}


def _internlm(sizes: Sequence[Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    text = preset(92553, *sizes, rope_theta=1e6, rms_norm_eps=1e-5, **tokens)
    return {**text, "vision": vision, "image_token_id": 92546, **_DYNAMIC_ROPE}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quickstart": {
        **quickstart_preset(
            attention_bias=True, max_position_embeddings=4096, bos_token_id=None, eos_token_id=507, pad_token_id=505
        ),
        "vision": {
            "hidden_size": 96,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "attention_bias": True,
            "image_size": 56,
            "patch_size": 7,
            "layer_scale_init_value": 1.0,  # a small value slows down training from random weights
        },
        # Token 505 is end-of-text and padding. 506 begins and 507 ends a message. 508 begins and 509 ends an image. 511
        # is the placeholder of a video.
        "image_token_id": 510,
    },
    "2.5-1b": _qwen2((896, 4864, 24, (14, 2)), _300M),
    "2.5-2b": _internlm((2048, 8192, 24, (16, 8)), _300M),
    "2.5-4b": _qwen2((2048, 11008, 36, (16, 2)), _300M),
    "2.5-8b": _internlm((4096, 14336, 32, (32, 8)), _300M),
    "2.5-26b": _internlm((6144, 16384, 48, (48, 8)), _6B),
    "2.5-38b": _qwen2((5120, 27648, 64, (40, 8)), _6B),
    "2.5-78b": _qwen2((8192, 29568, 80, (64, 8)), _6B),
    "3-1b": _qwen2((896, 4864, 24, (14, 2)), _300M, **_DYNAMIC_ROPE),
    "3-2b": _qwen2((1536, 8960, 28, (12, 2)), _300M, **_DYNAMIC_ROPE),
    "3-8b": _qwen2((3584, 18944, 28, (28, 4)), _300M, **_DYNAMIC_ROPE),
    "3-14b": _qwen2((5120, 13824, 48, (40, 8)), _300M, **_DYNAMIC_ROPE),
    "3-38b": _qwen2((5120, 27648, 64, (40, 8)), _6B, **_DYNAMIC_ROPE),
    "3-78b": _qwen2((8192, 29568, 80, (64, 8)), _6B, **_DYNAMIC_ROPE),
    "3.5-1b": _qwen3((1024, 3072, 28, (16, 8)), _300M),
    "3.5-2b": _qwen3((2048, 6144, 28, (16, 8)), _300M),
    "3.5-4b": _qwen3((2560, 9728, 36, (32, 8)), _300M),
    "3.5-8b": _qwen3((4096, 12288, 36, (32, 8)), _300M),
    "3.5-14b": _qwen3((5120, 17408, 40, (40, 8)), _300M),
    "3.5-38b": _qwen3((5120, 25600, 64, (64, 8)), _6B),
    "3.5-30b-a3b": _qwen3((2048, 6144, 48, (32, 4)), _300M, experts(128, 8, 768)),
    "3.5-241b-a28b": _qwen3((4096, 12288, 94, (64, 4)), _6B, experts(128, 8, 1536)),
}
SPEC = InternVL().spec(PRESETS)
