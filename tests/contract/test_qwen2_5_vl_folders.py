"""Configurations of Qwen2.5-VL's folders; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_layouts import billions, changed, preset_of
from transformers import AutoConfig

from tessera.errors import TesseraError
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tests.quick import quick

# The layout of the published 3B folder: the text's fields at the top.
HUB = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_the_hub_layout_is_the_preset() -> None:
    assert Qwen25VLConfig.from_hf(HUB) == preset_of("qwen2_5_vl", "3b")


def test_what_a_folder_leaves_out_is_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    silent = {key: value for key, value in HUB.items() if key not in ("rms_norm_eps", "rope_theta", "rope_scaling")}
    for vision in ({"out_hidden_size": 2048}, {"out_hidden_size": 2048, "hidden_size": 1280, "tokens_per_second": 3}):
        (tmp_path / "config.json").write_text(json.dumps({**silent, "vision_config": vision}))
        theirs = AutoConfig.from_pretrained(tmp_path)
        ours = Qwen25VLConfig.from_hf({**silent, "vision_config": vision})
        assert ours == Qwen25VLConfig.from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    ("preset", "count"), quick([("3b", 3.75), ("7b", 8.29), ("32b", 33.45), ("72b", 73.41)], ("7b", 8.29))
)
def test_presets_have_the_parameters_of_the_published_models(preset: str, count: float) -> None:
    assert billions("qwen2_5_vl", preset).total() == pytest.approx(count, abs=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("model_type", "qwen2_vl"),
        ("head_dim", 64),
        ("num_key_value_heads", 5),
        ("vision_config.out_hidden_size", 99),
        ("vision_config.hidden_act", "relu"),
        ("vision_config.window_size", 27),
        ("vision_config.num_heads", 3),
        ("image_token_id", 10**6),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen25VLConfig.from_hf(changed(HUB, key, value))
