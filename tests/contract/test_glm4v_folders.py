"""Configurations of GLM-4.1V's folders; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_layouts import billions, changed, preset_of
from transformers import AutoConfig, Glm4vForConditionalGeneration

from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.models.glm4v.config import Glm4vConfig

# The layout of the published folder of GLM-4.1V-9B-Thinking, with its vision's fields as far as they matter.
HUB: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
    "image_token_id": 151343,
    "video_token_id": 151344,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_text",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338, 151348],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 13696,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 151552,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "model_type": "glm4v",
        "hidden_size": 1536,
        "depth": 24,
        "num_heads": 12,
        "attention_bias": False,
        "intermediate_size": 13696,
        "hidden_act": "silu",
        "hidden_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "image_size": 336,
        "patch_size": 14,
        "out_hidden_size": 4096,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def at_the_top(data: dict[str, Any]) -> dict[str, Any]:
    """As older folders have it: the text's fields beside the rest."""
    rest = {name: value for name, value in data.items() if name != "text_config"}
    return {**data["text_config"], **rest}


def test_the_hub_layout_is_the_preset() -> None:
    preset = preset_of("glm4v", "9b")
    assert Glm4vConfig.from_hf(HUB) == preset
    assert Glm4vConfig.from_hf(at_the_top(HUB)) == preset


def test_the_hub_layout_survives_the_way_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == Glm4vConfig.from_hf(HUB)


def test_the_preset_has_as_many_weights_as_the_published_model() -> None:
    with torch.device("meta"):
        theirs = Glm4vForConditionalGeneration._from_config(AutoConfig.for_model(**preset_of("glm4v", "9b").to_hf()))
    assert billions("glm4v", "9b").total() == pytest.approx(sum(p.numel() for p in theirs.parameters()) / 1e9, abs=1e-9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config.hidden_act", "gelu"),
        ("text_config.rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("text_config.attention_dropout", 0.1),
        ("text_config.head_dim", 64),
        ("text_config.partial_rotary_factor", 0.25),  # does not fit the sections
        ("text_config.num_key_value_heads", 5),
        ("vision_config.out_hidden_size", 99),
        ("vision_config.hidden_act", "gelu"),
        ("vision_config.attention_dropout", 0.1),
        ("vision_config.num_heads", 7),
        ("model_type", "glm4v_moe"),
        ("image_token_id", 10**6),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Glm4vConfig.from_hf(changed(HUB, key, value))
