"""A tiny diffusers folder with random weights: a VAE and text encoders, as a pipeline of Wan has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VAE_CONFIG: dict[str, Any] = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, -0.2, 0.0, 0.3],
    "latents_std": [1.5, 0.5, 2.0, 1.0],
}
TEXT_SIZE = 16
VOCABULARY = 64


def write_pipeline_folder(folder: Path) -> Path:
    """Write `vae`, `text_encoder` and `tokenizer` with `model_index.json`; a transformer may be added."""
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    AutoencoderKLWan(**VAE_CONFIG).save_pretrained(folder / "vae")
    config = UMT5Config(
        vocab_size=VOCABULARY, d_model=TEXT_SIZE, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    words = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", "a", "red", "square", "moving"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
