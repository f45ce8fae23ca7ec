"""Tiny codecs of transformers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

MIMI: dict[str, Any] = {
    "hidden_size": 32,
    "num_filters": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "codebook_size": 64,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 32,
    "sliding_window": 20,
    "num_quantizers": 8,
}
WAVE: dict[str, Any] = {
    "codebook_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_quantizers": 4,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 16,
}


def mimi(**changes: Any) -> nn.Module:
    """Return a codec whose codes depend on its input: fresh codebooks are zeros."""
    from transformers import MimiConfig, MimiModel

    torch.manual_seed(0)
    module: nn.Module = MimiModel(MimiConfig(**(MIMI | changes))).eval()
    lively(module)
    return module


def lively(module: nn.Module) -> None:
    """Fill codebooks, and scale up the branches of layers whose fresh weights are nearly zero."""
    for name, buffer in module.named_buffers():
        if name.endswith("embed_sum"):
            buffer.normal_()
        elif name.endswith("cluster_usage"):
            buffer.fill_(1.0)
    for name, parameter in module.named_parameters():
        if "layer_scale" in name:
            nn.init.ones_(parameter)


def mimi_folder(folder: Path, **changes: Any) -> Path:
    mimi(**changes).save_pretrained(folder)  # type: ignore[operator]
    return folder


def wave_decoder() -> nn.Module:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

    torch.manual_seed(0)
    config = configuration_qwen3_omni_moe.Qwen3OmniMoeCode2WavConfig(**WAVE)
    module: nn.Module = modeling_qwen3_omni_moe.Qwen3OmniMoeCode2Wav(config).eval()
    lively(module)
    return module
