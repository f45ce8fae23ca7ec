"""Speech of CSM beside transformers' own `generate`: the same codes and sound, by command and over the API."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import csm_cases as cases
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.config.run_config import SourceSection
from tessera.data.media.clips import wav_bytes
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.inference.load import load
from tessera.inference.speech import Speaker, SpeechSampling, load_speaker
from tessera.models.speech.codec import MimiCodec
from tessera.models.speech.generation import generate_codes
from tests.errors import raises

FRAMES = 12
NUMBERS = [pytest.param(number, marks=[pytest.mark.slow] * (number > 0)) for number in range(len(cases.SHAPES))]
GREEDY = SpeechSampling(temperature=0)


def likeliest(logits: Tensor, rows: Any) -> Tensor:
    return logits.argmax(-1)


def theirs(reference: Any, tokens: Tensor, clips: list[np.ndarray], **options: Any) -> Any:
    """What transformers generates after a prompt with recordings."""
    # Frames have the token of padding, so that transformers cannot derive the mask.
    inputs: dict[str, Any] = {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None]}
    if clips:
        inputs["input_values"] = torch.from_numpy(np.concatenate(clips))[None, None]
        inputs["input_values_cutoffs"] = torch.from_numpy(np.cumsum([len(clip) for clip in clips]))[None]
    greedy = {"do_sample": False, "depth_decoder_do_sample": False, "max_new_tokens": FRAMES, **options}
    with torch.no_grad():
        return reference.eval().generate(**inputs, **greedy)


@pytest.mark.parametrize("number", NUMBERS)
def test_greedy_codes_are_those_of_transformers(number: int) -> None:
    _, config, reference, model = cases.pair(number, seed=number)
    processor = cases.processor_of(config)
    talks = [cases.spoken(config, reference, clips, seed=clips) for clips in (2, 0, 1)]
    prompts = processor.speech_prompts([talk.sample for talk in talks])
    ours = generate_codes(model.eval(), prompts, max_frames=FRAMES, first=likeliest, others=likeliest)
    tokens = torch.split(prompts.batch["tokens"], list(prompts.batch.segments["text"].lengths))
    for talk, of_talk, codes in zip(talks, tokens, ours, strict=True):
        expected = theirs(reference, of_talk, talk.clips)[0]
        ends = (expected[:, :-1] == config.codebook_eos_token_id).all(1).nonzero().flatten().tolist()
        assert torch.equal(codes, expected[: ends[0] if ends else FRAMES])
        assert len(codes.unique(dim=0)) > 2 or ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers has written, with its codec."""
    path = tmp_path_factory.mktemp("csm")
    _, _, reference, _ = cases.pair(2, seed=5)
    reference.eval().save_pretrained(path)
    for file in cases.words_folder().iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def speaker(folder: Path) -> Speaker:
    return load_speaker(folder, "cpu")


