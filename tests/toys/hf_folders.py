"""Tiny random models of `transformers`, written by the library itself: folders that ours must read and give back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 64
IMAGE_TOKEN, IMAGE_SLOTS, SIDE = 5, 4, 16  # 4 x 4 patches of 4 pixels, of which the projector joins 2 x 2
MELS, AUDIO_FRAMES = 8, 32

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Case:
    """A class, the fields of its configuration, and which rows of `keyword_rows` it is fed with."""

    class_name: str
    config_name: str
    fields: dict[str, Any]
    rows: str
    blocks: tuple[str, ...]


CASES = {
    "internvl": Case(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "image_size": [SIDE, SIDE],
                "patch_size": [4, 4],
            },
            "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
            "image_token_id": IMAGE_TOKEN,
            "image_seq_length": IMAGE_SLOTS,
            "tie_word_embeddings": False,
        },
        "picture_and_words",
        ("model.vision_tower.encoder.layer.{0,1}", "model.language_model.layers.{0,1}"),
    ),
    "qwen3": Case(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**TEXT, "head_dim": 8, "tie_word_embeddings": True},
        "words",
        ("model.layers.{0,1}",),
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": MELS,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": AUDIO_FRAMES // 2,
            "max_target_positions": 24,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "speech",
        ("model.encoder.layers.{0,1}", "model.decoder.layers.{0,1}"),
    ),
}


def new_model(name: str, seed: int = 0) -> Any:
    import torch
    import transformers

    case = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, case.config_name)(**case.fields)
    model = getattr(transformers, case.class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: those are alike in every fresh model
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def write_folder(name: str, folder: Path) -> Path:
    """As the library saves it, with a tokenizer's file beside it."""
    new_model(name).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 24}))
    return folder
