"""Spoken answers of Qwen3-Omni: sound as transformers makes it, by command and over the API, with random weights."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from talker_cases import config_with_words, reference_of, spoken_by_transformers
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera.data.media.clips import wav_bytes
from tessera.errors import TesseraError
from tessera.inference.speech import SpeechSampling, load_speaker
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.tools.data_codes import write_codes
from tests.contract.codecs import mimi_folder
from tests.errors import raises

WORDS = ("red", "blue", "tall", "small")
FRAMES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full model of transformers: thinker, talker and vocoder."""
    path = tmp_path_factory.mktemp("omni")
    reference_of(config_with_words(path, WORDS), 3).eval().save_pretrained(path)
    return path


def test_the_talker_makes_the_sound_of_transformers(folder: Path) -> None:
    config = config_with_words(folder, WORDS)
    speaker = load_speaker(folder, "cpu", family="qwen3_omni_talker")
    seconds = FRAMES * speaker.codec.stride / speaker.codec.rate
    messages = [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "tall small"}]
    sampling = SpeechSampling(temperature=0, max_seconds=seconds)
    speech = speaker.say_last(messages, speaker="chelsie", sampling=sampling)
    text = "<|im_start|>user\nred blue<|im_end|>\n<|im_start|>assistant\ntall small"
    tokens = load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    stock = reference_of(config, 3).eval()
    # It computes the other codes of a frame when it reads the frame: those of the last one are never computed.
    expected = spoken_by_transformers(config, stock, tokens, "chelsie", FRAMES + 1, penalty=1.05)
    assert speech.codes.tolist() == expected.tolist()
    assert len(speech.codes.unique(dim=0)) > 2
    with torch.no_grad():
        sound = stock.code2wav(torch.as_tensor(expected).T[None])[0, 0]
    np.testing.assert_allclose(speech.sound, sound.numpy(), atol=1e-5)
    with raises("data.unknown-speaker"):
        speaker.say_last(messages, speaker="Ann", sampling=sampling)


@pytest.mark.slow
def test_the_command_answers_and_speaks(folder: Path, tmp_path: Path) -> None:
    command = ["generate", str(folder), "red blue", "-o", str(tmp_path / "answer.wav"), "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu", "--max-seconds", "0.01", "--speaker", "ethan"])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert file.getnframes() > 0
    result = CliRunner().invoke(app, [*command, "--steps", "3"])
    assert isinstance(result.exception, TesseraError)
    assert result.exception.code == "generation.option-without-effect"


@pytest.mark.slow
def test_recordings_of_answers_become_codes(folder: Path, tmp_path: Path) -> None:
    def turn(role: str, number: int) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": "red"}, {"type": "audio", "audio": f"{number}.wav"}]}

    for number in range(2):
        sound = 0.3 * np.random.default_rng(number).standard_normal(4000).astype(np.float32)
        (tmp_path / f"{number}.wav").write_bytes(wav_bytes(sound, 24_000))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [turn("user", 0), turn("assistant", 1)]}) + "\n")
    recipe = {
        "model": {"family": "qwen3_omni_talker", "path": str(folder)},
        "data": {"train": str(tmp_path / "rows.jsonl"), "length": 64, "workers": 0},
        "train": {"steps": 1, "device": "cpu"},
    }
    with raises("media.codec-only-decodes"):
        write_codes(recipe, tmp_path / "codes")
    done = write_codes(recipe, tmp_path / "codes", codec=mimi_folder(tmp_path / "mimi"))
    assert (done.rows, done.root) == (1, tmp_path)
    question, answer = json.loads((tmp_path / "codes" / "codes-00000.jsonl").read_text())["messages"]
    assert question["content"][1] == {"type": "audio", "audio": "0.wav"}
    assert np.array(answer["content"][1]["codes"]).shape == (3, 3)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    pytest.importorskip("starlette")
    testclient = pytest.importorskip("starlette.testclient")
    from tessera.server.app import make_app
    from tessera.server.settings import Settings
    from tessera.server.start import ModelOptions, start_service

    service = start_service(ModelOptions(folder, "cpu", max_length=128, rows=2, speak=True), Settings("toy", 0))
    with testclient.TestClient(make_app(service), "http://localhost") as client:
        yield client
    service.close()


@pytest.mark.slow
def test_chat_completions_are_spoken(client: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "red blue"}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    spoken = {**body, "modalities": ["text", "audio"], "audio": {"voice": "chelsie", "max_seconds": 0.005}}
    lengths = []
    for seed in range(4):  # with random weights, speech may end at once
        message = client.post("/v1/chat/completions", json={**spoken, "seed": seed}).json()["choices"][0]["message"]
        assert message["content"] is None
        assert message["audio"]["transcript"] == text
        with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
            assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
            lengths.append(file.getnframes())
    assert any(lengths)
    history = [*body["messages"], {"role": "assistant", **message}, {"role": "user", "content": "tall"}]
    assert client.post("/v1/chat/completions", json={**body, "messages": history}).status_code == 200
    answer = client.post("/v1/audio/speech", json={"input": "tall", "voice": "ethan", "max_seconds": 0.01})
    assert answer.content[:4] == b"RIFF"
    refused = client.post("/v1/chat/completions", json={**spoken, "audio": {"voice": "Ann"}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "data.unknown-speaker")