def stored(content: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767


@pytest.mark.slow
def test_the_command_writes_the_sound_of_transformers(folder: Path, speaker: Speaker, tmp_path: Path) -> None:
    sound = 0.3 * np.random.default_rng(0).standard_normal(400).astype(np.float32)
    (tmp_path / "voice.wav").write_bytes(wav_bytes(sound, 24_000))
    seconds = FRAMES * 64 / 24_000
    command = ["generate", str(folder), "I am well", "-o", str(tmp_path / "hello.wav"), "--temperature", "0"]
    voice = ["--audio", str(tmp_path / "voice.wav"), "--transcript", "hello there", "--speaker", "1"]
    limit = ["--max-seconds", str(seconds), "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, *voice, *limit])
    assert result.exit_code == 0, result.output
    assert "cut off" in result.output
    _, _, reference, _ = cases.pair(2, seed=5)
    text = "<|begin_of_text|>[1]hello there<|end_of_text|>"
    frames = "<|AUDIO|>" * -(-len(sound) // 64) + "<|audio_eos|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    words = text + frames + "<|begin_of_text|>[1]I am well<|end_of_text|>"
    tokens = tokenizer(words, add_special_tokens=False).input_ids
    expected = theirs(reference, torch.tensor(tokens), [sound], output_audio=True)[0]
    np.testing.assert_allclose(stored((tmp_path / "hello.wav").read_bytes()), np.clip(expected, -1, 1), atol=2e-4)
    again = speaker.say(
        "I am well",
        speaker="1",
        examples=[(str(tmp_path / "voice.wav"), "hello there")],
        sampling=SpeechSampling(temperature=0, max_seconds=seconds),
    )
    assert again.wav() == (tmp_path / "hello.wav").read_bytes()


def test_speech_is_sampled_by_its_seed(speaker: Speaker) -> None:
    def codes(seed: int) -> Tensor:
        return speaker.say("hello there", sampling=SpeechSampling(seed=seed, max_seconds=0.02)).codes

    assert torch.equal(codes(1), codes(1))
    assert not torch.equal(codes(1), codes(2))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["hello", "-o", "a.mp3"], "generation.no-output-file"),
        (["hello"], "generation.no-output-file"),
        (["-o", "a.wav"], "generation.no-prompt"),
        ([" ", "-o", "a.wav", "--device", "cpu"], "generation.no-prompt"),
        (["hello \udcff", "-o", "a.wav", "--device", "cpu"], "tokenizer.text-not-unicode"),  # a byte that is no UTF-8
        (["hello", "-o", "a.wav", "--max-seconds", "0"], "generation.sampling-out-of-range"),
        (["hello", "-o", "a.wav", "--max-seconds", "1e308"], "generation.sampling-out-of-range"),
        (["hello", "-o", "a.wav", "--audio", "b.wav"], "generation.recording-without-transcript"),
        (["hello", "-o", "a.wav", "--image", "b.png"], "generation.option-without-effect"),
        pytest.param(
            *(["hello", "-o", "a.wav", "--speaker", "Ann", "--device", "cpu"], "data.speaker-without-number"),
            marks=pytest.mark.slow,  # the server refuses it, too
        ),
    ],
)
def test_unusable_requests_are_refused(folder: Path, words: list[str], code: str) -> None:
    result = CliRunner().invoke(app, ["generate", str(folder), *words])
    assert isinstance(result.exception, TesseraError)
    assert result.exception.code == code


def test_models_without_a_codec_need_one(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "codec_config": None}))
    with raises("media.no-codec"):
        load_speaker(tmp_path, "cpu")
    assert load_speaker(tmp_path, "cpu", codec=folder).codec.stride == 64
    model, processor = load(folder, "cpu")
    with raises("generation.model-speaks"):
        model.generate(processor([{"role": "user", "content": "hello"}]))


@pytest.mark.slow
def test_recordings_of_a_recipe_become_the_codes_of_transformers(folder: Path, tmp_path: Path) -> None:
    sounds = [0.3 * np.random.default_rng(n).standard_normal(200 + 70 * n).astype(np.float32) for n in range(3)]
    rows = []
    for number, sound in enumerate(sounds):
        (tmp_path / f"{number}.wav").write_bytes(wav_bytes(sound, 24_000))
        rows.append({"audio": f"{number}.wav", "text": "hello there", "speaker": number})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "model": {"path": str(folder)},
        "data": {"train": str(tmp_path / "rows.jsonl"), "length": 64, "workers": 0},
        "train": {"steps": 1, "device": "cpu"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    words = ["data", "features", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "codes")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    _, config, reference, _ = cases.pair(2, seed=5)
    source = open_source(SourceSection(path=tmp_path / "codes"))
    processor = cases.processor_of(config)
    for number, sound in enumerate(sounds):
        sample = source.read(number)
        (part,) = sample.media()
        assert torch.equal(torch.from_numpy(part.value), cases.encoded(reference.eval(), sound))
        assert sample.messages[0].speaker == str(number)
        assert len(processor.encode(sample, [part.value]).tokens) > len(part.value)
    result = CliRunner().invoke(app, [*words, "--batch", "4"])
    assert isinstance(result.exception, TesseraError)
    assert result.exception.code == "data.option-without-effect"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_speaks_with_the_codec_of_its_base(folder: Path, tmp_path: Path, dtype: str) -> None:
    codes = np.random.default_rng(0).integers(1, 16, (5, 6)).tolist()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "hello", "audio_codes": codes}) + "\n")
    run = tessera.train(
        {
            "name": "voice",
            "out": str(tmp_path),
            "model": {"path": str(folder)},
            "data": {"train": str(tmp_path / "rows.jsonl"), "length": 64, "workers": 0},
            "train": {"steps": 2, "device": "cpu"},
        }
    )
    speech = tessera.speaker(run.folder, "cpu", dtype).say("hello", sampling=SpeechSampling(max_seconds=0.02))
    assert speech.codes.shape[1] == 6
    assert np.isfinite(speech.sound).all()


