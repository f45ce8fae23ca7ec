"""The thread that speaks for a server: one text after another, until the client leaves or the server closes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")

from tessera.errors import TesseraError
from tessera.inference.speech import Speech, SpeechSampling
from tessera.server.errors import ApiError
from tessera.server.voice import Voice


class Slow:
    """Speak a frame whenever the test allows it."""

    def __init__(self) -> None:
        self.frames = threading.Semaphore(0)
        self.begun = threading.Event()
        self.spoken: list[int] = []  # frames of each text

    def say_last(self, messages: Any, *, speaker: str, sampling: SpeechSampling, on_frame: Any) -> Speech:
        self.spoken.append(0)
        self.begun.set()
        if messages[-1]["content"] == "wrong":
            raise TesseraError("no such voice", code="data.unknown-speaker")
        if messages[-1]["content"] == "broken":
            raise RuntimeError("out of memory")
        for number in range(3):
            assert self.frames.acquire(timeout=20)
            on_frame(0, torch.zeros(1))
            self.spoken[-1] = number + 1
        return Speech(torch.zeros(3, 1), np.zeros(3, np.float32), 24_000)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


async def started(voice: Voice, speaker: Slow, text: str = "hello") -> asyncio.Task[Speech]:
    task = asyncio.create_task(voice.say(said(text), "", SpeechSampling()))
    await asyncio.to_thread(speaker.begun.wait, 20)
    speaker.begun.clear()
    return task


def test_a_client_that_leaves_ends_its_speech_at_the_next_frame() -> None:
    async def run() -> None:
        speaker: Any = Slow()
        voice = Voice(speaker)
        task = await started(voice, speaker)
        waiting = asyncio.create_task(voice.say(said("never"), "", SpeechSampling()))
        await asyncio.sleep(0)
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        speaker.frames.release(8)
        speech = await voice.say(said("next"), "", SpeechSampling())
        assert len(speech.wav()) == 44 + 6
        assert speaker.spoken == [0, 3]
        voice.close()

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


@pytest.mark.parametrize(
    ("text", "status", "code"), [("wrong", 400, "data.unknown-speaker"), ("broken", 500, "generation.request-failed")]
)
def test_errors_have_a_status(text: str, status: int, code: str) -> None:
    async def run() -> None:
        voice = Voice(Slow())  # type: ignore[arg-type]
        with pytest.raises(ApiError) as error:
            await voice.say(said(text), "", SpeechSampling())
        assert (error.value.status, error.value.code) == (status, code)
        voice.close()

    asyncio.run(run())
