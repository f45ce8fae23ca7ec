"""Full folders of Qwen3-Omni: the talker is read from them, and exports contain the other parts unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from talker_cases import SHAPES, config_of, reference_of
from torch import Tensor
from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.inference.frozen import frozen_module
from tessera.models import resolve
from tessera.models.qwen3_omni_talker import PRESETS, SPEC
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.thinker import WORDS

NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 0)) for number in range(len(SHAPES))]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("number", NUMBERS)
def test_an_export_has_every_tensor_of_the_folder_bitwise(number: int, tmp_path: Path) -> None:
    reference = reference_of(config_of(number), 3, torch.bfloat16)
    reference.save_pretrained(tmp_path / "full")
    section = ModelSection(path=tmp_path / "full", family="qwen3_omni_talker")
    spec, config = resolve(section)
    assert spec is SPEC
    assert config == config_of(number)
    module = spec.main.build(config).to(torch.bfloat16)
    load_folder(tmp_path / "full", model_tensors(module), SPEC.main.weight_map(config))
    export_folder(module, spec, config, None, tmp_path / "out", base=tmp_path / "full", files=tmp_path / "full")
    before, after = tensors_in(tmp_path / "full"), tensors_in(tmp_path / "out")
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_only_the_talker_changes_in_an_export(tmp_path: Path) -> None:
    config = config_of(0)
    reference_of(config, 3).save_pretrained(tmp_path / "full")
    module = SPEC.main.build(config)
    for parameter in module.parameters():
        parameter.data.fill_(0.5)
    export_folder(module, SPEC, config, None, tmp_path / "out", base=tmp_path / "full", files=tmp_path / "full")
    before, after = tensors_in(tmp_path / "full"), tensors_in(tmp_path / "out")
    assert sorted(before) == sorted(after)
    for name, tensor in after.items():
        assert bool((tensor == 0.5).all()) if name.startswith("talker.") else torch.equal(tensor, before[name]), name


def test_the_thinker_is_read_from_the_same_folder(tmp_path: Path) -> None:
    config = config_of(1)
    reference = reference_of(config, 3)
    reference.save_pretrained(tmp_path)
    assert SPEC.frozen_input is not None
    words = frozen_module(SPEC.frozen_input.component(config), SPEC, config, tmp_path)
    tokens = torch.arange(5, 40)
    assert torch.equal(words(Batch({"tokens": tokens}))[WORDS], reference.thinker.get_input_embeddings()(tokens))


# As published; codes and layers of the talker, whose classes have other defaults.
PUBLISHED_TALKER: dict[str, Any] = {
    "accept_hidden_layer": 24,
    "audio_start_token_id": 151669,
    "code_predictor_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "num_attention_heads": 16,
        "num_code_groups": 16,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rope_theta": 1000000,
        "sliding_window": None,
        "vocab_size": 2048,
    },
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_pad_id": 2148,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "num_code_groups": 16,
    "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    "text_config": {
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "max_position_embeddings": 65536,
        "model_type": "qwen3_omni_moe_talker_text",
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 20,
        "num_key_value_heads": 2,
        "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 1000000,
        "shared_expert_intermediate_size": 768,
        "vocab_size": 3072,
    },
    "thinker_hidden_size": 2048,
}


def test_the_preset_is_read_from_the_layout_of_published_folders() -> None:
    _, preset = resolve(ModelSection(family="qwen3_omni_talker", preset="30b-a3b"))
    assert isinstance(preset, TalkerConfig)
    full = {**preset.to_hf(), "talker_config": PUBLISHED_TALKER}
    read = TalkerConfig.from_hf(full)
    assert {**read.model_dump(), "depth": None} == {**preset.model_dump(), "depth": None}
    assert TalkerConfig.from_hf(preset.to_hf()) == preset
    assert "30b-a3b" in PRESETS


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_transformers_reads_the_configuration_that_is_written(number: int) -> None:
    config = config_of(number)
    theirs = AutoConfig.for_model(**config.to_hf()).to_dict()
    assert TalkerConfig.from_hf(theirs) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_audio_output", False),
        ("talker_config.thinker_hidden_size", 99),
        ("talker_config.code_predictor_config.num_code_groups", 9),
        ("talker_config.code_predictor_config.hidden_size", 99),
        ("talker_config.code_predictor_config.sliding_window", 4),
        ("talker_config.text_config.hidden_act", "gelu"),
        ("talker_config.accept_hidden_layer", 99),
        ("talker_config.speaker_id", {"ethan": 10**6}),
        ("talker_config.codec_pad_id", 10**6),
        ("tts_pad_token_id", 10**6),
        ("model_type", "qwen3_omni_moe_thinker"),
    ],
)
def test_what_is_not_computed_is_an_error(key: str, value: Any) -> None:
    fields = config_of(0).to_hf()
    *path, last = key.split(".")
    section = fields
    for name in path:
        section[name] = dict(section[name])
        section = section[name]
    section[last] = value
    with pytest.raises(TesseraError):
        TalkerConfig.from_hf(fields)
