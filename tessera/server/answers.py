"""Run requests in the engine and carry their deltas to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from tessera.engine.constraint import is_quick
from tessera.engine.request import Delta, Request

T = TypeVar("T")


class EngineAccess(Protocol):
    """Declare the interface of the engine for the server. The engine runs in its own thread."""

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> int:
        """Queue a request and return its number. `on_delta` is called in the engine's thread."""
        ...

    def abort(self, number: int) -> None: ...

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        """Run a function of the engine between two steps."""
        ...

    def close(self, drain_s: float) -> None: ...


class Mailbox:
    """Carry deltas from the engine's thread to the event loop, with one wake-up for all deltas of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[[Delta], None], Delta]] = deque()
        self._scheduled = False

    def post(self, deliver: Callable[[Delta], None], delta: Delta) -> None:
        """Schedule a call of `deliver(delta)` in the event loop."""
        self._waiting.append((deliver, delta))
        if not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop is closed: no client waits for the delta
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # reset it first: a delta that arrives from now on must schedule another call
        while self._waiting:
            deliver, delta = self._waiting.popleft()
            deliver(delta)


@dataclass(frozen=True)
class Submitters:
    """Hold threads that pass requests to the engine, so that other requests do not wait while a constraint compiles."""

    plain: Executor
    quick: Executor  # for requests whose constraint compiles quickly; `slow`: other constraints; `plain`: no constraint
    slow: Executor

    def of(self, request: Request) -> Executor:
        if request.constraint is None:
            return self.plain
        return self.quick if is_quick(request.constraint) else self.slow

    def close(self) -> None:
        for threads in (self.plain, self.quick, self.slow):
            threads.shutdown(wait=False, cancel_futures=True)


class AnswerGroup:
    """Run the answers to one prompt. Incomplete answers are aborted at the end of the `with` block.

    Deltas that wait because the client reads slowly are merged, so they take no more memory than the answers.
    """

    def __init__(self, engine: EngineAccess, mailbox: Mailbox, submitters: Submitters) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._submitters = submitters
        self._numbers: dict[int, int] = {}  # index of an incomplete answer -> its number in the engine
        self._waiting: dict[int, Delta] = {}
        self._arrived = asyncio.Event()
        self._remaining = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for number in self._numbers.values():
            self._engine.abort(number)
        self._numbers.clear()

    async def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests. It runs in another thread, because compiling a constraint may take long."""
        self._remaining = len(requests)
        for index, request in enumerate(requests):
            on_delta = partial(self._mailbox.post, partial(self._receive, index))
            submitter = self._submitters.of(request)
            queued = submitter.submit(self._engine.submit, request, on_delta)
            try:
                number = await asyncio.shield(asyncio.wrap_future(queued))
            except asyncio.CancelledError:
                queued.add_done_callback(self._abort_late)
                raise
            if index not in self._waiting or self._waiting[index].finish is None:
                self._numbers[index] = number

    def _abort_late(self, queued: Future[int]) -> None:
        # Callback of the future: runs in the thread that queued the request, even if the event loop is closed.
        if not queued.cancelled() and queued.exception() is None:
            self._engine.abort(queued.result())

    def _receive(self, index: int, delta: Delta) -> None:
        waiting = self._waiting.get(index)
        self._waiting[index] = delta if waiting is None else merged(waiting, delta)
        if delta.finish is not None:
            self._numbers.pop(index, None)
        self._arrived.set()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (index of the answer, delta) until all answers are complete."""
        while self._remaining:
            await self._arrived.wait()
            self._arrived.clear()
            waiting, self._waiting = self._waiting, {}
            for index, delta in waiting.items():
                if delta.finish is not None:
                    self._remaining -= 1
                yield index, delta


def merged(first: Delta, second: Delta) -> Delta:
    """Return two consecutive deltas of one request as one."""
    return second._replace(
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
    )
