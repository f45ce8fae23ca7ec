"""Configurations of Qwen2-VL's folders; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_layouts import changed, preset_of

from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.models.qwen2_vl import SPEC
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tests.errors import raises

# The layout of the published 2B folder: the text's fields at the top.
HUB = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
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
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_the_hub_layout_is_the_preset() -> None:
    assert Qwen2VLConfig.from_hf(HUB) == preset_of("qwen2_vl", "2b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("attention_dropout", 0.1),
        ("model_type", "qwen3"),
        ("head_dim", 64),
        ("num_key_value_heads", 5),
        ("vision_config.hidden_size", 99),
        ("vision_config.hidden_act", "relu"),
        ("image_token_id", 10**6),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen2VLConfig.from_hf(changed(HUB, key, value))


def test_changes_on_top_of_a_folder_or_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    _, nested = resolve(ModelSection(path=tmp_path, config={"text": {"num_hidden_layers": 3}}))
    _, dotted = resolve(ModelSection(family="qwen2_vl", preset="2b", config={"text.num_hidden_layers": 3}))
    assert nested == dotted
    assert nested.text.num_hidden_layers == 3  # type: ignore[attr-defined]
    with raises("recipe.unknown-key") as caught:
        resolve(ModelSection(family="qwen2_vl", preset="2b", config={"text.num_hidden_layer": 3}))
    assert caught.value.nearest == "text.num_hidden_layers"


def test_a_head_dimension_of_its_own_works_but_has_no_hugging_face_form() -> None:
    _, config = resolve(
        ModelSection(
            family="qwen2_vl", preset="quickstart", config={"text.head_dim": 16, "text.mrope_section": [2, 3, 3]}
        )
    )
    assert isinstance(config, Qwen2VLConfig)
    model = SPEC.main.build(config)
    assert model.text.layers[0].attn.q.weight.shape == (64, 128)
    with raises("model.not-exportable"):
        config.to_hf()


def test_folders_that_are_none(tmp_path: Path) -> None:
    with raises("model.no-config", "config.json"):
        resolve(ModelSection(path=tmp_path))
    (tmp_path / "config.json").write_text("[1, 2")
    with raises("environment.not-json"):
        resolve(ModelSection(path=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    with raises("model.preset-and-path"):
        resolve(ModelSection(path=tmp_path, preset="2b"))
