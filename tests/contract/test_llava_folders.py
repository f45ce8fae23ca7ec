"""Configurations of LLaVA's folders, and their names; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hub_layouts import preset_of
from llava_cases import SHAPES, config_of
from safetensors.torch import load_file
from small_folders import small_folder

import tessera
from tessera.models.llava import SPEC
from tessera.models.llava.config import LlavaConfig
from tests.errors import raises

# The layout of the published 7B folder of 1.5, which leaves most of its text decoder to transformers' defaults.
HUB: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
# And of OneVision's smallest.
HUB_TILED: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 151646,
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 152000,
    },
    "use_image_newline_parameter": True,
    "video_token_index": 151647,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def test_names_are_those_of_the_hub() -> None:
    for shape in (SHAPES[0], SHAPES[3]):
        table = SPEC.main.weight_map(config_of(shape))
        _, names = table.rule_for("vision.blocks.1.attn.qkv.bias") or pytest.fail("no rule")
        assert names[2] == "vision_tower.vision_model.encoder.layers.1.self_attn.v_proj.bias"
        for before in ("vision_tower.", "model.vision_tower.", "vision_tower.vision_model."):
            assert table.canonical(before + "encoder.x") == "vision_tower.vision_model.encoder.x"
        assert table.canonical("lm_head.weight") == "language_model.lm_head.weight"
        assert table.canonical("model.language_model.norm.weight") == "language_model.model.norm.weight"
        assert table.skips("vision_tower.vision_model.embeddings.position_ids")


@pytest.mark.parametrize(("data", "preset"), [(HUB, "1.5-7b"), (HUB_TILED, "onevision-0.5b")])
def test_the_hub_layout_is_the_preset(data: dict[str, Any], preset: str) -> None:
    assert LlavaConfig.from_hf(data) == preset_of("llava", preset)


@pytest.mark.parametrize(
    ("base", "changes", "error"),
    [
        (HUB, {"model_type": "llava_next"}, "model.other-model-type"),
        (HUB, {"vision_feature_layer": [-2, -5]}, "model.unsupported-value vision_feature_layer"),
        (HUB, {"vision_feature_layer": -26}, "recipe.wrong-value 24"),
        (HUB, {"image_token_index": 40000}, "recipe.wrong-value"),
        (HUB, {"text_config": {"model_type": "mistral"}}, "model.unsupported-value text_config.model_type"),
        (HUB, {"vision_config": {"model_type": "pixtral"}}, "model.unsupported-value vision_config.model_type"),
        (
            HUB_TILED,
            {"vision_config": {**HUB_TILED["vision_config"], "vision_use_head": True}},
            "model.unused-vision-head vision_use_head",
        ),
        (HUB_TILED, {"vision_feature_select_strategy": "default"}, "recipe.wrong-value"),
        (HUB_TILED, {"vision_aspect_ratio": "square"}, "model.unsupported-value vision_aspect_ratio"),
        (HUB_TILED, {"image_grid_pinpoints": [[384, 500]]}, "recipe.wrong-value"),
    ],
)
def test_what_we_do_not_compute_is_an_error(base: dict[str, Any], changes: dict[str, Any], error: str) -> None:
    with raises(error):
        LlavaConfig.from_hf({**base, **changes})


def test_names_of_a_fresh_folder_of_transformers_come_back(tmp_path: Path) -> None:
    """It writes the encoder without `vision_model`; folders that it loaded keep the names that they had."""
    folder = small_folder("llava 1.5", tmp_path / "made")
    model = transformers.LlavaForConditionalGeneration(transformers.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    (folder / "tessera_export.json").unlink()
    names = load_file(folder / "model.safetensors").keys()
    assert not any("vision_model" in name for name in names)
    loaded, _ = tessera.load(folder)
    for out in (
        tessera.convert(folder, tmp_path / "converted", prove="never"),
        loaded.save(tmp_path / "saved", prove="never"),
    ):
        assert load_file(out / "model.safetensors").keys() == names
        assert tessera.compare(out, prove="never").complete
