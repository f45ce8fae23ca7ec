"""Run an engine in a thread of its own, for callers that wait for many answers at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from tessera.engine.engine import Engine
from tessera.engine.request import Delta, Finish, Request
from tessera.errors import TesseraError

T = TypeVar("T")
_log = logging.getLogger("tessera")


class EngineThread:
    """Own an engine. Callbacks run in its thread, so they must be short."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._callbacks: dict[int, Callable[[Delta], None]] = {}
        self._closed = threading.Event()
        self._close_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> int:
        """Add a request, and return its number. `on_delta` gets its deltas.

        Raise if the request can never run, or if too many requests wait.

        The request is checked in the thread of the caller, which does not wait for a step.
        """
        self._check_open()
        self._engine.check_room()
        state = self._engine.prepare(request)

        def enqueue() -> None:
            self._callbacks[state.number] = on_delta
            try:
                self._engine.enqueue(state)
            except TesseraError as error:  # other requests have filled the queue in the meantime
                self._deliver(Delta(state.number, finish=Finish("error", error=error)))

        self._commands.put(enqueue)
        return state.number

    def abort(self, number: int) -> None:
        """End a request. Its last delta follows, unless it has ended."""
        self._commands.put(lambda: self._engine.abort(number))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine between two steps."""
        self._check_open()
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)

        self._commands.put(run)
        return future

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds to finish, and end the rest."""
        self._closed.set()
        self._commands.put(lambda: setattr(self, "_close_at", time.monotonic() + drain_s))
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TesseraError("the engine is closed", fix="start it again", code="generation.engine-closed")

    def _run(self) -> None:
        while time.monotonic() < self._close_at and (self._engine.busy or not self._closed.is_set()):
            self._commands_of_callers(wait=not self._engine.busy)
            self._step()
        self._commands_of_callers(wait=False)
        for number in list(self._callbacks):
            self._engine.abort(number)
        self._step()

    def _commands_of_callers(self, wait: bool) -> None:
        try:
            command = self._commands.get(block=wait)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            pass

    def _step(self) -> None:
        if self._engine.busy:
            for delta in self._engine.step():
                self._deliver(delta)

    def _deliver(self, delta: Delta) -> None:
        callback = self._callbacks.get(delta.request)
        if delta.finish is not None:
            self._callbacks.pop(delta.request, None)
        if callback is None:
            return
        try:
            callback(delta)
        except Exception:  # the callback of a caller has failed; other requests continue
            _log.exception("the receiver of request %s failed", delta.request)
            self._callbacks.pop(delta.request, None)
            self._engine.abort(delta.request)
