"""Configurations and full folders of Qwen2.5-Omni; `test_vision_language_folders.py` has the thinker's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_layouts import billions, changed, preset_of
from parity import randomize, same_weights
from qwen2_5_omni_cases import Qwen25Omni
from small_folders import small_folder
from transformers import (
    AutoConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.proof import prove_folder
from tessera.models import resolve
from tessera.models.qwen2_5_omni import SPEC
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tests.toys.save_folder import save_folder

# The layout of the published 7B folder: the thinker is one of three parts.
THINKER: dict[str, Any] = {
    "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
    "audio_config": {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "attention_dropout": 0.0,
        "d_model": 1280,
        "dropout": 0.0,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 32,
        "init_std": 0.02,
        "initializer_range": 0.02,
        "max_source_positions": 1500,
        "model_type": "qwen2_5_omni_audio_encoder",
        "n_window": 100,
        "num_hidden_layers": 32,
        "num_mel_bins": 128,
        "output_dim": 3584,
        "scale_embedding": False,
    },
    "audio_end_token_id": 151648,
    "audio_start_token_id": 151647,
    "audio_token_index": 151646,
    "bos_token_id": 151644,
    "eos_token_id": 151645,
    "ignore_index": -100,
    "image_token_index": 151655,
    "init_std": 0.02,
    "model_type": "qwen2_5_omni_thinker",
    "pad_token_id": 151643,
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "init_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2_5_omni_text",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "user_token_id": 872,
    "video_token_index": 151656,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_channels": 3,
        "in_chans": 3,
        "init_std": 0.02,
        "initializer_range": 0.02,
        "intermediate_size": 3420,
        "model_type": "qwen2_5_omni_vision_encoder",
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 25,
        "window_size": 112,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
}
HUB = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": THINKER}
TALKER = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 40,
    "tts_codec_start_token_id": 37,
    "tts_codec_end_token_id": 38,
    "tts_codec_pad_token_id": 36,
    "tts_codec_mask_token_id": 39,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
VOCODER = {
    "dit_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "emb_dim": 8,
        "num_embeds": 41,
        "mel_dim": 8,
        "enc_emb_dim": 4,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4,
        "enc_res2net_scale": 2,
        "enc_se_channels": 4,
    },
    "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64},
}


def test_the_hub_layout_is_the_preset() -> None:
    """The published folder names no begin and end of text for the decoder: they are tokens of the conversation."""
    preset = preset_of("qwen2_5_omni", "7b")
    text = preset.text.model_copy(update={"bos_token_id": None, "eos_token_id": None})
    assert Qwen25OmniConfig.from_hf(HUB) == preset.model_copy(update={"text": text})
    assert Qwen25OmniConfig.from_hf(THINKER) == Qwen25OmniConfig.from_hf(HUB)


def test_what_a_folder_leaves_out_is_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    bare = {"model_type": "qwen2_5_omni_thinker", "vision_config": {}, "audio_config": {}, "text_config": {}}
    for fields in (
        bare,
        changed(THINKER, "vision_config", {"hidden_size": 1280}),
        changed(THINKER, "audio_config", {}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert Qwen25OmniConfig.from_hf(fields) == Qwen25OmniConfig.from_hf(theirs.to_dict())


@pytest.mark.parametrize(("preset", "count"), [("3b", 4.70), ("7b", 8.93)])
def test_presets_have_the_parameters_of_the_published_thinkers(preset: str, count: float) -> None:
    assert billions("qwen2_5_omni", preset).total() == pytest.approx(count, abs=0.01)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config.hidden_act", "gelu"),
        ("text_config.use_sliding_window", True),
        ("text_config.num_key_value_heads", 5),
        ("vision_config.out_hidden_size", 99),
        ("vision_config.window_size", 27),
        ("audio_config.output_dim", 99),
        ("audio_config.scale_embedding", True),
        ("audio_config.dropout", 0.1),
        ("audio_config.n_window", 99),
        ("audio_config.encoder_attention_heads", 21),
        ("audio_config.activation_function", "relu"),
        ("model_type", "qwen2_5_vl"),
        ("audio_token_index", 10**6),
        ("seconds_per_chunk", 0),
    ],
)
def test_what_we_do_not_compute_is_an_error(key: str, value: Any) -> None:
    with pytest.raises(TesseraError):
        Qwen25OmniConfig.from_hf(changed(THINKER, key, value))


def test_the_thinker_of_a_full_folder_is_read_and_written_alone(tmp_path: Path) -> None:
    """Bitwise. Weights of the talker and of the vocoder stay in their folder."""
    family = Qwen25Omni()
    thinker = family.config(1).to_hf()
    talker = {**TALKER, "embedding_size": thinker["text_config"]["hidden_size"]}
    settings = Qwen2_5OmniConfig(thinker_config=thinker, talker_config=talker, token2wav_config=VOCODER)
    full = Qwen2_5OmniForConditionalGeneration(settings).float()
    randomize(full, 3)
    full.save_pretrained(tmp_path / "full")
    spec, config = resolve(ModelSection(path=tmp_path / "full"))
    assert spec is SPEC
    assert config == family.config(1)
    loaded = spec.main.build(config)
    table = spec.main.weight_map(config)
    assert table is not None
    load_folder(tmp_path / "full", model_tensors(loaded), table)
    save_folder(tmp_path / "alone", model_tensors(loaded), table, config.to_hf())  # type: ignore[attr-defined]
    alone, report = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        tmp_path / "alone", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs = full.thinker.state_dict()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    again = spec.main.build(config)
    load_folder(tmp_path / "alone", model_tensors(again), table)
    same_weights(loaded, again)


@pytest.mark.parametrize("full", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_tunes_the_thinker_of_a_full_folder_is_warned_of_its_talker(
    full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_folder("qwen2_5_omni", tmp_path)
    if full:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": fields}))
    rows = [[{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red"}]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe = {
        "name": "tuned",
        "out": str(tmp_path / "runs"),
        "model": {"path": str(folder)},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}], "length": 64, "workers": 0},
        "train": {"steps": 1, "global_batch": 1, "device": "cpu"},
        "checkpoint": {"at_end": False},
    }
    tessera.train(recipe)
    assert ("hidden states of the thinker" in capsys.readouterr().err) == full


@pytest.mark.slow
def test_an_export_is_compared_with_transformers_on_an_image_and_sound(tmp_path: Path) -> None:
    folder = small_folder("qwen2_5_omni", tmp_path)
    spec, config = resolve(ModelSection(path=folder))
    proof = prove_folder(folder, spec, config, "always")
    assert not proof.problems
    assert not proof.warnings
    assert "with an image with a recording" in proof.line
