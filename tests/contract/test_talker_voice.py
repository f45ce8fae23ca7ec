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
from PIL import Image
from talker_cases import config_with_words, reference_of, spoken_by_transformers
from typer.testing import CliRunner

from tessera.cli.main import app
from tessera.core.sample import Message, Part, Sample
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
    reference_of(config_with_words(path, WORDS, media=True), 3).eval().save_pretrained(path)
    return path


def test_a_speaker_of_a_full_folder_needs_the_family_of_the_talker(folder: Path) -> None:
    with raises("generation.model-does-not-speak") as refused:
        load_speaker(folder, "cpu")
    assert 'family="qwen3_omni_talker"' in str(refused.value)


def test_the_talker_makes_the_sound_of_transformers(folder: Path) -> None:
    config = config_with_words(folder, WORDS, media=True)
    speaker = load_speaker(folder, "cpu", family="qwen3_omni_talker")
    seconds = FRAMES * speaker.codec.stride / speaker.codec.rate
    messages = (
        Message("user", (Part("text", "red blue"),)),
        Message("assistant", (Part("text", "tall small"),), "chelsie"),
    )
    sampling = SpeechSampling(temperature=0, max_seconds=seconds)
    (speech,) = speaker.speak(speaker.text_prompts([Sample("one", messages)]), sampling)
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
        speaker.say("red", speaker="Ann", sampling=sampling)


@pytest.mark.slow
def test_the_command_answers_and_speaks(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "blue.wav").write_bytes(wav_bytes(np.zeros(8000, np.float32), 16_000))
    command = ["generate", str(folder), "red blue", "-o", str(tmp_path / "answer.wav"), "--max-new-tokens", "6"]
    command += ["--image", str(tmp_path / "red.png"), "--audio", str(tmp_path / "blue.wav")]
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

    service = start_service(ModelOptions(folder, "cpu", max_length=512, rows=2, speak=True), Settings("toy", 0))
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
    spoken = {**body, **SPOKEN}
    lengths = []
    for seed in range(4):  # with random weights, speech may end at once
        message = client.post("/v1/chat/completions", json={**spoken, "seed": seed}).json()["choices"][0]["message"]
        assert message["content"] is None
        assert message["audio"]["transcript"] == text
        with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as file:
            assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
            lengths.append(file.getnframes())
        if any(lengths):
            break
    assert any(lengths)
    history = [*body["messages"], {"role": "assistant", **message}, {"role": "user", "content": "tall"}]
    assert client.post("/v1/chat/completions", json={**body, "messages": history}).status_code == 200
    answer = client.post("/v1/audio/speech", json={"input": "tall", "voice": "ethan", "max_seconds": 0.01})
    assert answer.content[:4] == b"RIFF"
    for wrong, code in (({"voice": "Ann"}, "data.unknown-speaker"), ({"format": "wav"}, "invalid_value")):
        refused = client.post("/v1/chat/completions", json={**spoken, "audio": wrong, "stream": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)


SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "chelsie", "max_seconds": 0.005}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="


def events_of(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def samples_of(content: bytes) -> np.ndarray:
    return np.frombuffer(content, "<i2").astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("media", [False, True], ids=["text", "image"])
def test_streams_have_the_transcript_and_then_the_sound(client: Any, media: bool) -> None:
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}] if media else []
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "red blue"}]}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "n": 2 if media else 1,
        **SPOKEN,
        "audio": {"voice": "chelsie", "max_seconds": 0.006, "format": "pcm16"},
    }
    longest = 0
    for seed in range(20):  # with random weights, speech may end at once
        complete = client.post("/v1/chat/completions", json={**body, "seed": seed}).json()
        streamed = {**body, "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events_of(client, "/v1/chat/completions", streamed)
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], complete["usage"]["total_tokens"])
        for number, choice in enumerate(complete["choices"]):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == number]
            assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]
            deltas = [each["delta"]["audio"] for each in mine if "audio" in each["delta"]]
            assert "".join(delta.get("transcript", "") for delta in deltas) == choice["message"]["audio"]["transcript"]
            assert "expires_at" in deltas[-1]
            assert len({delta["id"] for delta in deltas}) == 1
            sound = b"".join(base64.b64decode(delta["data"]) for delta in deltas if "data" in delta)
            expected = samples_of(base64.b64decode(choice["message"]["audio"]["data"]))
            assert np.abs(samples_of(sound) - expected).max(initial=0) <= 2  # in chunks, sound is rounded otherwise
            longest = max(longest, sum("data" in delta for delta in deltas))
        if longest > 1:
            break
    assert longest > 1


@pytest.mark.slow
def test_speech_is_streamed_as_bytes_and_as_events(client: Any) -> None:
    for seed in range(20):
        body = {"input": "tall", "voice": "ethan", "max_seconds": 0.006, "seed": seed}
        complete = client.post("/v1/audio/speech", json=body)
        expected = samples_of(complete.content[44:])
        if len(expected) > 10 * 8:  # the sound of more frames than the first chunk has
            break
    assert "content-length" in complete.headers
    raw = client.post("/v1/audio/speech", json={**body, "response_format": "pcm"})
    assert "content-length" not in raw.headers
    file = client.post("/v1/audio/speech", json={**body, "stream_format": "audio"})
    assert (file.content[4:8], file.content[40:44]) == (b"\xff" * 4, b"\xff" * 4)
    assert file.headers["content-type"] == "audio/wav"
    *deltas, done = events_of(client, "/v1/audio/speech", {**body, "response_format": "pcm", "stream_format": "sse"})
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    events = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"]
    assert len(deltas) > 1
    for sound in (raw.content, file.content[44:], events):
        assert np.abs(samples_of(sound) - expected).max() <= 2
    for path in ("audio", "sse"):
        wrong = client.post("/v1/audio/speech", json={**body, "voice": "Ann", "stream_format": path})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "data.unknown-speaker")
