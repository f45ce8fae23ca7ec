"""Qwen2 and Qwen2.5: text-only models, with the text decoder that Qwen2-VL, Qwen2.5-VL and InternVL contain."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tessera.models.family import HFTextFormats, LanguageConfig, language_family, preset
from tessera.models.processing.chat import ChatTemplate, Turn
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import QWEN2

# Chat format of Qwen2.5 and later. Tool results are written as a turn of the user; consecutive results share a turn.
QWEN_TURNS = {
    "tool": Turn(
        "<|im_start|>user\n<tool_response>\n",
        "\n</tool_response><|im_end|>\n",
        between="\n</tool_response>\n<tool_response>\n",
    ),
    "": Turn("<|im_start|>{role}\n", "<|im_end|>\n"),
}
CHATML = ChatTemplate(special=("<|im_start|>", "<|im_end|>"), turns=QWEN_TURNS, media={}, system=None)


class Qwen2TextConfig(TextConfig):
    attention_bias: bool = True
    rope_theta: float = Field(1e6, gt=0)
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645


class Qwen2Config(LanguageConfig):
    formats: ClassVar[HFTextFormats] = {"qwen2": (QWEN2, "Qwen2ForCausalLM")}

    text: Qwen2TextConfig


# Sizes of the instruction-tuned models.
PRESETS = {
    "quickstart": preset(
        512, 128, 384, 4, (4, 2), tied=True, rope_theta=1e4, initializer_range=0.06, bos_token_id=None, eos_token_id=506
    ),
    "0.5b": preset(151936, 896, 4864, 24, (14, 2), tied=True),
    "1.5b": preset(151936, 1536, 8960, 28, (12, 2), tied=True),
    "3b": preset(151936, 2048, 11008, 36, (16, 2), tied=True),
    "7b": preset(152064, 3584, 18944, 28, (28, 4)),
    "14b": preset(152064, 5120, 13824, 48, (40, 8)),
    "32b": preset(152064, 5120, 27648, 64, (40, 8)),
    "72b": preset(152064, 8192, 29568, 80, (64, 8)),
}
SPEC = language_family("qwen2", Qwen2Config, PRESETS, (CHATML,))
