"""Run a model that speaks for a server: one text after another, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from tessera.engine.failures import request_failed
from tessera.engine.request import Delta
from tessera.engine.request import Request as EngineRequest
from tessera.engine.stats import EngineStats
from tessera.errors import TesseraError
from tessera.inference.speech import Speaker, Speech, SpeechSampling
from tessera.server.errors import ApiError, of_tessera

T = TypeVar("T")


class _Aborted(Exception):
    """Raised to end speech whose client has left."""


class Voice:
    """Speak one text after another in a thread of its own."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._thread = ThreadPoolExecutor(1, "speech")
        self._closed = threading.Event()

    async def say(self, messages: Sequence[Mapping[str, Any]], voice: str, options: SpeechSampling) -> Speech:
        """Return the speech of the last message. If the caller is cancelled, the speech ends at its next frame."""
        aborted = threading.Event()

        def on_frame(row: int, codes: Tensor) -> None:
            if aborted.is_set() or self._closed.is_set():
                raise _Aborted

        def run() -> Speech:
            if aborted.is_set():
                raise _Aborted
            return self._speaker.say_last(messages, speaker=voice, sampling=options, on_frame=on_frame)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except _Aborted:
            raise ApiError(503, "the server aborted the speech", code="aborted") from None
        except Exception as error:
            raise of_tessera(request_failed(error)) from error
        finally:
            aborted.set()

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
