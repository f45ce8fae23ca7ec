"""CSM from recordings to a voice: a tiny model learns sentences, and transformers speaks them with its export."""

from __future__ import annotations

import json
from pathlib import Path

import csm_cases as cases
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, CsmForConditionalGeneration
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.data.media.clips import wav_bytes
from tessera.inference.speech import SpeechSampling, load_speaker

TEXTS = ("hello there", "I am well", "how are you?", "hello you", "are you well?", "I am there")
END = cases.END_OF_SPEECH


@pytest.mark.slow
def test_recordings_become_a_voice_that_transformers_speaks_with(tmp_path: Path) -> None:
    _, _, reference, _ = cases.pair(2, seed=5)
    with torch.no_grad():  # weights to begin from are small; those of the codec stay
        for name, weight in reference.named_parameters():
            if not name.startswith("codec_model.") and "norm" not in name:
                weight.mul_(0.3)
    reference.save_pretrained(tmp_path / "base")
    for file in cases.words_folder().iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    rows = []
    for number, text in enumerate(TEXTS):
        sound = 0.3 * np.random.default_rng(number).standard_normal(150 + 64 * number).astype(np.float32)
        (tmp_path / f"{number}.wav").write_bytes(wav_bytes(sound, 24_000))
        rows.append({"audio_filepath": f"{number}.wav", "text": text, "speaker": number % 2})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "name": "voice",
        "out": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "base")},
        "data": {"train": str(tmp_path / "rows.jsonl"), "length": 128, "workers": 0},
        "train": {"steps": 150, "global_batch": 1, "device": "cpu"},
        "optim": {"lr": 1e-2, "schedule": {"kind": "cosine", "warmup": 5}},
        "checkpoint": {"export": True, "prove": "always"},
        "precision": {"compute": "float32"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    encoding = CliRunner().invoke(
        app, ["data", "features", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "codes")]
    )
    assert encoding.exit_code == 0, encoding.output
    run = tessera.train(str(tmp_path / "recipe.yaml"), {"data.train": str(tmp_path / "codes")})
    last = [row for row in run.metrics if "code_loss" in row][-1]
    assert last["code_loss"] < 0.1
    assert last["depth_loss"] < 0.1
    folder = run.folder / "hf"
    spoken = [json.loads(line) for line in (tmp_path / "codes").glob("*.jsonl").__next__().read_text().splitlines()]
    speaker, stock = load_speaker(folder, "cpu"), CsmForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in spoken:
        codes = torch.tensor(row["audio_codes"])
        ours = speaker.say(row["text"], speaker=str(row["speaker"]), sampling=SpeechSampling(temperature=0))
        assert torch.equal(ours.codes, codes), row["text"]
        words = f"<|begin_of_text|>[{row['speaker']}]{row['text']}<|end_of_text|>"
        tokens = tokenizer(words, add_special_tokens=False, return_tensors="pt").input_ids
        out = stock.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=len(codes),
            output_audio=True,
        )
        np.testing.assert_allclose(ours.sound, out[0].numpy()[: len(ours.sound)], atol=1e-4)
