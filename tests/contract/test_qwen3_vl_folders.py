"""Configurations of Qwen3-VL's folders, and experts in them; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hub_layouts import billions, changed, preset_of
from parity import to_foreign
from qwen3_vl_cases import EXPERTS, Qwen3VL

from tessera.errors import TesseraError
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tests.quick import quick

# The layout of the published folders: 4B, and 30B-A3B.
_ROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _ROPE,
    "rope_theta": 5000000,
    "use_cache": True,
    "vocab_size": 151936,
}
_VISION = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "initializer_range": 0.02,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_ROOT = {
    "image_token_id": 151655,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
HUB: dict[str, dict[str, Any]] = {
    "4b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "out_hidden_size": 2560,
        },
        **_ROOT,
    },
    "30b-a3b": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **_TEXT,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            **_VISION,
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl_moe",
            "out_hidden_size": 2048,
        },
        **_ROOT,
    },
}


@pytest.mark.parametrize("number", EXPERTS)
def test_experts_lie_in_folders_as_the_hub_stacks_them(number: int) -> None:
    """[experts, hidden, 2 x width] and [experts, width, hidden]; a square stays as it is, as transformers reads it."""
    pair = Qwen3VL().pair(number, 0)
    config, model = pair.config, pair.model
    state = to_foreign(SPEC, config, dict(model.state_dict()))
    chosen = config.text.experts
    assert chosen is not None
    name = next(name for name in state if name.endswith("experts.gate_up_proj"))
    count, width, hidden = chosen.num_experts, chosen.moe_intermediate_size, config.text.hidden_size
    assert state[name].shape == (count, hidden, 2 * width)
    assert state[name.replace("gate_up", "down")].shape == (count, width, hidden)
    layer = int(name.split(".")[3])
    experts: Any = model.text.layers[layer].mlp.experts
    if hidden != width:
        assert torch.equal(state[name], torch.cat([experts.gate, experts.up], dim=1).transpose(1, 2))
        assert torch.equal(state[name.replace("gate_up", "down")], experts.down.transpose(1, 2))
    else:
        assert torch.equal(state[name.replace("gate_up", "down")], experts.down)


@pytest.mark.parametrize("preset", sorted(HUB))
def test_the_hub_layout_is_the_preset(preset: str) -> None:
    assert Qwen3VLConfig.from_hf(HUB[preset]) == preset_of("qwen3_vl", preset)


@pytest.mark.parametrize(
    ("preset", "count"),
    quick(
        [("2b", 2.13), ("4b", 4.44), ("8b", 8.77), ("32b", 33.36), ("30b-a3b", 31.07), ("235b-a22b", 235.68)],
        ("4b", 4.44),
    ),
)
def test_presets_have_the_parameters_of_the_published_models(preset: str, count: float) -> None:
    assert billions("qwen3_vl", preset).total() == pytest.approx(count, abs=0.01)


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("4b", "model_type", "qwen3"),
        ("4b", "image_token_id", 10**6),
        ("4b", "text_config.hidden_act", "gelu"),
        ("4b", "text_config.attention_bias", True),
        ("4b", "text_config.rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("4b", "text_config.num_key_value_heads", 5),
        ("4b", "text_config.num_hidden_layers", 2),
        ("4b", "vision_config.out_hidden_size", 99),
        ("4b", "vision_config.hidden_act", "relu"),
        ("4b", "vision_config.num_position_embeddings", 2305),
        ("4b", "vision_config.deepstack_visual_indexes", [5, 5]),
        ("4b", "vision_config.deepstack_visual_indexes", [5, 24]),
        ("30b-a3b", "text_config.norm_topk_prob", False),
    ],
)
def test_what_we_do_not_compute_is_an_error(preset: str, key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen3VLConfig.from_hf(changed(HUB[preset], key, value))
