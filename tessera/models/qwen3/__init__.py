"""Qwen3, dense and with experts: normalised queries and keys, and a head size that is set independently."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from tessera.models.family import HFTextFormats, LanguageConfig, experts, language_family, preset
from tessera.models.qwen2 import CHATML
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import QWEN3, QWEN3_MOE


class Qwen3TextConfig(TextConfig):
    head_dim: int | None = Field(128, gt=0)
    qk_norm: bool = True
    rope_theta: float = Field(1e6, gt=0)
    max_position_embeddings: int = Field(40960, gt=0)
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class Qwen3Config(LanguageConfig):
    formats: ClassVar[HFTextFormats] = {
        "qwen3": (QWEN3, "Qwen3ForCausalLM"),
        "qwen3_moe": (QWEN3_MOE, "Qwen3MoeForCausalLM"),
    }

    text: Qwen3TextConfig


_SMALL: dict[str, Any] = {
    "head_dim": 32,
    "rope_theta": 1e4,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": 506,
}
_LONG: dict[str, Any] = {"max_position_embeddings": 262144}  # models of July 2025, which have a longer context
PRESETS = {
    "quickstart": preset(512, 128, 384, 4, (4, 2), tied=True, **_SMALL),
    "quickstart-moe": preset(512, 128, 384, 4, (4, 2), tied=True, experts=experts(8, 2, 96), **_SMALL),
    "0.6b": preset(151936, 1024, 3072, 28, (16, 8), tied=True),
    "1.7b": preset(151936, 2048, 6144, 28, (16, 8), tied=True),
    "4b": preset(151936, 2560, 9728, 36, (32, 8), tied=True),
    "4b-2507": preset(151936, 2560, 9728, 36, (32, 8), tied=True, rope_theta=5e6, **_LONG),
    "8b": preset(151936, 4096, 12288, 36, (32, 8)),
    "14b": preset(151936, 5120, 17408, 40, (40, 8)),
    "32b": preset(151936, 5120, 25600, 64, (64, 8)),
    "30b-a3b": preset(151936, 2048, 6144, 48, (32, 4), experts=experts(128, 8, 768)),
    "30b-a3b-2507": preset(151936, 2048, 6144, 48, (32, 4), experts=experts(128, 8, 768), rope_theta=1e7, **_LONG),
    "235b-a22b": preset(151936, 4096, 12288, 94, (64, 4), experts=experts(128, 8, 1536)),
    "235b-a22b-2507": preset(151936, 4096, 12288, 94, (64, 4), experts=experts(128, 8, 1536), rope_theta=5e6, **_LONG),
    "coder-480b-a35b": preset(
        151936,
        6144,
        8192,
        62,
        (96, 8),
        experts=experts(160, 8, 2560, router_aux_loss_coef=0.0),
        rope_theta=1e7,
        bos_token_id=None,
        **_LONG,
    ),
}
SPEC = language_family("qwen3", Qwen3Config, PRESETS, (CHATML,))
