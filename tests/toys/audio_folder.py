"""A small export of Qwen2-Audio with a tokenizer, whose answers depend on the recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tessera.config.run_config import ModelSection
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
VOCABULARY = 300


def audio_folder(root: Path) -> Path:
    """Write the export to a folder below `root`. The model reads recordings of up to 2 seconds."""
    tokenizer = train_tokenizer(["Write down what is said, one two three, in words."] * 2, VOCABULARY, WORDS)
    (root / "words").mkdir(parents=True)
    tokenizer.save(str(root / "words" / "tokenizer.json"))
    ids = {word: tokenizer.token_to_id(word) for word in WORDS}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = {"text": text, "audio": audio, "audio_token_id": ids["<|AUDIO|>"]}
    spec, built = resolve(ModelSection(family="qwen2_audio", preset="quickstart", config=config))
    assert spec.processor is not None
    torch.manual_seed(0)
    module = spec.main.build(built)
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            parameter.fill_(1.0) if "norm" in path and path.endswith("weight") else parameter.normal_(0, 0.4)
    processor = spec.processor(built, root / "words")
    export_folder(module, spec, built, processor, root / "model", files=root / "words", prove="never")
    return root / "model"
