"""The thread that speaks for a server: one text after another, until the client leaves or the server closes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")

from starlette.types import Message

from tessera.errors import TesseraError
from tessera.inference.speech import Speech, SpeechSampling
from tessera.server.app import checked
from tessera.server.errors import ApiError
from tessera.server.guard import Admission
from tessera.server.settings import Settings
from tessera.server.speech import SpeechRequest, speak_text
from tessera.server.streams import ClientLeft
from tessera.server.voice import Voice


class Slow:
    """Speak a frame whenever the test allows it, and send its sound: one sample with the number of the frame."""

    def __init__(self) -> None:
        self.frames = threading.Semaphore(0)
        self.begun = threading.Event()
        self.spoken: list[int] = []  # frames of each text

    def say(self, text: str, *, speaker: str, sampling: SpeechSampling, on_frame: Any, on_sound: Any) -> Speech:
        self.spoken.append(0)
        self.begun.set()
        if text == "wrong":
            raise TesseraError("no such voice", code="data.unknown-speaker")
        if text == "broken":
            raise RuntimeError("out of memory")
        for number in range(3):
            assert self.frames.acquire(timeout=20)
            on_frame(0, torch.zeros(1))
            self.spoken[-1] = number + 1
            if on_sound is not None:
                on_sound(np.full(1, number / 32767, np.float32))
        return Speech(torch.zeros(3, 1), np.zeros(3, np.float32), 24_000)


def said(voice: Voice, text: str) -> Any:
    return voice.of_text(text, "", SpeechSampling())


async def started(voice: Voice, speaker: Slow, text: str = "hello") -> asyncio.Task[Speech]:
    task = asyncio.create_task(voice.say(said(voice, text)))
    await asyncio.to_thread(speaker.begun.wait, 20)
    speaker.begun.clear()
    return task


def test_a_client_that_leaves_ends_its_speech_at_the_next_frame() -> None:
    async def run() -> None:
        speaker: Any = Slow()
        voice = Voice(speaker)
        task = await started(voice, speaker)
        waiting = asyncio.create_task(voice.say(said(voice, "never")))
        await asyncio.sleep(0)
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        speaker.frames.release(8)
        speech = await voice.say(said(voice, "next"))
        assert len(speech.wav()) == 44 + 6
        assert speaker.spoken == [0, 3]
        voice.close()

    asyncio.run(run())


def test_sound_is_streamed_until_the_client_leaves() -> None:
    async def run() -> None:
        speaker: Any = Slow()
        voice = Voice(speaker)
        parts = voice.stream(said(voice, "hello"))
        for number in range(3):  # each part is read before the next frame is spoken
            speaker.frames.release()
            assert await anext(parts) == number.to_bytes(2, "little")
        assert isinstance(await anext(parts), Speech)
        abandoned = voice.stream(said(voice, "never"))
        speaker.frames.release()
        assert await anext(abandoned) == bytes(2)
        await abandoned.aclose()
        speaker.frames.release(4)
        rest = [part async for part in voice.stream(said(voice, "next"))]
        assert len(rest) == 4
        assert speaker.spoken == [3, 1, 3]
        voice.close()

    asyncio.run(run())


def test_a_client_that_leaves_a_stream_frees_its_place() -> None:
    async def run() -> None:
        speaker: Any = Slow()
        settings = replace(Settings("toy", 64), max_requests=1)
        service: Any = SimpleNamespace(voice=Voice(speaker), settings=settings, adapter_of=lambda name: None)
        admission = Admission(settings)
        gone, sent = asyncio.Event(), list[bytes]()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message.get("body", b""))

        fields = SpeechRequest.model_validate({"input": "hello", "response_format": "pcm"})
        request: Any = SimpleNamespace(receive=receive)
        speaker.frames.release()
        response = await speak_text(service, admission, fields, request)
        sending = asyncio.create_task(response({"type": "http"}, receive, send))
        with pytest.raises(ApiError) as error:
            await speak_text(service, admission, fields, request)
        assert error.value.status == 429
        gone.set()
        with pytest.raises(ClientLeft):
            await sending
        assert b"".join(sent) == bytes(2)
        gone.clear()
        speaker.frames.release(4)
        response = await speak_text(service, admission, fields, request)
        await response({"type": "http"}, receive, send)
        assert speaker.spoken == [1, 3]
        service.voice.close()

    asyncio.run(run())


def test_a_server_that_closes_ends_speech() -> None:
    async def run() -> None:
        speaker: Any = Slow()
        voice = Voice(speaker)
        task = await started(voice, speaker)
        voice.close()
        speaker.frames.release(3)
        with pytest.raises(ApiError) as error:
            await task
        assert (error.value.status, error.value.code) == (503, "aborted")

    asyncio.run(run())


def test_fields_that_clients_always_send_are_accepted() -> None:
    """Null, empty and unsupported fields are not set, as in chat completions; others are refused by their names."""
    plain = SpeechRequest.model_validate({"input": "hello"})
    unset = ("model", "voice", "speed", "instructions", "stream", "stream_format", "temperature", "seed", "max_seconds")
    for fields in (
        dict.fromkeys(unset),
        {"instructions": "", "stream": False, "user": "Ann", "metadata": {"a": "b"}, "store": True},
        {"instructions": {}, "stream": []},
    ):
        assert SpeechRequest.model_validate({"input": "hello", **fields}) == plain
    for name, value in {"instructions": "gently", "stream": True}.items():
        with pytest.raises(ApiError, match="not supported") as error:
            checked({"input": "hello", name: value}, SpeechRequest)
        assert error.value.param == name


def test_a_response_that_ends_early_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    from uvicorn.server import ServerState

    from tessera.server.run import _Http

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"sound", "more_body": True})

    async def run() -> bytes:
        config = uvicorn.Config(app, http=_Http, lifespan="off", log_config=None, access_log=False)
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Http(config, ServerState(), {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            received = await asyncio.wait_for(reader.read(), 20)
            writer.close()
        return received

    assert b"sound" in asyncio.run(run())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "status", "code"), [("wrong", 400, "data.unknown-speaker"), ("broken", 500, "generation.request-failed")]
)
def test_errors_have_a_status(text: str, status: int, code: str) -> None:
    async def run() -> None:
        voice = Voice(Slow())  # type: ignore[arg-type]
        with pytest.raises(ApiError) as error:
            await voice.say(said(voice, text))
        assert (error.value.status, error.value.code) == (status, code)
        voice.close()

    asyncio.run(run())
