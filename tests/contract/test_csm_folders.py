"""Folders of CSM both ways, the codec in exports, training from a folder to a folder, and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from csm_cases import SHAPES, config_of, packed, pair, spoken, theirs, words_folder
from parity import relative, same_weights
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_csm_parallel import write_rows
from transformers import CsmForConditionalGeneration
from typer.testing import CliRunner

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.cli.main import app
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tests.errors import raises
from tests.toys.save_folder import save_folder

NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 1)) for number in range(len(SHAPES))]
BACKBONE_CODES = "backbone_model.embed_tokens.embed_audio_tokens.weight"
DEPTH_CODES = "depth_decoder.model.embed_tokens.weight"


def published(folder: Path, number: int = 0, seed: int = 0) -> Any:
    """Write a folder with all files of transformers' model, and return the model."""
    _, _, reference, _ = pair(number, seed)
    reference.save_pretrained(folder)
    for file in words_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return reference


@pytest.mark.parametrize("number", NUMBERS)
def test_we_read_what_transformers_saves(number: int, tmp_path: Path) -> None:
    spec, config, reference, model = pair(number, number)
    reference.save_pretrained(tmp_path)
    family, read = resolve(ModelSection(path=tmp_path))
    assert (family, read) == (spec, config)
    loaded = spec.main.build(read)
    load_folder(tmp_path, model_tensors(loaded), spec.main.weight_map(read))
    same_weights(model, loaded)


def test_the_published_configuration_is_the_preset(tmp_path: Path) -> None:
    """What its file has beyond the defaults of transformers, spelled as releases before 5 did."""
    rope = {"factor": 32.0, "rope_type": "llama3"}
    depth = {"high_freq_factor": 0.0078125, "low_freq_factor": 0.001953125, "original_max_position_embeddings": 16}
    backbone = {"high_freq_factor": 0.5, "low_freq_factor": 0.125, "original_max_position_embeddings": 1024}
    fields = {
        "architectures": ["CsmForConditionalGeneration"],
        "model_type": "csm",
        "rope_theta": 500000,
        "rope_scaling": {**rope, **backbone},
        "tie_codebooks_embeddings": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "depth_decoder_config": {
            "model_type": "csm_depth_decoder_model",
            "rope_theta": 500000,
            "rope_scaling": {**rope, **depth},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert resolve(ModelSection(path=tmp_path)) == resolve(ModelSection(family="csm", preset="1b"))


@pytest.mark.parametrize("number", NUMBERS)
def test_transformers_reads_what_we_write(number: int, tmp_path: Path) -> None:
    spec, config, reference, model = pair(number, 4)
    table = spec.main.weight_map(config)
    reference.config.save_pretrained(tmp_path / "config")
    fields = json.loads((tmp_path / "config" / "config.json").read_text())
    save_folder(tmp_path / "out", model_tensors(model), table, fields)
    loaded = spec.main.build(config)
    load_folder(tmp_path / "out", model_tensors(loaded), table)
    same_weights(model, loaded)
    back, report = CsmForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert all(name.startswith("codec_model.") for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    state = back.state_dict()
    for path, tensor in reference.state_dict().items():
        assert torch.equal(state[path], tensor) or path.startswith("codec_model."), path
    case = spoken(config, reference, 0, 3)
    with torch.no_grad():
        ours = model.eval()(packed(config, [case]), logits=True)["logits"]
        assert relative(ours, theirs(back.eval(), case).logits) < 3e-5


@pytest.mark.parametrize("both", [False, True])
def test_a_shared_table_may_be_stored_in_the_backbone(both: bool, tmp_path: Path) -> None:
    spec, config, _, model = pair(0, 1)
    published(tmp_path, seed=1)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[BACKBONE_CODES] = tensors[DEPTH_CODES].clone() if both else tensors.pop(DEPTH_CODES)
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = spec.main.build(config)
    load_folder(tmp_path, model_tensors(loaded), spec.main.weight_map(config))
    same_weights(model, loaded)
    if both:
        tensors[BACKBONE_CODES][0, 0] += 1
        save_file(tensors, path, metadata={"format": "pt"})
        with raises("weights.tied-head-differs"):
            load_folder(tmp_path, model_tensors(loaded), spec.main.weight_map(config))


def recipe_of(folder: Path, model: Path, steps: int, **more: Any) -> dict[str, Any]:
    config = config_of(0)
    rows = write_rows(folder / "rows", config.num_codebooks, 16)
    return {
        "name": "voice",
        "out": str(folder / "runs"),
        "model": {"path": str(model), **more},
        "data": {"train": str(rows), "length": 64, "workers": 0},
        "train": {"steps": steps, "global_batch": 4, "device": "cpu"},
        "optim": {"lr": 1e-3},
        "checkpoint": {"export": True, "prove": "always"},
    }


def test_a_trained_folder_has_the_codec_and_transformers_computes_the_same(tmp_path: Path) -> None:
    reference = published(tmp_path / "base")
    run = tessera.train(recipe_of(tmp_path, tmp_path / "base", 3))
    metrics = [row for row in run.metrics if "code_loss" in row]
    assert len(metrics) == 3
    assert all(row["depth_loss"] > 0 for row in metrics)
    tessera.convert(run.folder, tmp_path / "converted")
    for folder in (run.folder / "hf", tmp_path / "converted"):
        back, report = CsmForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        state = back.state_dict()
        for name, tensor in reference.state_dict().items():
            assert torch.equal(state[name], tensor) == name.startswith("codec_model."), name
        assert back.config.codec_config.to_dict() == reference.config.codec_config.to_dict()


def test_a_converted_folder_has_the_same_tensors(tmp_path: Path) -> None:
    published(tmp_path / "base", 1)
    tessera.convert(tmp_path / "base", tmp_path / "out", prove="always")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_peft_reads_adapters_of_both_decoders(tmp_path: Path) -> None:
    reference = published(tmp_path / "base")
    targets = ["{text,depth}.layers.{*}.attn.{q,v}", "depth.layers.{*}.mlp.up"]
    lora = {"rank": 2, "merge": True, "targets": targets}
    run = tessera.train(recipe_of(tmp_path, tmp_path / "base", 2, lora=lora))
    base = CsmForConditionalGeneration.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run.folder / "adapter").eval()
    merged = CsmForConditionalGeneration.from_pretrained(run.folder / "hf", dtype=torch.float32).eval()
    case = spoken(config_of(0), reference, 2, 1)
    with torch.no_grad():
        first, second, before = (theirs(model, case) for model in (adapted.model, merged, reference.eval()))
    assert relative(first.logits, second.logits) < 1e-4
    assert relative(first.others, second.others) < 1e-4
    assert relative(before.others, second.others) > 1e-4


def test_answers_are_not_generated_during_training(tmp_path: Path) -> None:
    published(tmp_path / "base")
    recipe = recipe_of(tmp_path, tmp_path / "base", 1)
    recipe["data"]["eval"] = recipe["data"]["train"]
    recipe["train"] |= {"generate_every": 1}
    with raises("model.no-generated-answers"):
        tessera.train(recipe)


@pytest.mark.slow
def test_the_doctor_reads_rows_with_codes(tmp_path: Path) -> None:
    published(tmp_path / "base")
    recipe = recipe_of(tmp_path, tmp_path / "base", 1)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    result = CliRunner().invoke(app, ["data", "doctor", "--recipe", str(tmp_path / "recipe.yaml")])
    assert "codes in the row: 7 frames" in result.output
    assert "Every message is trained on" not in result.output
