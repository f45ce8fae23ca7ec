"""Whisper: speech recognition and translation by an encoder of sound and a decoder that attends to it."""

from __future__ import annotations

import functools
from typing import Any

from tessera.core.outputs import HIDDEN, LOGITS
from tessera.core.spec import Component, ModelSpec
from tessera.models.family import load_processor
from tessera.models.whisper.config import MODEL_TYPE, WhisperConfig
from tessera.models.whisper.generation import generate
from tessera.models.whisper.model import Whisper, example, flops, plan, stock_inputs, weights, work


def _preset(
    hidden: int, layers: tuple[int, int], heads: int, vocab: int = 51865, bins: int = 80, **text: Any
) -> dict[str, Any]:
    """Return the preset of a published size. `layers`: numbers of layers of encoder and decoder."""
    same = {"num_attention_heads": heads, "intermediate_size": 4 * hidden}
    return {
        "text": {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers[1], **same, **text},
        "audio": {"num_mel_bins": bins, "num_hidden_layers": layers[0], **same},
    }


_LARGE_V3: dict[str, Any] = {"hidden": 1280, "heads": 20, "vocab": 51866, "bins": 128}
PRESETS: dict[str, dict[str, Any]] = {
    # Model for two CPU cores, audio up to 3 s.
    "quickstart": {
        "text": {
            "vocab_size": 2048,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_target_positions": 64,
            "initializer_range": 0.06,
            "decoder_start_token_id": 257,
            "bos_token_id": 256,
            "eos_token_id": 256,
            "pad_token_id": 256,
        },
        "audio": {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "max_source_positions": 150,
        },
    },
    "tiny": _preset(384, (4, 4), 6),
    "base": _preset(512, (6, 6), 8),
    "small": _preset(768, (12, 12), 12),
    "medium": _preset(1024, (24, 24), 16),
    "large-v3": _preset(layers=(32, 32), pad_token_id=50256, **_LARGE_V3),
    "large-v3-turbo": _preset(layers=(32, 4), **_LARGE_V3),
}

SPEC = ModelSpec(
    name="whisper",
    config=WhisperConfig,
    main=Component(Whisper, plan, {"hf": weights}),
    flops=flops,
    work=work,
    example=example,
    presets=PRESETS,
    processor=functools.partial(load_processor, "whisper", "WhisperProcessor"),
    generate=generate,
    stock_inputs=stock_inputs,
    task="language",
    outputs=(LOGITS, HIDDEN),
    hf_types=(MODEL_TYPE,),
)
