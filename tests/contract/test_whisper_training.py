"""Whisper from recordings to a folder: a tiny model learns a few tones by heart, and transformers transcribes the same
with the export. Folders go both ways bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parity import from_foreign, same_weights, saved, to_foreign
from peft import PeftModel
from safetensors.torch import load_file, save_file
from whisper_cases import RATE, SHAPES, TEXTS, config_of, extractor, pair, sounds, write_samples, write_tokenizer_files

import tessera
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tests.toys import speech


def recipe_of(folder: Path, steps: int) -> dict[str, Any]:
    _, config = config_of(0, attention="auto")
    write_tokenizer_files(folder / "words", config)
    samples = str(write_samples(folder / "sounds", len(TEXTS)))
    fields = json.loads(config.model_dump_json())
    fields["text"]["initializer_range"] = 0.15
    return {
        "name": "tones",
        "out": str(folder / "runs"),
        "model": {"family": "whisper", "config": fields, "tokenizer": str(folder / "words")},
        "data": {"train": samples, "eval": samples, "length": 160, "workers": 0},
        "train": {"steps": steps, "global_batch": 1, "generate_every": steps, "generate_tokens": 20, "device": "cpu"},
        "optim": {"lr": 1e-2},
        "checkpoint": {"export": True, "prove": "always"},
    }


@pytest.mark.slow  # its parts are compared with transformers elsewhere; training goes through the next test, too
def test_a_tiny_model_learns_a_few_tones_and_transformers_reads_its_export(tmp_path: Path) -> None:
    run = tessera.train(recipe_of(tmp_path, 40))
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert losses[0] > 4
    assert losses[-1] < 0.2
    exact = [row["eval_exact_match"] for row in run.metrics if "eval_exact_match" in row]
    assert exact == [1.0]
    folder = run.folder / "hf"
    clips = sounds(0, len(TEXTS))
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    features = processor(clips, sampling_rate=RATE, return_tensors="pt").input_features
    said = reference.generate(features, language="en", task="transcribe", max_new_tokens=20)
    assert processor.batch_decode(said, skip_special_tokens=True) == list(TEXTS)
    model, prompts = tessera.load(folder)
    talks = [[{"role": "user", "content": [{"type": "audio", "audio": clip}]}] for clip in clips]
    assert model.generate(prompts(talks), 20) == list(TEXTS)


@pytest.mark.parametrize("length", [160, pytest.param(32, marks=[pytest.mark.slow])], ids=["packed", "alone"])
def test_a_recording_that_cannot_be_decoded_is_left_out(length: int, tmp_path: Path) -> None:
    """Its header is read into the index; its place in a row attends to no recording, also if it is the whole row."""
    pytest.importorskip("av")
    recipe = recipe_of(tmp_path, 1)
    (tmp_path / "sounds" / "1.wav").write_bytes(speech.wav(np.full(RATE, np.nan), RATE, -32))
    recipe["data"] |= {"length": length, "eval": [], "max_bad_share": 0.5}
    recipe["train"] |= {"global_batch": 160 // length, "generate_every": 0}
    recipe["checkpoint"] = {"prove": "never"}
    run = tessera.train(recipe)
    assert all(np.isfinite(row["loss"]) for row in run.metrics if row["kind"] == "train")
    rows = [json.loads(line) for line in (run.folder / "quarantine.jsonl").read_text().splitlines()]
    assert {row["code"] for row in rows} == {"media.damaged-file"}


@pytest.mark.slow
def test_peft_reads_adapters_of_encoder_and_decoder(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, 2)
    targets = ["audio.blocks.{*}.attn.{q,v}", "text.layers.{*}.cross.{q,o}", "text.layers.{*}.mlp.up"]
    recipe["model"] |= {"lora": {"rank": 2, "merge": True, "targets": targets}}
    recipe["train"] |= {"generate_every": 0}
    del recipe["data"]["eval"]
    start = tessera.train({**recipe, "name": "start", "model": {**recipe["model"], "lora": None}}).folder / "hf"
    recipe["model"] = {"path": str(start), "lora": recipe["model"]["lora"]}
    run = tessera.train(recipe)
    features = extractor(config_of(0)[1])(sounds(0, 1), sampling_rate=RATE, return_tensors="pt").input_features
    inputs = {"input_features": features, "decoder_input_ids": torch.arange(8)[None]}
    load = transformers.WhisperForConditionalGeneration.from_pretrained
    adapted = PeftModel.from_pretrained(load(start), run.folder / "adapter").eval()
    with torch.no_grad():
        expected = load(run.folder / "hf").eval()(**inputs).logits
        torch.testing.assert_close(adapted(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_folders_go_both_ways(number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    spec, config, reference, model = pair(number, dtype)
    reference.save_pretrained(tmp_path / "theirs")
    family, read = resolve(ModelSection(path=tmp_path / "theirs", config={"attention": "eager"}))
    assert family is spec
    assert read == config
    again = from_foreign(spec, config, load_file(tmp_path / "theirs" / "model.safetensors")).to(dtype)
    same_weights(model, again)

    ours = tmp_path / "ours"
    ours.mkdir()
    state = to_foreign(spec, config, dict(model.state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, ours / "model.safetensors")
    (ours / "config.json").write_text(json.dumps(config.to_hf()))
    back, report = transformers.WhisperForConditionalGeneration.from_pretrained(
        ours, output_loading_info=True, dtype=dtype
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in saved(back).items():
        assert torch.equal(tensor, reference.state_dict()[name]), name


@pytest.mark.slow
def test_published_sizes_are_those_of_transformers() -> None:
    """The sizes that the authors published, as `config.json` of their folders has them."""
    for preset, millions in (("tiny", 37.8), ("base", 72.6), ("small", 241.7), ("large-v3", 1543.5)):
        spec, config = resolve(ModelSection(family="whisper", preset=preset))
        with torch.device("meta"):
            model = spec.main.build(config)
            fields = {name: value for name, value in config.to_hf().items() if name != "architectures"}
            reference = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**fields))
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == sum(parameter.numel() for parameter in reference.parameters())
        assert count / 1e6 == pytest.approx(millions, abs=0.1)
