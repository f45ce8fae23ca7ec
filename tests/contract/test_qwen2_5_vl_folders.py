"""Hugging Face folders: what transformers saves we read, what we write transformers reads; configurations both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import from_foreign, to_foreign
from qwen2_5_vl_cases import SHAPES, config_of, make_case, media_of, pack, reference_inputs, reference_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from tessera.core.errors import TesseraError
from tessera.core.run_config import ModelSection
from tessera.models import resolve
from tessera.models.qwen2_5_vl import SPEC
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig

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


@pytest.mark.parametrize("number", [0, 1, 3])
def test_we_read_what_transformers_saves(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    reference = reference_model(config)
    reference.save_pretrained(tmp_path)
    spec, read = resolve(ModelSection(path=tmp_path))
    assert spec is SPEC
    assert read == config
    ours = from_foreign(SPEC, config, load_file(tmp_path / "model.safetensors"))
    again = from_foreign(SPEC, config, reference.state_dict())  # the other spelling: names in memory
    for (name, one), (_, other) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("number", [0, 1, 3])
def test_transformers_reads_what_we_write(number: int, tmp_path: Path) -> None:
    config = config_of(SHAPES[number])
    ours = from_foreign(SPEC, config, reference_model(config, seed=4).state_dict()).eval()
    state = to_foreign(SPEC, config, dict(ours.state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    reference, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    case = make_case(config, media_of(config.vision.spatial_merge_size)["mixed"], 3)
    with torch.no_grad():
        expected = reference.eval()(**reference_inputs(reference, config, case)).logits[0]
        torch.testing.assert_close(ours(pack(config, [case]), logits=True).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_hub_layout_is_the_preset() -> None:
    _, preset = resolve(ModelSection(family="qwen2_5_vl", preset="3b"))
    assert Qwen25VLConfig.from_hf(HUB) == preset


def test_what_a_folder_leaves_out_is_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    silent = {key: value for key, value in HUB.items() if key not in ("rms_norm_eps", "rope_theta", "rope_scaling")}
    for vision in ({"out_hidden_size": 2048}, {"out_hidden_size": 2048, "hidden_size": 1280, "tokens_per_second": 3}):
        (tmp_path / "config.json").write_text(json.dumps({**silent, "vision_config": vision}))
        theirs = AutoConfig.from_pretrained(tmp_path)
        ours = Qwen25VLConfig.from_hf({**silent, "vision_config": vision})
        assert ours == Qwen25VLConfig.from_hf(theirs.to_dict())


@pytest.mark.parametrize("preset", sorted(SPEC.presets))
def test_configurations_survive_the_way_through_transformers(preset: str, tmp_path: Path) -> None:
    _, config = resolve(ModelSection(family="qwen2_5_vl", preset=preset))
    assert isinstance(config, Qwen25VLConfig)
    assert Qwen25VLConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    assert resolve(ModelSection(path=tmp_path / "again"))[1] == config


@pytest.mark.parametrize(("preset", "billions"), [("3b", 3.75), ("7b", 8.29), ("32b", 33.45), ("72b", 73.41)])
def test_presets_have_the_parameters_of_the_published_models(preset: str, billions: float) -> None:
    _, config = resolve(ModelSection(family="qwen2_5_vl", preset=preset))
    with torch.device("meta"):
        model = SPEC.build(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("model_type", "qwen2_vl"),
        ("head_dim", 64),
        ("num_key_value_heads", 5),
        ("vision_config", {**HUB["vision_config"], "out_hidden_size": 99}),  # type: ignore[dict-item]
        ("vision_config", {**HUB["vision_config"], "hidden_act": "relu"}),  # type: ignore[dict-item]
        ("vision_config", {**HUB["vision_config"], "window_size": 27}),  # type: ignore[dict-item]
        ("vision_config", {**HUB["vision_config"], "num_heads": 3}),  # type: ignore[dict-item]
        ("image_token_id", 10**6),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen25VLConfig.from_hf({**HUB, key: value})
