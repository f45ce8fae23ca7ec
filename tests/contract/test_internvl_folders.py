"""Configurations of InternVL's folders, and their spellings; `test_vision_language_folders.py` has the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_layouts import billions, changed, preset_of
from internvl_cases import InternVL
from parity import from_foreign, same_weights, saved
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.models.internvl import SPEC
from tessera.models.internvl.config import InternVLConfig
from tests.errors import raises

# The layout of a published folder: that of 3-1B. What the text's own class takes for granted is not said.
HUB: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


def test_other_spellings_of_a_folder_are_read() -> None:
    pair = InternVL().pair(1, 4)
    memory = saved(pair.reference)
    hub = {name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in memory.items()}
    hub = {name.removeprefix("model."): tensor for name, tensor in hub.items()}
    hub["language_model.lm_head.weight"] = hub.pop("lm_head.weight")
    later = {name.replace("language_model.model.", "language_model."): tensor for name, tensor in hub.items()}
    for state in (memory, hub, later):
        same_weights(pair.model, from_foreign(SPEC, pair.config, state))


def test_the_hub_layout_is_the_preset() -> None:
    assert InternVLConfig.from_hf(HUB) == preset_of("internvl", "3-1b")


@pytest.mark.slow
def test_published_sizes_have_as_many_parameters_as_their_cards_say() -> None:
    """In billions: the encoder, and the text with a head of its own."""
    for preset, (eyes, words) in {
        "3-1b": (0.304, 0.630),
        "3-8b": (0.304, 7.61),
        "3-78b": (5.54, 72.7),
        "3.5-1b": (0.304, 0.752),
        "3.5-38b": (5.54, 32.8),
        "3.5-30b-a3b": (0.304, 30.5),
    }.items():
        counts = billions("internvl", preset)
        assert counts["vision"] == pytest.approx(eyes, rel=0.01), preset
        assert counts["text"] + counts["head"] == pytest.approx(words, rel=0.01), preset


def test_a_head_is_tied_only_if_nobody_denies_it() -> None:
    """Transformers 5 writes its own `true` around the `false` of a published text decoder; the head there is real."""
    said = {**HUB["text_config"], "tie_word_embeddings": False}
    assert not InternVLConfig.from_hf({**HUB, "tie_word_embeddings": True, "text_config": said}).tie_word_embeddings
    assert not InternVLConfig.from_hf(HUB).tie_word_embeddings
    assert InternVLConfig.from_hf({**HUB, "tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "internvl_chat"),
        ("image_token_id", 10**6),
        ("downsample_ratio", 0.3),
        ("image_seq_length", 100),
        ("projector_hidden_act", "relu"),
        ("vision_feature_layer", -2),
        ("vision_feature_select_strategy", "full"),
        ("text_config.model_type", "internlm2"),
        ("text_config.use_sliding_window", True),
        ("text_config.rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("vision_config.use_mask_token", True),
        ("vision_config.use_absolute_position_embeddings", False),
        ("vision_config.attention_dropout", 0.1),
        ("vision_config.image_size", [448, 224]),
        ("vision_config.hidden_act", "relu"),
        ("vision_config.num_attention_heads", 15),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        InternVLConfig.from_hf(changed(HUB, key, value))


def test_the_advice_for_a_folder_in_another_layout_is_true(tmp_path: Path) -> None:
    """A class of the library is run without advice; where it has none, nothing advises it."""
    for model_type in ("gemma3", "nobody_knows"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        if model_type in CONFIG_MAPPING_NAMES:
            assert resolve(ModelSection(path=tmp_path))[0].name == "transformers"
            continue
        with raises("model.unknown-model-type") as caught:
            resolve(ModelSection(path=tmp_path))
        assert "model.family=module" in str(caught.value.fix)
