"""Recordings in requests to the server: input_audio, and /v1/audio/transcriptions."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

import tessera
from tessera.inference.loaded import LoadedProcessor
from tessera.models.processing.transcription import Transcript, transcript, transcription_instruction
from tessera.models.qwen3_asr.processor import Qwen3ASRProcessor
from tessera.server import transcriptions
from tessera.server.app import make_app
from tessera.server.errors import ApiError
from tessera.server.multipart import read_form
from tessera.server.settings import Settings
from tessera.server.start import ModelOptions, start_service
from tessera.server.transcriptions import segments_of, subtitles
from tests.errors import raises
from tests.toys import speech
from tests.toys.audio_folder import audio_folder
from tests.toys.chat_service import make_service

RATE = 16_000
PATH = "/v1/audio/transcriptions"
WORDS = "one two three four five"
SOUND = speech.wav(speech.steps(1, RATE), RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_folder(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> LoadedProcessor:
    return tessera.load(folder, device="cpu")[1]


@pytest.fixture
def client(processor: LoadedProcessor) -> Iterator[TestClient]:
    with TestClient(make_app(make_service(processor)), "http://localhost") as client:
        yield client


def transcribe(client: TestClient, file: bytes = SOUND, name: str = "a.wav", **fields: Any) -> Any:
    return client.post(PATH, files={"file": (name, file)}, data=fields)


def refused(response: Any) -> dict[str, Any]:
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_transcriptions_end_to_end(folder: Path) -> None:
    """The answer of a small model over the server is that of the same model in Python."""
    openai = pytest.importorskip("openai")
    model, processor = tessera.load(folder, device="cpu")
    messages = [
        {"role": "user", "content": [{"type": "audio", "audio": SOUND}, {"type": "text", "text": "Write one two."}]}
    ]
    expected = model.generate(processor(messages), 1000 - len(processor(messages)["tokens"]))
    service = start_service(ModelOptions(folder, "cpu", max_length=1000), Settings("toy", 0))
    with TestClient(make_app(service), "http://localhost") as client:
        official = openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=client)
        heard = official.audio.transcriptions.create(model="toy", file=("a.wav", SOUND), prompt="Write one two.")
        assert heard.text == expected.strip()
        assert heard.usage.type == "tokens"
        assert heard.usage.input_tokens == len(processor(messages)["tokens"])
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"}}
        content = [part, {"type": "text", "text": "Write one two."}]
        answer = official.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": content}], temperature=0
        )
        assert answer.choices[0].message.content == expected
        with pytest.raises(openai.BadRequestError, match="no time stamps"):
            official.audio.transcriptions.create(model="toy", file=("a.wav", SOUND), response_format="srt")


def test_formats_and_fields(client: TestClient) -> None:
    assert transcribe(client).json()["text"] == WORDS
    assert transcribe(client, response_format="text").text == WORDS + "\n"
    assert (
        transcribe(client, model="toy", temperature="0.5", language="de", stream="false", prompt="").status_code == 200
    )
    for name in ("a.mp3", 'ünïcode " name.wav', "x" * 200):  # the content decides
        assert transcribe(client, name=name).status_code == 200
    wrong: dict[str, tuple[str, str]] = {
        "temperature": ("hot", "temperature"),
        "response_format": ("yaml", "response_format"),
        "language": ("x; y", "language"),
        "model": ("other", "model"),
        "stream": ("true", "stream"),
        "timestamp_granularities[]": ("word", "timestamp_granularities[]"),
        "responce_format": ("json", "responce_format"),
    }
    for field, (value, param) in wrong.items():
        assert refused(transcribe(client, **{field: value}))["param"] == param
    assert refused(client.post(PATH, data={"model": "toy"}, files={"other": ("a", b"x")}))["param"] == "file"
    assert refused(transcribe(client, b""))["param"] == "file"
    for form in ("srt", "vtt", "verbose_json"):
        assert refused(transcribe(client, response_format=form))["code"] == "generation.no-time-stamps"


def test_bad_recordings_cost_only_their_request(client: TestClient) -> None:
    bad = {
        "media.unreadable-file": b"Not a sound.",
        "media.damaged-file": SOUND[: len(SOUND) // 2],
        "media.audio-too-long": speech.wav(speech.steps(3, RATE), RATE),
    }
    for code, file in bad.items():
        assert refused(transcribe(client, file))["code"] == code
    assert transcribe(client).status_code == 200


class Own:
    """A processor with a form of its own."""

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        return f"{language} {prompt} {timestamps}"

    def transcript(self, answer: str) -> Transcript:
        return Transcript(answer.removeprefix("heard: "))


STAMPED = "<|0.00|> Good evening.<|1.52|><|1.52|> Hello\n\n-->there<|3.00|>"


def test_formats_with_time_stamps() -> None:
    chats: list[dict[str, Any]] = []

    async def run_chat(values: dict[str, Any], request: Request) -> dict[str, Any]:
        chats.append(values)
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        return {"choices": [{"message": {"content": f"heard: {STAMPED}"}}], "usage": usage}

    async def answer(request: Request) -> Response:
        return await transcriptions.transcribe(run_chat, Own(), await request.body(), request)

    with TestClient(Starlette(routes=[Route(PATH, answer, methods=["POST"])])) as client:
        assert transcribe(client).json()["text"] == "Good evening. Hello\n\n-->there"
        verbose = transcribe(client, response_format="verbose_json", language="en").json()
        assert {name: verbose[name] for name in ("task", "language", "duration")} == {
            "task": "transcribe",
            "language": "en",
            "duration": 1.0,  # that of the recording, not the last time stamp
        }
        assert [segment["text"] for segment in verbose["segments"]] == ["Good evening.", "Hello\n\n-->there"]
        assert transcribe(client, response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.520\n")
    texts = [chat["messages"][0]["content"][1]["text"] for chat in chats]
    assert texts == ["None None False", "en None True", "None None True"]
    assert [chat["skip_special_tokens"] for chat in chats] == [True, False, False]


def test_time_stamps() -> None:
    segments = segments_of(STAMPED)
    assert [(segment.start, segment.end) for segment in segments] == [(0.0, 1.52), (1.52, 3.0)]
    assert subtitles(segments, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,520\nGood evening.\n\n2\n00:00:01,520 --> 00:00:03,000\nHello\n->there\n\n"
    )
    assert subtitles(segments_of("<|3599.99|>late<|3725.5|>"), "vtt") == (
        "WEBVTT\n\n00:59:59.990 --> 01:02:05.500\nlate\n\n"
    )
    for text in ("", "words", "<|0.00|><|1.00|>", "<|1.00|>"):
        with pytest.raises(ApiError):
            segments_of(text)
    assert segments_of("<|2.00|>no end") == segments_of("<|2.00|>no end<|2.00|>")


# ---------------------------------------------------------------------------------------------- forms


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    head = f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
    return b"".join(head + name.encode() + b"\r\n\r\n" + content + b"\r\n" for name, content in parts) + b"--b--\r\n"


def test_forms_are_read() -> None:
    kind = 'multipart/form-data; charset=utf-8; boundary="b"'
    data = bytes(range(256)) * 3 + b"\r\n--\r\n--c"
    body = form(('name="file"; filename="a \\" b.wav"', data), ("name=model", b"toy"), ('name="empty"', b""))
    parts = read_form(body, kind)
    assert bytes(parts["file"].content) == data
    assert parts["file"].filename is not None
    assert {name: parts[name].text(name) for name in ("model", "empty")} == {"model": "toy", "empty": ""}
    assert parts["model"].filename is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(("name=a", b"1")), "multipart/form-data"),
        (form(("name=a", b"1")), "multipart/form-data; boundary=other"),
        (form(("name=a", b"1"), ("name=a", b"2")), "multipart/form-data; boundary=b"),
        (form(*((f"name=a{number}", b"1") for number in range(33))), "multipart/form-data; boundary=b"),
        (form(("filename=a", b"1")), "multipart/form-data; boundary=b"),
        (form((f'name="{"a" * 2000}"', b"1")), "multipart/form-data; boundary=b"),
        (form(("name=a", b"1"))[:-9], "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=b"),
        (b"--b", "multipart/form-data; boundary=b"),
        (b"--bx\r\n", "multipart/form-data; boundary=b"),
    ],
)
def test_damaged_forms_are_refused(client: TestClient, body: bytes, kind: str) -> None:
    error = refused(client.post(PATH, content=body, headers={"content-type": kind}))
    assert error["code"] == "invalid_form"


def test_only_this_path_takes_forms(client: TestClient) -> None:
    fields = {"file": ("a.wav", SOUND)}
    assert client.post("/v1/chat/completions", files=fields).status_code == 415
    assert client.post(PATH, json={}).status_code == 415
    assert client.post(PATH, files=fields, headers={"origin": "http://evil.example"}).status_code == 403


def test_large_forms_are_refused(processor: LoadedProcessor) -> None:
    with TestClient(make_app(make_service(processor, max_body=1000)), "http://localhost") as client:
        assert refused(transcribe(client))["code"] == "request_too_large"


def test_processors_may_ask_and_answer_in_their_own_words() -> None:
    assert transcription_instruction(Own(), "de", None, True) == "de None True"
    assert transcript(Own(), "heard: one").text == "one"
    assert transcript(object(), "heard: one").text == "heard: one"
    assert transcription_instruction(object(), "de", None, False) == "Transcribe the speech. The language is de."
    assert transcription_instruction(object(), None, "Write.", False) == "Write."


def test_transcripts_of_qwen3_asr() -> None:
    processor = Qwen3ASRProcessor.__new__(Qwen3ASRProcessor)
    assert transcription_instruction(processor, None, None, False) == ""
    assert transcript(processor, "language English<asr_text>one <two>") == ("one <two>", "English")
    assert transcript(processor, "one") == ("one", None)
    for language, prompt in (("en", None), (None, "Names: Ada")):
        with raises("generation.option-without-effect"):
            transcription_instruction(processor, language, prompt, False)
    with raises("generation.no-time-stamps"):
        transcription_instruction(processor, None, None, True)


def test_models_that_write_text_do_not_speak(client: TestClient) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    spoken = {"messages": messages, "modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    for path, body in (("/v1/audio/speech", {"input": "Hello."}), ("/v1/chat/completions", spoken)):
        assert refused(client.post(path, json=body))["code"] == "model_does_not_speak"
    for changes in ({"stream": True}, {"modalities": ["text"]}):
        assert refused(client.post("/v1/chat/completions", json={**spoken, **changes}))["code"] == "invalid_value"
