"""Llama 2, 3, 3.1, 3.2 and 3.3, and models with the same `model_type` (Vicuna, InternLM converted to Hugging Face)."""

from __future__ import annotations

from typing import Any, ClassVar

from tessera.models.family import HFTextFormats, LanguageConfig, language_family, preset
from tessera.models.processing.chat import ChatTemplate, Turn
from tessera.models.text.hf import LLAMA

LLAMA3 = ChatTemplate(
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    turns={"": Turn("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")},
    media={},
    begin="<|begin_of_text|>",
    system=None,
    end_of_text="<|end_of_text|>",
)
VICUNA = ChatTemplate(
    special=("<s>", "</s>"),
    turns={
        "system": Turn("", " "),
        "assistant": Turn("ASSISTANT: ", "</s>"),
        "": Turn("USER: ", " "),
    },
    media={},
    begin="<s>",
    system="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    end_of_text="</s>",
)


class LlamaConfig(LanguageConfig):
    formats: ClassVar[HFTextFormats] = {"llama": (LLAMA, "LlamaForCausalLM")}


_TWO: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
_THREE: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "bos_token_id": 128000, "eos_token_id": 128001}
_LONG: dict[str, Any] = {
    **_THREE,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_SMALL: dict[str, Any] = {**_LONG, "rope_scaling": {**_LONG["rope_scaling"], "factor": 32.0}}
PRESETS = {
    "quickstart": preset(512, 128, 384, 4, (4, 2), initializer_range=0.06, eos_token_id=506),
    "2-7b": preset(32000, 4096, 11008, 32, (32, 32), **_TWO),
    "2-13b": preset(32000, 5120, 13824, 40, (40, 40), **_TWO),
    "2-70b": preset(32000, 8192, 28672, 80, (64, 8), **_TWO),
    "3-8b": preset(128256, 4096, 14336, 32, (32, 8), max_position_embeddings=8192, **_THREE),
    "3-70b": preset(128256, 8192, 28672, 80, (64, 8), max_position_embeddings=8192, **_THREE),
    "3.1-8b": preset(128256, 4096, 14336, 32, (32, 8), **_LONG),
    "3.1-70b": preset(128256, 8192, 28672, 80, (64, 8), **_LONG),
    "3.1-405b": preset(128256, 16384, 53248, 126, (128, 8), **_LONG),
    "3.2-1b": preset(128256, 2048, 8192, 16, (32, 8), tied=True, **_SMALL),
    "3.2-3b": preset(128256, 3072, 8192, 28, (24, 8), tied=True, **_SMALL),
    # Published only as an instruction-tuned model, with three stop tokens.
    "3.3-70b": preset(128256, 8192, 28672, 80, (64, 8), **{**_LONG, "eos_token_id": (128001, 128008, 128009)}),
}
SPEC = language_family("llama", LlamaConfig, PRESETS, (LLAMA3, VICUNA))
