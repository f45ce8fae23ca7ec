"""Answer requests one after another by the generation method of the model's own class (`ModelSpec.generate`)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, TypeVar

from tessera.core.spec import LanguageProcessor
from tessera.engine.failures import request_failed
from tessera.engine.request import Delta, Finish, Request
from tessera.engine.stats import EngineStats
from tessera.engine.text import decoder_of
from tessera.errors import TesseraError
from tessera.inference.loaded import LoadedModel
from tessera.inference.own_generation import OwnGeneration

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    number: int
    request: Request
    on_delta: Callable[[Delta], None]
    aborted: threading.Event = field(default_factory=threading.Event)


class _Ended(Exception):
    """Raised to end an answer before its last token."""


class OneByOne:
    """Run a model that the engine cannot run, with the interface `EngineAccess`.

    A thread computes one answer after another, and sends the text of an answer when it is complete. An aborted answer
    ends as soon as the model's generation method reports its next token.
    """

    def __init__(self, model: LoadedModel, processor: LanguageProcessor) -> None:
        assert model.spec.generate is not None, "the engine runs this model"
        self._generation = OwnGeneration(model.module, model.spec.generate)
        self._device = model.device
        self._processor = processor
        self._stops = frozenset(processor.stop_tokens)
        self._numbers = itertools.count()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards _jobs, the counters and _closed
        self._jobs: dict[int, _Job] = {}  # the running request and the waiting ones, by number
        self._generated = self._prefilled = self._answered = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> int:
        self._check(request)
        job = _Job(next(self._numbers), request, on_delta)
        with self._lock:
            self._check_open()
            self._jobs[job.number] = job
            self._queue.put(job)
        return job.number

    def abort(self, number: int) -> None:
        with self._lock:
            if number in self._jobs:
                self._jobs[number].aborted.set()

    def call(self, function: Callable[[OneByOne], T]) -> Future[T]:
        """Call a function immediately, not between steps: an answer takes long."""
        self._check_open()
        future: Future[T] = Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, drain_s: float) -> None:
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join(drain_s)
        with self._lock:
            for job in self._jobs.values():
                job.aborted.set()
        self._thread.join()

    def stats(self) -> EngineStats:
        with self._lock:
            running = min(1, len(self._jobs))
            waiting = len(self._jobs) - running
            return EngineStats(running, waiting, 0, 0, 0, 0, 0, self._generated, self._prefilled, self._answered)

    def _check_open(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise TesseraError("the engine is closed", fix="start it again", code="generation.engine-closed")

    def _check(self, request: Request) -> None:
        """Refuse request fields that the model's own generation method does not support."""
        wrong = {
            "logprobs": request.logprobs is not None or request.prompt_logprobs is not None,
            "response_format": request.constraint is not None,
            "stop": bool(request.stop) or request.stop_tokens != self._stops,
            "min_tokens": request.min_new_tokens > 0,
        }
        name = next((name for name in wrong if wrong[name]), None)
        if name is not None:
            raise TesseraError(
                f"this model has its own generation method, which does not support {name}",
                where=name,
                fix=f"leave {name} out",
                code="generation.option-without-effect",
            )

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            delta = self._answer(job)
            with self._lock:
                del self._jobs[job.number]
                self._answered += 1
                self._generated += len(delta.tokens)
                self._prefilled += delta.finish.prompt_tokens if delta.finish else 0
            job.on_delta(delta)

    def _answer(self, job: _Job) -> Delta:
        """Generate the complete answer, and return it."""
        request, tokens = job.request, list[int]()

        def on_token(row: int, token: int) -> None:
            if job.aborted.is_set() or len(tokens) == request.max_new_tokens:
                raise _Ended
            tokens.append(token)

        try:
            with suppress(_Ended):
                self._generation.answer(
                    request.prompt.to(self._device),
                    max_new_tokens=0 if job.aborted.is_set() else request.max_new_tokens,
                    stop_tokens=self._stops,
                    sampling=request.sampling,
                    on_token=on_token,
                )
            text = decoder_of(self._processor, request.skip_special)(tuple(tokens))
        except Exception as error:  # only this request fails; the others continue
            return Delta(job.number, finish=Finish("error", error=request_failed(error)))
        full = len(tokens) == request.max_new_tokens
        reason: Literal["aborted", "length", "stop"] = (
            "aborted" if job.aborted.is_set() else "length" if full else "stop"
        )
        prompt = request.prompt["tokens"].numel()
        return Delta(job.number, tuple(tokens), text, finish=Finish(reason, None, None, prompt, 0, len(tokens)))
