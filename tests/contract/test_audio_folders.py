"""Hugging Face folders of families that hear: what transformers saves we read, what we write transformers reads, and
both give the same answers."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from answers import export
from audio_cases import HEARING, packed, sound
from parity import relative, same_weights

import tessera
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.state import model_tensors
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tests.quick import quick
from tests.toys.engine_models import new_tokens
from tests.toys.save_folder import save_folder

NAMES = list(HEARING)
SHAPES = [
    pytest.param(name, number, marks=[] if number < 2 else [pytest.mark.slow])
    for name, case in HEARING.items()
    for number in range(len(case.shapes))
]


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_we_read_what_transformers_saves(name: str, number: int, tmp_path: Path) -> None:
    case = HEARING[name]
    config, reference, model = case.pair(number, number)
    reference.save_pretrained(tmp_path)
    spec, read = resolve(ModelSection(path=tmp_path))
    assert spec is case.spec
    assert read == config
    loaded = spec.main.build(read)
    load_folder(tmp_path, model_tensors(loaded), spec.main.weight_map(read))
    same_weights(model, loaded)


@pytest.mark.parametrize(("name", "number"), SHAPES)
def test_transformers_reads_what_we_write(name: str, number: int, tmp_path: Path) -> None:
    case = HEARING[name]
    config, reference, model = case.pair(number, 4)
    table = case.spec.main.weight_map(config)
    save_folder(tmp_path / "out", model_tensors(model), table, config.to_hf())
    loaded = case.spec.main.build(config)
    load_folder(tmp_path / "out", model_tensors(loaded), table)
    same_weights(model, loaded)
    back, report = type(reference).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = back.state_dict()
    for path, tensor in reference.state_dict().items():
        assert torch.equal(state[path], tensor), path
    heard = case.heard(number, 2, 3)
    with torch.no_grad():
        expected = case.theirs(back.eval(), number, heard)
        ours = model.eval()(packed(case, number, [heard]), logits=True)["logits"]
    assert relative(ours, expected) < case.tolerance


@pytest.fixture(scope="module", params=NAMES)
def answering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    case = HEARING[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    return request.param, export(case.spec, case.config(0), case.processor(0), folder)


@pytest.mark.parametrize("clips", quick([0, 1, 2], 2))
def test_greedy_answers_are_those_of_transformers(answering: tuple[str, Path], clips: int) -> None:
    """Transformers reads the folder with its own processor: features, number of tokens and chat template are its."""
    name, folder = answering
    case = HEARING[name]
    sounds = [sound(case.lengths[at], at) for at in range(clips)]
    parts = [{"type": "audio", "audio": heard} for heard in sounds]
    model, loaded = tessera.load(folder, device="cpu")
    batch = loaded([{"role": "user", "content": [*parts, {"type": "text", "text": "What is said?"}]}])
    reference = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[str, Any] = {"input_ids": batch["tokens"][None]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if sounds:
        inputs |= case.features(case.extractor_class.from_pretrained(folder), sounds)
    stops = loaded.processor.stop_tokens
    ours = new_tokens(model.module, batch, 12, stops)[0]
    out = reference.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=list(stops))
    theirs = [token for token in out[0, batch["tokens"].numel() :].tolist() if token not in stops]
    assert ours == theirs
    assert len(set(ours)) > 2  # it says something
    assert model.generate(batch, max_new_tokens=12) == loaded.processor.decode(theirs)


def test_an_export_is_compared_with_transformers_on_a_recording(answering: tuple[str, Path], tmp_path: Path) -> None:
    """The recording goes through transformers' own processor, and so do those of a data set."""
    name, folder = answering
    heard = (sound(HEARING[name].lengths[0]) * 32_767).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(heard.tobytes())
    content = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "What is said?"}]
    talk = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Seven."}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(talk) + "\n", encoding="utf-8")
    agreement = tessera.compare(folder, tmp_path / "data.jsonl", max_new_tokens=8)
    assert agreement.complete, agreement.lines()
    assert any("the same logits" in line and "with a recording" in line for line in agreement.lines())
