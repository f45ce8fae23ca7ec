"""Rotary frequencies that are stretched, against transformers' own functions; and both spellings of them in folders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tessera.models import FAMILIES
from tessera.models.text.decoder import text_shape
from tests.errors import raises

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},  # as Qwen3 publishes it
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def ours_of(kind: str, told: dict[str, Any]) -> Any:
    family = {"qwen3_moe": "qwen3"}.get(kind, kind)
    return FAMILIES.get(family).config.from_hf({"model_type": kind, **TEXT, **told})  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: str(rope["rope_type"]))
@pytest.mark.parametrize("older", [False, True])
def test_frequencies_are_those_of_transformers(kind: str, rope: dict[str, Any], older: bool) -> None:
    if older:  # as folders of releases before 5 have it
        renamed = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
        told: dict[str, Any] = {"rope_theta": 1e6, "rope_scaling": renamed}
    else:
        told = {"rope_parameters": {**rope, "rope_theta": 1e6}}
    theirs = CONFIG_MAPPING[kind](**TEXT, **{name: dict(v) if isinstance(v, dict) else v for name, v in told.items()})
    expected, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    config = ours_of(kind, told)
    ours = text_shape(config.text, "auto").rope
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(ours.frequencies(torch.device("cpu")), expected, rtol=8 * eps, atol=0)
    angles = ours.angles(torch.arange(3))
    torch.testing.assert_close(
        angles.cos, (torch.arange(3)[:, None] * expected).cos() * attention, rtol=0, atol=16 * eps
    )
    # And written, it is read again: here, and there.
    written = config.to_hf()
    assert type(config).from_hf(written) == config
    again, sharper = ROPE_INIT_FUNCTIONS[rope["rope_type"]](CONFIG_MAPPING[kind](**written), torch.device("cpu"))
    assert torch.equal(again, expected)
    assert sharper == attention


def test_yarn_goes_with_positions_of_three_axes() -> None:
    """As Qwen2.5-VL is told to read long texts."""
    sections = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}
    plain = {name: value for name, value in TEXT.items() if name != "head_dim"}
    vision = {"out_hidden_size": 512}
    config = FAMILIES.get("qwen2_5_vl").config.from_hf(  # type: ignore[attr-defined]
        {"model_type": "qwen2_5_vl", **plain, "rope_scaling": sections, "vision_config": vision}
    )
    theirs = CONFIG_MAPPING["qwen2_5_vl"](**plain, rope_scaling=dict(sections), vision_config=dict(vision))
    expected, attention = ROPE_INIT_FUNCTIONS["yarn"](theirs.text_config, torch.device("cpu"))
    ours = text_shape(config.text, "auto").rope
    torch.testing.assert_close(ours.frequencies(torch.device("cpu")), expected, rtol=1e-6, atol=0)
    assert ours.scaling is not None
    assert ours.scaling.attention == attention


def test_what_dynamic_would_stretch_is_refused() -> None:
    config = ours_of("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert config.text.max_length == 40960
    assert ours_of("qwen3", {}).text.max_length is None
    with raises("model.unsupported-value"):
        FAMILIES.get("llava").config.from_hf(  # type: ignore[attr-defined]
            {"model_type": "llava", "text_config": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}}
        )
