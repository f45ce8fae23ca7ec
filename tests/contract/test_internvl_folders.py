"""Hugging Face folders: what transformers saves we read, what we write transformers reads; configurations both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from internvl_cases import MEDIA, SHAPES, make_case, pack, pair, reference_inputs
from parity import from_foreign, relative
from safetensors.torch import load_file
from test_language_families import saved
from transformers import AutoConfig, InternVLForConditionalGeneration

from tessera.checkpoint.hf import save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection
from tessera.models import resolve
from tessera.models.internvl import SPEC
from tessera.models.internvl.config import InternVLConfig

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


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_folders_go_both_ways(number: int, tmp_path: Path) -> None:
    config, reference, model = pair(number, 4)
    reference.save_pretrained(tmp_path / "theirs")
    spec, read = resolve(ModelSection(path=tmp_path / "theirs"))
    assert spec is SPEC
    assert read == config
    again = from_foreign(SPEC, config, load_file(tmp_path / "theirs" / "model.safetensors"))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name

    assert SPEC.weights is not None
    save_folder(tmp_path / "ours", model_tensors(model), SPEC.weights(config), config.to_hf())
    back, report = InternVLForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    case = make_case(config, MEDIA["mixed"], 3)
    with torch.no_grad():
        expected = back.eval()(**reference_inputs(case)).logits[0]
        assert relative(model.eval()(pack(config, [case]), logits=True).logits, expected) < 1e-5


def test_other_spellings_of_a_folder_are_read() -> None:
    config, reference, model = pair(1, 4)
    memory = saved(reference)
    hub = {name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in memory.items()}
    hub = {name.removeprefix("model."): tensor for name, tensor in hub.items()}
    hub["language_model.lm_head.weight"] = hub.pop("lm_head.weight")
    later = {name.replace("language_model.model.", "language_model."): tensor for name, tensor in hub.items()}
    for state in (memory, hub, later):
        again = from_foreign(SPEC, config, state)
        for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(one, other), name


def test_the_hub_layout_is_the_preset() -> None:
    _, preset = resolve(ModelSection(family="internvl", preset="3-1b"))
    assert InternVLConfig.from_hf(HUB) == preset


@pytest.mark.parametrize("preset", sorted(SPEC.presets))
def test_configurations_survive_the_way_through_transformers(preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family="internvl", preset=preset))
    assert isinstance(config, InternVLConfig)
    assert InternVLConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config


def test_published_sizes_have_as_many_parameters_as_their_cards_say() -> None:
    """In billions: the tower, and the text with a head of its own."""
    for preset, (eyes, words) in {
        "3-1b": (0.304, 0.630),
        "3-8b": (0.304, 7.61),
        "3-78b": (5.54, 72.7),
        "3.5-1b": (0.304, 0.752),
        "3.5-38b": (5.54, 32.8),
        "3.5-30b-a3b": (0.304, 30.5),
    }.items():
        _, config = resolve(ModelSection(family="internvl", preset=preset))
        with torch.device("meta"):
            model = SPEC.build(config)
        counts = {"vision": 0, "text": 0, "head": 0, "projector": 0}
        for name, parameter in model.named_parameters():
            counts[name.split(".")[0]] += parameter.numel()
        assert counts["vision"] / 1e9 == pytest.approx(eyes, rel=0.01), preset
        assert (counts["text"] + counts["head"]) / 1e9 == pytest.approx(words, rel=0.01), preset


def test_a_head_is_tied_only_if_nobody_denies_it() -> None:
    """Transformers 5 writes its own `true` around the `false` of a published text tower; the head there is real."""
    said = {**HUB["text_config"], "tie_word_embeddings": False}
    assert not InternVLConfig.from_hf({**HUB, "tie_word_embeddings": True, "text_config": said}).tie_word_embeddings
    assert not InternVLConfig.from_hf(HUB).tie_word_embeddings
    assert InternVLConfig.from_hf({**HUB, "tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "internvl_chat"},
        {"image_token_id": 10**6},
        {"downsample_ratio": 0.3},
        {"image_seq_length": 100},
        {"projector_hidden_act": "relu"},
        {"vision_feature_layer": -2},
        {"vision_feature_select_strategy": "full"},
        {"quantization_config": {"bits": 4}},
        {"text_config.model_type": "internlm2"},
        {"text_config.use_sliding_window": True},
        {"text_config.rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"vision_config.use_mask_token": True},
        {"vision_config.use_absolute_position_embeddings": False},
        {"vision_config.attention_dropout": 0.1},
        {"vision_config.image_size": [448, 224]},
        {"vision_config.hidden_act": "relu"},
        {"vision_config.num_attention_heads": 15},
    ],
    ids=str,
)
def test_what_we_do_not_compute_is_an_error(changes: dict[str, Any]) -> None:
    data = json.loads(json.dumps(HUB))
    for key, value in changes.items():
        *path, last = key.split(".")
        (data[path[0]] if path else data)[last] = value
    with pytest.raises(TesseraError):
        InternVLConfig.from_hf(data)