# ---------------------------------------------------------------------------------------------- over the API


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    pytest.importorskip("starlette")
    testclient = pytest.importorskip("starlette.testclient")
    from tessera.server.app import make_app
    from tessera.server.settings import Settings
    from tessera.server.start import ModelOptions, start_service

    service = start_service(ModelOptions(folder, "cpu"), Settings("toy", 0))
    with testclient.TestClient(make_app(service), "http://localhost") as client:
        yield client
    service.close()


def test_the_server_speaks(client: Any, speaker: Speaker) -> None:
    body = {"input": "hello there", "voice": "1", "seed": 3, "max_seconds": 0.02, "model": "toy"}
    answer = client.post("/v1/audio/speech", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    expected = speaker.say("hello there", speaker="1", sampling=SpeechSampling(seed=3, max_seconds=0.02))
    assert answer.content == expected.wav()
    plain = client.post("/v1/audio/speech", json={**body, "response_format": "pcm"})
    streamed, at_once = (
        torch.frombuffer(bytearray(pcm), dtype=torch.int16).int() for pcm in (plain.content, expected.pcm())
    )
    assert streamed.shape == at_once.shape
    assert (streamed - at_once).abs().max() <= 2  # PCM is decoded in chunks, which round differently


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"response_format": "mp3"}, "response_format", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": " "}, None, "generation.no-prompt"),
        ({"input": "a" * 5000}, "input", "invalid_value"),
        ({"speed": 2}, "speed", "invalid_value"),
        ({"instructions": "gently"}, "instructions", "unsupported_parameter"),
        ({"voice": "Ann"}, None, "data.speaker-without-number"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_unusable_requests_to_the_server(client: Any, changes: dict[str, Any], param: str | None, code: str) -> None:
    answer = client.post("/v1/audio/speech", json={"input": "hello", "max_seconds": 0.01, **changes})
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_sound_that_is_not_finite_is_no_silence(
    client: Any, folder: Path, speaker: Speaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(speaker.say("hello there", sampling=SpeechSampling(seed=3, max_seconds=0.02)).codes) > 0
    monkeypatch.setattr(MimiCodec, "_decode", lambda _, codes: torch.full((64 * len(codes),), torch.nan))
    heard: list[np.ndarray] = []
    for on_sound in (None, heard.append):
        with raises("generation.output-not-finite", "codec"):
            speaker.say("hello there", sampling=SpeechSampling(seed=3, max_seconds=0.02), on_sound=on_sound)
    assert heard == []
    for kind in ({}, {"response_format": "pcm"}, {"stream_format": "sse"}):
        answer = client.post("/v1/audio/speech", json={"input": "hello there", "seed": 3, "max_seconds": 0.02, **kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation.output-not-finite")
    out = tmp_path / "a.wav"
    words = ["generate", str(folder), "hello there", "-o", str(out), "--seed", "3", "--max-seconds", "0.02"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert isinstance(result.exception, TesseraError)
    assert result.exception.code == "generation.output-not-finite"
    assert not out.exists()


def test_a_model_that_speaks_needs_no_talker(folder: Path) -> None:
    from tessera.server.settings import Settings
    from tessera.server.start import ModelOptions, start_service

    with raises("generation.option-without-effect", "--speak"):
        start_service(ModelOptions(folder, "cpu", speak=True), Settings("toy", 0))


def test_a_model_that_speaks_writes_no_text(client: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "generation.model-speaks")
    assert client.get("/health").status_code == 200
    assert "toy" in client.get("/v1/models").text
