"""An engine that answers at once with known tokens: the server is tested without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tessera.engine.request import Delta, Finish, Request, TokenLogprob
from tessera.engine.stats import EngineStats
from tessera.errors import TesseraError

T = TypeVar("T")


@dataclass
class FakeEngine:
    """Answer with the words of `text`, one token for each, from one thread per request.

    `delay_s`: before each token. A prompt of `refused` tokens is refused when it is submitted.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    text: str = "one two three four five"
    delay_s: float = 0.0
    fails: TesseraError | None = None  # instead of the third token
    refuses: TesseraError | None = None
    requests: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    adapters: dict[str, Path] = field(default_factory=dict)
    closed: bool = False
    _live: dict[int, threading.Event] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------ EngineThread

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> int:
        if self.refuses is not None:
            raise self.refuses
        number = len(self.requests)
        self.requests.append(request)
        self._live[number] = threading.Event()
        threading.Thread(target=self._answer, args=(number, request, on_delta), daemon=True).start()
        return number

    def abort(self, number: int) -> None:
        event = self._live.get(number)
        if event is not None:
            self.aborted.append(number)
            event.set()

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, drain_s: float) -> None:
        self.closed = True

    # ------------------------------------------------------------------------------------------ Engine

    def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, 0, 64, 0, 0, 0, generated=7, prefilled=0, steps=0)

    @property
    def running(self) -> int:
        return len(self._live)

    def load_adapter(self, name: str, folder: Path) -> None:
        self.adapters[name] = folder

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    # ------------------------------------------------------------------------------------------ answers

    def _answer(self, number: int, request: Request, on_delta: Callable[[Delta], None]) -> None:
        stopped = self._live[number]
        tokens = list(self.encode(self.text))[: request.max_new_tokens]
        prompt = int(request.prompt["tokens"].numel())
        count = 0
        for count, token in enumerate(tokens, 1):
            if self.delay_s:
                stopped.wait(self.delay_s)
            if stopped.is_set():
                break
            if self.fails is not None and count == 3:
                self._finish(number, on_delta, Finish("error", error=self.fails))
                return
            first = count == 1 and request.prompt_logprobs is not None
            on_delta(
                Delta(
                    number,
                    (token,),
                    self.decode([token]),
                    () if request.logprobs is None else (_logprob(token, request.logprobs),),
                    (None, *(_logprob(int(t), 1) for t in request.prompt["tokens"][1:])) if first else None,
                )
            )
        reason = "aborted" if stopped.is_set() else "stop" if len(tokens) < request.max_new_tokens else "length"
        self._finish(number, on_delta, Finish(reason, None, None, prompt, 2, count))  # type: ignore[arg-type]

    def _finish(self, number: int, on_delta: Callable[[Delta], None], finish: Finish) -> None:
        del self._live[number]
        on_delta(Delta(number, finish=finish))

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Wait until no request is answered."""
        end = time.monotonic() + seconds
        while self._live and time.monotonic() < end:
            time.sleep(0.005)
        assert not self._live, f"{len(self._live)} requests are still answered"


def _logprob(token: int, count: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple((other, -0.5 - other) for other in range(count)), 7)
