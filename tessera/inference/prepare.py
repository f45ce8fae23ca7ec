"""Prepare prompts while another thread drives the device: read and decode media, apply the chat template, tokenize.

Conversations with media are prepared in worker processes with memory limits. An image that kills its worker costs only
its own prompt. Conversations without media are prepared in threads: tokenizing takes less time than a message to
another process, and the tokenizer releases the lock of the interpreter. Long ones have a thread of their own: a million
characters take 2 s, for which short ones do not wait.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tessera.core.batch import Batch
from tessera.core.sample import Sample
from tessera.data.loader.loader import workers_per_rank
from tessera.data.media.files import Limits
from tessera.errors import TesseraError, first_line
from tessera.inference.loaded import LoadedProcessor
from tessera.inference.messages import sample_of
from tessera.workers.pool import Lost, Note, Pool, Report, no_note
from tessera.workers.servers import start_early
from tessera.workers.worker import time_limit

Conversation = Sample | Sequence[Mapping[str, Any]]  # a sample of a data set, or messages {role, content}

_MIN_WORKERS, _MAX_WORKERS = 2, 16
LONG_TEXT = 32_768  # number of characters that are tokenized in about 50 ms
_log = logging.getLogger("tessera")


@dataclass(frozen=True)
class _Item:
    conversation: Conversation
    root: Path | None
    limits: Limits | None  # None: the limits of the processor
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _Prepare:
    """Prepare one prompt. This is the work of the worker processes."""

    processor: LoadedProcessor
    timeout_s: float

    def __call__(self, item: _Item, note: Note) -> Batch:
        note(0)
        processor = self.processor if item.limits is None else replace(self.processor, limits=item.limits)
        root = item.root or Path.cwd()
        with time_limit(self.timeout_s):
            if isinstance(item.conversation, Sample):
                return processor.prompt([(item.conversation, root)], **item.options)
            sample = sample_of(item.conversation, "prompt", root)
            return processor.prompt([(sample, item.root or Path(root.anchor))], **item.options)


class PromptPool:
    """Prepare prompts for the engine. All methods may be called from any thread.

    `workers`: number of processes for conversations with media. 0: threads of this process prepare everything; then an
    image that crashes its decoder ends the process. "auto": the number of CPUs of this rank minus one, at least 2 (so
    that a slow video does not delay all other prompts) and at most 16. A prompt that takes longer than `timeout_s`
    fails. The first conversation with media starts the processes, which takes seconds; `start` does it in advance.
    """

    def __init__(
        self, processor: LoadedProcessor, workers: int | Literal["auto"] = "auto", *, timeout_s: float = 60.0
    ) -> None:
        share = workers_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        share = max(_MIN_WORKERS, min(share, _MAX_WORKERS))
        self._work = _Prepare(processor, timeout_s)
        self._workers = share if workers == "auto" else workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tessera-prompts")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tessera-long-prompts")
        self._lock = threading.Lock()  # guards the attributes below
        self._waiting: deque[tuple[_Item, Future[Batch]]] = deque()
        self._unfinished: set[Future[Batch]] = set()
        self._pool: Pool | None = None
        self._serving: threading.Thread | None = None
        self._closed = False

    def submit(
        self,
        conversation: Conversation,
        root: str | Path | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> Future[Batch]:
        """Prepare one prompt. The future raises the error of a conversation that cannot be prepared.

        `root`: folder that all media files must be inside of. None: relative paths begin at the working folder, and
        paths in messages may lead anywhere. `options`: see `LoadedProcessor.prompt`. If a future is cancelled before
        its work begins, the work is skipped.
        """
        item = _Item(conversation, None if root is None else Path(root), limits, options)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if not (self._workers and _has_media(conversation)):
                threads = self._thread if _text_characters(conversation) <= LONG_TEXT else self._long_texts
                return threads.submit(self._work, item, no_note)
            future: Future[Batch] = Future()
            self._waiting.append((item, future))
            self._unfinished.add(future)
            self._serve()
        return future

    def start(self) -> None:
        """Start the worker processes now, in the background."""
        with self._lock:
            if self._workers and not self._closed:
                self._serve()

    def close(self) -> None:
        """End all processes, even if one hangs in a decoder. Prompts that are not ready are cancelled."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.stop()
            serving = self._serving
        if serving is not None:
            serving.join()
        for threads in (self._thread, self._long_texts):
            threads.shutdown(cancel_futures=True)

    def __enter__(self) -> PromptPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ the serving thread

    def _serve(self) -> None:
        """Start the thread that drives the processes, or wake it. The caller holds the lock."""
        if self._serving is None:
            start_early()
            self._serving = threading.Thread(target=self._run, name="tessera-prompt-pool", daemon=True)
            self._serving.start()
        elif self._pool is not None:
            self._pool.wake()

    def _run(self) -> None:
        reason: Exception = CancelledError("the pool of prompts was closed")
        pool: Pool | None = None
        try:
            pool = self._start_pool()
            if pool is None:
                self._work_here()
            else:
                pool.serve(self._take)
        except Exception as error:  # for example, the server of the worker processes was killed several times
            reason = error
        finally:
            with self._lock:
                self._pool = self._serving = None  # the next conversation with media starts another pool
                unfinished = [*self._unfinished]
                self._unfinished.clear()
                self._waiting.clear()
            if pool is not None:
                pool.close()
            for future in unfinished:
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(reason)

    def _start_pool(self) -> Pool | None:
        """Return a new pool, or None if this processor cannot be used in other processes."""
        try:
            pool = Pool(self._work, self._workers, timeout_s=self._work.timeout_s)
        except Exception as error:
            if isinstance(error, TesseraError) and error.code == "environment.workers-killed":
                raise  # not the processor's fault: the next conversation with media starts another pool
            _log.warning("prompts are prepared without worker processes: %s", first_line(error))
            with self._lock:
                self._workers = 0
            return None
        with self._lock:
            self._pool = pool
            if self._closed:
                pool.stop()
        return pool

    def _work_here(self) -> None:
        """Prepare the waiting conversations in this thread, because worker processes cannot use the processor.

        Conversations with media that are submitted later are prepared like those without media.
        """
        while not self._closed and (taken := self._take()) is not None:
            item, report = taken
            try:
                report(self._work(item, no_note), False)
            except Exception as error:
                report(error, True)

    def _take(self) -> tuple[_Item, Report] | None:
        with self._lock:
            while self._waiting:
                item, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    return item, partial(self._report, future)
                self._unfinished.discard(future)
        return None

    def _report(self, future: Future[Batch], value: Any, failed: bool) -> None:
        with self._lock:
            self._unfinished.discard(future)
        if isinstance(value, Lost):
            what = f"the media of the prompt cannot be decoded: {value.reason}"
            future.set_exception(TesseraError(what, fix="convert the media again", code="media.ends-worker"))
        elif failed:
            future.set_exception(value)
        else:
            future.set_result(value)


def _has_media(conversation: Conversation) -> bool:
    if isinstance(conversation, Sample):
        return bool(conversation.media())
    contents = [message.get("content") for message in conversation if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _text_characters(conversation: Conversation) -> int:
    """Return the number of characters in the texts of a conversation."""
    if isinstance(conversation, Sample):
        return sum(len(str(part.value)) for message in conversation.messages for part in message.parts)
    contents = [message.get("content") for message in conversation if isinstance(message, Mapping)]
    parts = [part for content in contents for part in (content if isinstance(content, (list, tuple)) else [content])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))
