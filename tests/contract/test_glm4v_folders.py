"""Hugging Face folders of GLM-4.1V: read, written, their configurations, and answers from an exported one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from glm4v_cases import SHAPES, config_of, make_case, ours_of, pack, reference_inputs, reference_model
from parity import from_foreign, randomize
from safetensors.torch import load_file
from transformers import AutoConfig, Glm4vForConditionalGeneration

from tessera.checkpoint.hf import load_folder, save_folder
from tessera.checkpoint.model_state import model_tensors
from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection
from tessera.models import resolve
from tessera.models.glm4v import SPEC
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


@pytest.mark.parametrize("number", [0, 1, 3])
def test_we_read_what_transformers_saves(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    reference = reference_model(config)
    reference.save_pretrained(tmp_path)
    spec, read = resolve(ModelSection(path=tmp_path))
    assert spec is SPEC
    assert read == config
    ours = from_foreign(SPEC, config, load_file(tmp_path / "model.safetensors"))
    for (name, one), (_, other) in zip(
        ours.named_parameters(), ours_of(config, reference).named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    loaded = SPEC.build(config)
    assert SPEC.weights is not None
    load_folder(tmp_path, model_tensors(loaded), SPEC.weights(config))
    for (name, one), (_, other) in zip(ours.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_base_model_without_its_head_has_other_names() -> None:
    config = config_of(SHAPES[1])
    reference = reference_model(config)
    from_foreign(SPEC, config, reference.model.state_dict())  # raises where a name fits nothing


@pytest.mark.parametrize("number", [0, 1, 3])
def test_transformers_reads_what_we_write(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    ours = SPEC.build(config).eval()
    randomize(ours, 4)
    assert SPEC.weights is not None
    save_folder(tmp_path / "out", model_tensors(ours), SPEC.weights(config), config.to_hf())
    reference, report = Glm4vForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    merge = config.vision.spatial_merge_size
    case = make_case(config, [("image", (1, 2 * merge, merge))], 3)
    with torch.no_grad():
        expected = reference.eval()(**reference_inputs(reference, case)).logits[0]
        torch.testing.assert_close(ours(pack(config, [case]), logits=True).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_hub_layout_is_the_preset() -> None:
    _, preset = resolve(ModelSection(family="glm4v", preset="9b"))
    assert Glm4vConfig.from_hf(HUB) == preset
    assert Glm4vConfig.from_hf(at_the_top(HUB)) == preset


@pytest.mark.parametrize("preset", sorted(SPEC.presets))
def test_configurations_survive_the_way_through_transformers(preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family="glm4v", preset=preset))
    assert isinstance(config, Glm4vConfig)
    assert Glm4vConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config


def test_the_hub_layout_survives_the_way_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == Glm4vConfig.from_hf(HUB)


def test_the_preset_has_as_many_weights_as_the_published_model() -> None:
    _, config = resolve(ModelSection(family="glm4v", preset="9b"))
    with torch.device("meta"):
        ours = SPEC.build(config)
        theirs = Glm4vForConditionalGeneration._from_config(AutoConfig.for_model(**config.to_hf()))  # type: ignore[attr-defined]
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("text_config", "attention_dropout", 0.1),
        ("text_config", "head_dim", 64),
        ("text_config", "partial_rotary_factor", 0.25),  # does not fit the sections
        ("text_config", "num_key_value_heads", 5),
        ("vision_config", "out_hidden_size", 99),
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "attention_dropout", 0.1),
        ("vision_config", "num_heads", 7),
        ("", "quantization_config", {"bits": 4}),
        ("", "model_type", "glm4v_moe"),
        ("", "image_token_id", 10**6),
    ],
)
def test_what_we_do_not_compute_is_an_error(part: str, key: str, value: Any) -> None:
    changed = {**HUB, part: {**HUB[part], key: value}} if part else {**HUB, key: value}
    with pytest.raises(TesseraError):
        Glm4vConfig.from_hf(changed)
