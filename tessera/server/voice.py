"""Run a model that speaks for a server: one text after another, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from tessera.engine.adapter_bank import AdapterBank
from tessera.engine.failures import request_failed
from tessera.engine.request import Delta
from tessera.engine.request import Request as EngineRequest
from tessera.engine.stats import EngineStats
from tessera.errors import TesseraError
from tessera.inference.speech import OnSound, Speaker, Speech, SpeechSampling, pcm_of
from tessera.models.speech.generation import SpeechPrompts
from tessera.server.answers import EngineAccess
from tessera.server.errors import ApiError, of_tessera

T = TypeVar("T")
Check = Callable[[], None]  # raises if nobody waits for the speech any more
Speak = Callable[[Check, OnSound | None], Speech]
_PATIENCE_S = 0.5  # seconds between two checks of a thread that waits for the engine: has the client left?


class _Aborted(Exception):
    """Raised to end speech whose client has left."""


def _result(future: Future[T], check: Check) -> T:
    """Return the result of a future. `check` raises when nobody waits for it any more."""
    while True:
        check()
        with suppress(TimeoutError):
            return future.result(timeout=_PATIENCE_S)


class Voice:
    """Speak one text after another in a thread of its own.

    `bank`: adapters of the model whose answers are spoken; None: it has none.
    """

    def __init__(self, speaker: Speaker, bank: AdapterBank | None = None) -> None:
        self.speaker = speaker
        self._bank = bank
        self._thread = ThreadPoolExecutor(1, "speech")
        self._closed = threading.Event()

    def of_text(self, text: str, voice: str, options: SpeechSampling) -> Speak:
        """Return the work of speaking a text."""

        def speak(check: Check, on_sound: OnSound | None) -> Speech:
            hooks: Any = {"on_frame": lambda row, codes: check(), "on_sound": on_sound}
            return self.speaker.say(text, speaker=voice, sampling=options, **hooks)

        return speak

    def of_answer(
        self, engine: EngineAccess, request: EngineRequest, answer: Sequence[int], voice: str, options: SpeechSampling
    ) -> Speak:
        """Return the work of speaking the tokens of an answer.

        The outputs of the model that wrote the answer are computed again, in the thread of the engine.
        """

        def speak(check: Check, on_sound: OnSound | None) -> Speech:
            prompts = self.speaker.answer_prompt(request.prompt, answer, voice)

            def encoded(_: Any) -> SpeechPrompts:  # in the engine's thread, between two steps
                if self._bank is not None:
                    self._bank.select([request.adapter], [])
                return self.speaker.encoded(prompts)

            ready = _result(engine.call(encoded), check)
            (speech,) = self.speaker.speak(ready, options, lambda row, codes: check(), on_sound)
            return speech

        return speak

    async def say(self, speak: Speak, on_sound: OnSound | None = None) -> Speech:
        """Return the speech. If the caller is cancelled, the speech ends at its next frame."""
        aborted = threading.Event()

        def check() -> None:
            if aborted.is_set() or self._closed.is_set():
                raise _Aborted

        def run() -> Speech:
            check()
            return speak(check, on_sound)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except _Aborted:
            raise ApiError(503, "the server aborted the speech", code="aborted") from None
        except Exception as error:
            raise of_tessera(request_failed(error)) from error
        finally:
            aborted.set()

    async def stream(self, speak: Speak) -> AsyncGenerator[bytes | Speech, None]:
        """Yield the sound as 16 bit samples while it is generated, then the speech.

        Sound that a slow client does not read waits in memory: at most that of the whole speech.
        """
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def on_sound(part: np.ndarray) -> None:
            with suppress(RuntimeError):  # the loop is closed: no client waits for the sound
                loop.call_soon_threadsafe(parts.put_nowait, pcm_of(part))

        task = asyncio.ensure_future(self.say(speak, on_sound))
        task.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


class NoTextEngine:
    """Stand in for the engine of a model that speaks and writes no text, with the interface `EngineAccess`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, request: EngineRequest, on_delta: Callable[[Delta], None]) -> int:
        raise TesseraError(
            f"{self._name} speaks texts, and writes none",
            fix="send the text to /v1/audio/speech",
            code="generation.model-speaks",
        )

    def abort(self, number: int) -> None: ...

    def call(self, function: Callable[[NoTextEngine], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, drain_s: float) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
