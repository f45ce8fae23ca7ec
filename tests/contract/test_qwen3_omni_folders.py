"""Configurations and full folders of Qwen3-Omni; `test_vision_language_folders.py` has the thinker's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_layouts import billions, changed, preset_of
from parity import randomize, same_weights
from qwen3_omni_cases import Qwen3Omni
from safetensors.torch import save_file
from small_folders import small_folder
from transformers import AutoConfig, Qwen3OmniMoeThinkerForConditionalGeneration

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.proof import prove_folder
from tessera.models import resolve
from tessera.models.qwen3_omni import SPEC
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tests.errors import raises
from tests.toys.save_folder import save_folder

# Fields of the thinker in a full folder.
THINKER: dict[str, Any] = {
    "audio_config": {
        "activation_function": "gelu",
        "conv_chunksize": 500,
        "d_model": 1280,
        "downsample_hidden_size": 480,
        "dropout": 0,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "model_type": "qwen3_omni_moe_audio_encoder",
        "n_window": 50,
        "n_window_infer": 800,
        "num_mel_bins": 128,
        "output_dim": 2048,
        "scale_embedding": False,
    },
    "audio_end_token_id": 151670,
    "audio_start_token_id": 151669,
    "audio_token_id": 151675,
    "image_token_id": 151655,
    "model_type": "qwen3_omni_moe_thinker",
    "position_id_per_seconds": 13,
    "seconds_per_chunk": 2,
    "text_config": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 768,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
        "model_type": "qwen3_omni_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "interleaved": True,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
            "type": "default",
        },
        "rope_theta": 1000000,
        "vocab_size": 152064,
    },
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_omni_moe_vision_encoder",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
FULL = {"model_type": "qwen3_omni_moe", "enable_audio_output": True, "thinker_config": THINKER}


def test_the_layout_of_full_folders_is_the_preset() -> None:
    preset = preset_of("qwen3_omni", "30b-a3b")
    text = preset.text.model_copy(update={"bos_token_id": None, "eos_token_id": None})
    assert Qwen3OmniConfig.from_hf(FULL) == preset.model_copy(update={"text": text})
    assert Qwen3OmniConfig.from_hf(THINKER) == Qwen3OmniConfig.from_hf(FULL)


def test_what_a_folder_leaves_out_is_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    bare = {
        "model_type": "qwen3_omni_moe_thinker",
        "vision_config": {"out_hidden_size": 2048},
        "audio_config": {"output_dim": 2048},
        "text_config": {"num_attention_heads": 32, "head_dim": 128},  # what it takes for granted does not fit together
        "audio_token_id": 5,  # the vocabulary that transformers takes for granted has fewer tokens than its ids
        **dict.fromkeys(("image_token_id", "video_token_id", "audio_start_token_id", "audio_end_token_id"), 6),
        **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), 7),
    }
    wide = {"vocab_size": 152064, "num_attention_heads": 32, "head_dim": 128}
    without = {
        name: value for name, value in THINKER.items() if name not in ("audio_token_id", "position_id_per_seconds")
    }
    for fields in (bare, changed(THINKER, "text_config", wide), without):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert Qwen3OmniConfig.from_hf(fields) == Qwen3OmniConfig.from_hf(theirs.to_dict())


def test_the_preset_has_the_parameters_of_the_published_thinker() -> None:
    """30.5 billion in the decoder, 0.54 in the vision encoder and 0.65 in that of sound."""
    counts = billions("qwen3_omni", "30b-a3b")
    assert counts.total() == pytest.approx(31.7, abs=0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config.hidden_act", "gelu"),
        ("text_config.attention_bias", True),
        ("text_config.num_experts", 0),
        ("text_config.num_key_value_heads", 5),
        ("vision_config.out_hidden_size", 99),
        ("vision_config.deepstack_visual_indexes", [3, 2]),
        ("audio_config.output_dim", 99),
        ("audio_config.scale_embedding", True),
        ("audio_config.dropout", 0.1),
        ("audio_config.n_window", 40),
        ("audio_config.n_window_infer", 850),
        ("audio_config.encoder_attention_heads", 21),
        ("audio_config.activation_function", "relu"),
        ("model_type", "qwen3_vl"),
        ("audio_token_id", 10**6),
        ("position_id_per_seconds", 0),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen3OmniConfig.from_hf(changed(THINKER, key, value))


def test_more_features_than_layers_are_an_error() -> None:
    with raises("recipe.wrong-value", "more than the 2 layers"):
        resolve(ModelSection(family="qwen3_omni", preset="30b-a3b", config={"text": {"num_hidden_layers": 2}}))


@pytest.mark.slow
def test_the_thinker_of_a_full_folder_is_read_and_written_alone(tmp_path: Path) -> None:
    """Bitwise. Weights of the talker and of the vocoder stay in their folder."""
    family = Qwen3Omni()
    thinker = family.config(1).to_hf()
    model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(AutoConfig.for_model(**thinker)).float()
    randomize(model, 3)
    model.save_pretrained(tmp_path / "thinker")
    spec, config = resolve(ModelSection(path=tmp_path / "thinker"))
    table = spec.main.weight_map(config)
    read = spec.main.build(config)
    load_folder(tmp_path / "thinker", model_tensors(read), table)
    # As published: all names begin with `thinker.`, beside those of the other parts.
    others = {"talker.model.norm.weight": torch.ones(4), "code2wav.code_embedding.weight": torch.ones(3, 2)}
    named = {f"thinker.{name}": tensor for name, tensor in table.to_foreign(dict(read.named_parameters())).items()}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps({**FULL, "thinker_config": thinker}))
    save_file({**named, **others}, tmp_path / "full" / "model.safetensors")
    spec, config = resolve(ModelSection(path=tmp_path / "full"))
    assert spec is SPEC
    assert config == family.config(1)
    loaded = spec.main.build(config)
    load_folder(tmp_path / "full", model_tensors(loaded), table)
    same_weights(loaded, read)
    save_folder(tmp_path / "alone", model_tensors(loaded), table, config.to_hf())  # type: ignore[attr-defined]
    alone, report = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        tmp_path / "alone", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs = model.state_dict()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    assert "talker" in str(spec.untrained_parts(tmp_path / "full"))
    assert spec.untrained_parts(tmp_path / "alone") is None


@pytest.mark.slow
def test_an_export_is_compared_with_transformers_on_an_image_and_sound(tmp_path: Path) -> None:
    folder = small_folder("qwen3_omni", tmp_path)
    spec, config = resolve(ModelSection(path=folder))
    proof = prove_folder(folder, spec, config, "always")
    assert not proof.problems
    assert not proof.warnings
    assert "with an image with a recording" in proof.line
