"""Whisper behind /v1/audio/transcriptions: one answer after another, equal to those in Python."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient
from test_whisper_answers import SUPPRESSED, folder_of
from whisper_cases import RATE, sounds

import tessera
from tessera.engine.request import Delta, Request
from tessera.runtime.log import logger
from tessera.server.app import make_app
from tessera.server.one_by_one import OneByOne
from tessera.server.settings import Settings
from tessera.server.start import ModelOptions, start_service
from tessera.server.transcriptions import plain_text, segments_of
from tests.errors import raises
from tests.toys import speech

PATH = "/v1/audio/transcriptions"
CLIPS = [*sounds(0, 2), *sounds(1, 1, 2.2)]  # the last one has several windows
FILES = [speech.wav(clip, RATE, -32) for clip in CLIPS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("whisper"), 0, suppress_tokens=SUPPRESSED)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(logger(), "info", lines.append)
        service = start_service(ModelOptions(folder, "cpu"), Settings("toy", 0))
    assert "context of each window of a recording: 48 tokens" in lines, "`max_target_positions`"
    with TestClient(make_app(service), "http://localhost") as client:
        yield client
    service.close()


def transcribe(client: TestClient, file: bytes = FILES[0], **fields: Any) -> Any:
    return client.post(PATH, files={"file": ("a.wav", file)}, data=fields)


def in_python(folder: Path, clip: Any, **options: Any) -> str:
    model, processor = tessera.load(folder, processor=options)
    answer = model.generate(processor([{"role": "user", "content": [{"type": "audio", "audio": clip}]}]), 1000)
    assert isinstance(answer, str)
    return answer


@pytest.mark.slow
def test_transcripts_are_those_of_python(client: TestClient, folder: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda file: transcribe(client, file, language="de").json(), FILES))
    for answer, clip in zip(answers, CLIPS, strict=True):
        assert answer["text"] == in_python(folder, clip, language="de").strip()
        assert answer["usage"]["input_tokens"] == (3 if len(clip) > RATE else 4), "those of a prompt"
    timed = transcribe(client, FILES[2], response_format="verbose_json").json()
    expected = in_python(folder, CLIPS[2], timestamps=True)
    assert timed["language"] in ("en", "de"), "the model detects it"
    assert transcribe(client, FILES[2], language="de", response_format="verbose_json").json()["language"] == "de"
    assert timed["text"] == plain_text(expected)
    assert [row["start"] for row in timed["segments"]] == [segment.start for segment in segments_of(expected)]
    assert "tessera_engine_generated" in client.get("/metrics").text
    assert client.get("/health").status_code == 200


def test_requests_without_effect_are_refused(client: TestClient) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(FILES[0]).decode(), "format": "wav"}}
    chat = {"messages": [{"role": "user", "content": [audio]}], "max_tokens": 4}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] <= 4
    for field in ({"logprobs": True}, {"stop": "x"}, {"min_tokens": 2}, {"response_format": {"type": "json_object"}}):
        answer = client.post("/v1/chat/completions", json={**chat, **field})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "generation.option-without-effect")
    for refused, code in (
        (transcribe(client, prompt="Names: Ada"), "generation.option-without-effect"),
        (transcribe(client, language="fr"), "data.unknown-language"),
        (transcribe(client, b"Not a sound."), "media.unreadable-file"),
        (client.post("/v1/completions", json={"prompt": "one"}), "generation.no-plain-text"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert transcribe(client).status_code == 200


@pytest.mark.parametrize(
    "options",
    [{"rows": 2}, {"blocks": 4}, {"max_length": 9}, {"adapters": {"a": Path("a")}}, {"speak": True}, {"codec": "a"}],
)
def test_options_of_the_engine_and_of_speech_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with raises("generation.option-without-effect"):
        start_service(ModelOptions(folder, "cpu", **options), Settings("toy", 0))


def test_answers_that_wait_are_aborted(folder: Path) -> None:
    model, processor = tessera.load(folder, device="cpu")
    inner: Any = processor.processor
    answers = OneByOne(model, inner)
    go, ended, deltas = threading.Event(), threading.Event(), list[Delta]()

    def hold(delta: Delta) -> None:  # the thread waits here, and the next answer in the queue
        deltas.append(delta)
        go.wait(30)

    def receive(delta: Delta) -> None:
        deltas.append(delta)
        ended.set()

    prompt = processor([{"role": "user", "content": [{"type": "audio", "audio": CLIPS[0]}]}])
    request = Request(prompt, max_new_tokens=3, stop_tokens=frozenset(inner.stop_tokens))
    answers.submit(request, hold)
    answers.abort(answers.submit(request, receive))
    go.set()
    assert ended.wait(30)
    finishes = [delta.finish.reason for delta in deltas if delta.finish]
    assert finishes == ["length", "aborted"]
    assert deltas[1].tokens == ()
    answers.close(0)
    with raises("generation.engine-closed"):
        answers.submit(request, receive)
