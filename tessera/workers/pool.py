"""A pool of worker processes. A worker that dies or hangs is replaced, and its item is reported.

Workers are forked by a server process without threads and without a device. They do not run the user's script again.
Results are pickles whose tensors and arrays are in anonymous shared memory.

Compared with torch.multiprocessing (forkserver, torch preloaded, a pipe per worker), for batches of four tensors with
two workers on two cores, receiving a batch takes 0.5 instead of 2.0 ms of CPU time for 0.16 MiB, and 1.8 instead of
3.3 ms for 8.2 MiB. torch.multiprocessing also imports the user's script again, and does not report lost items.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError
from tessera.workers.messages import Packed, receive
from tessera.workers.servers import PoolServer, ServerLostError, WorkerProcess

Note = Callable[[int], None]
PoolWork = Callable[[Any, Note], Any]  # (item, note) -> result; must call `note(n)` before it reads sample n

_SMALL = 1 << 14  # bytes that a socket can buffer while the receiver does not read
_SERVERS = 3  # number of killed servers that the pool replaces; then it raises
_TRIES = 3  # attempts for an item whose workers end, but not during the work on it


def no_note(number: int) -> None:
    """Do nothing: the `note` argument for work in the calling process, which no pool watches."""


@dataclass(frozen=True)
class Lost:
    """Hold the reason why an item has no result: its worker died, or exceeded the time limit."""

    at: int | None  # index of the sample that the worker was reading, by its last call of `note`; None: unknown
    reason: str


Again = Callable[[Any, Lost], Any | None]
Report = Callable[[Any, bool], None]  # (result or exception, whether the work raised that exception)


@dataclass(eq=False)
class _PendingItem:
    """Hold an item of `Pool.map` until its result is returned."""

    number: int
    again: Again | None
    drawn: Any = None  # the original item
    item: Any = None  # the item to send to a worker: `drawn`, or its replacement from `again`
    tries: int = 0
    # indices of samples that a worker was reading when it died or hung; an element None: the sample is unknown
    blamed: set[int | None] = field(default_factory=set)
    done: bool = False
    failed: bool = False
    value: Any = None

    def settle(self, value: Any, failed: bool = False) -> None:
        self.done, self.failed, self.value, self.item = True, failed, value, None

    def lose(self, lost: Lost, once_more: bool = True) -> None:
        """Decide what follows after the worker ended during the work on this item.

        With `once_more`, the first loss at a sample is followed by a retry: the cause may be exhausted memory or a slow
        file system. After that `again` may return a replacement item to work on. Without one, the result is `lost`.
        """
        if once_more and lost.at not in self.blamed:
            self.blamed.add(lost.at)
            return
        try:
            another = None if self.again is None else self.again(self.item, lost)
        except Exception as error:
            self.settle(error, failed=True)
            return
        if another is None:
            self.settle(lost)
        else:
            self.item, self.tries = another, 0

    def lose_untold(self, reason: str) -> None:
        """Retry an item whose worker ended before or after the work on it; after `_TRIES` attempts it is lost."""
        self.tries += 1
        if self.tries == _TRIES:
            self.lose(Lost(None, reason), once_more=False)


class Pool:
    """Run `work(item, note)` for many items in `workers` processes; with 0, in the calling process.

    A worker that dies is replaced, and its item is tried once more. If its worker dies again, the result is a `Lost`. A
    worker that neither returns nor notes another sample within `timeout_s` + `grace_s` is killed. This is for code that
    hangs in C and for stopped processes; the work itself should use `time_limit`. Work without notes has no time limit.
    Only one thread may use a pool at a time; any thread may call `stop` and `wake`.
    """

    def __init__(
        self,
        work: PoolWork,
        workers: int,
        *,
        timeout_s: float | None = None,
        ahead: int = 2,
        grace_s: float = 5.0,
    ) -> None:
        assert workers >= 0
        assert ahead >= 1
        self.work = work
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.ahead = ahead
        self._server: PoolServer | None = None
        self._workers: list[WorkerProcess] = []
        self._pending: dict[int, _PendingItem] = {}  # items without a result, by the index of the item
        self._waiting: deque[_PendingItem] = deque()  # items that are not sent to a worker yet
        self._last = 0
        self._wanted = 0  # number of workers that the pool should have
        self._lost_servers = 0
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, None)
        try:
            self.grow(workers)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return len(self._workers)

    def grow(self, more: int) -> None:
        """Add workers. This is also possible between two results of a running `map`."""
        if not more:
            return
        if self._server is None:
            self._server = self._started_server()
            self._selector.register(self._server.control, selectors.EVENT_READ, None)
        self._wanted += more
        with self._surviving_server():
            for _ in range(more):
                self._add_worker()

    def _started_server(self) -> PoolServer:
        """Start a server. If it is killed during its start, which takes seconds, start another one."""
        for _ in range(_SERVERS - 1):
            try:
                return PoolServer(self.work)
            except TesseraError as error:
                if error.code != "environment.workers-killed" or self._stopped:
                    raise
        return PoolServer(self.work)

    def map(self, items: Iterable[Any], again: Again | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (item, result) in the order of the items, which may be infinite.

        At most `workers * ahead` items are read ahead. An exception of the work is raised here. `again(item, lost)`
        returns a replacement for a lost item, or None: then the result is `Lost`.
        """
        source = iter(items)
        order: deque[_PendingItem] = deque()
        more = True
        try:
            while not self._stopped:
                more = more and self._draw(source, order, again)
                if not order:
                    return
                while not order[0].done:
                    if not self._wait():
                        return
                first = order.popleft()
                self._pending.pop(first.number, None)
                if first.failed:
                    raise first.value
                if self._workers:
                    # keep workers busy while the caller uses the result
                    more = more and self._draw(source, order, again)
                yield first.drawn, first.value
        finally:
            for pending in order:  # if the caller stops `map` early, forget its items, and ignore their results
                self._pending.pop(pending.number, None)
            self._waiting = deque(pending for pending in self._waiting if pending.number in self._pending)

    def serve(self, take: Callable[[], tuple[Any, Report] | None]) -> None:
        """Work on items that arrive at any time, until `stop`. Results are reported when they are ready, in any order.

        `take()` returns the next item and the function that gets its result, or None if there is no item now. After
        new items have arrived, call `wake`.
        """
        assert self._workers, "serve needs worker processes"
        reports: dict[int, Report] = {}
        while not self._stopped:
            while len(self._pending) < len(self._workers) * self.ahead and (taken := take()) is not None:
                self._last += 1
                pending = _PendingItem(self._last, None, taken[0], taken[0])
                self._pending[pending.number] = pending
                self._waiting.append(pending)
                reports[pending.number] = taken[1]
            with self._surviving_server():
                self._dispatch()
            ready = [pending for pending in self._pending.values() if pending.done]
            if ready:
                self._lost_servers = 0  # count only kills in a row: a service runs for months
            for pending in ready:
                del self._pending[pending.number]
                reports.pop(pending.number)(pending.value, pending.failed)
            if not ready:
                self._wait()

    def stop(self) -> None:
        """End a `map` or `serve` that runs in another thread, without a further result.

        After that the pool can only be closed.
        """
        self._stopped = True
        self.wake()

    def wake(self) -> None:
        """Let a `serve` that runs in another thread ask for items."""
        with contextlib.suppress(OSError):  # raised if the buffer is full: unread bytes will wake up the thread anyway
            self._wake.send(b"!")

    def close(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        for worker in self._workers:
            worker.close()
        self._server, self._workers = None, []
        self._selector.close()
        self._awake.close()
        self._wake.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ items out

    def _draw(self, source: Iterator[Any], order: deque[_PendingItem], again: Again | None) -> bool:
        """Read items up to the limit of items in progress, and send them. Return False at the end of the items."""
        more = True
        while more and len(order) < max(1, len(self._workers) * self.ahead):
            self._last += 1
            pending = _PendingItem(self._last, again)
            try:
                pending.drawn = pending.item = next(source)
            except StopIteration:
                more = False
                break
            except Exception as error:
                pending.settle(error, failed=True)  # `map` yields all earlier results, then raises this error
                more = False
            order.append(pending)
            if not pending.done and not self._workers:
                pending.settle(self.work(pending.item, no_note))
            elif not pending.done:
                self._pending[pending.number] = pending
                self._waiting.append(pending)
        with self._surviving_server():
            self._dispatch()
        return more

    def _dispatch(self) -> None:
        """Send waiting items until every worker has two: one in progress and the next."""
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.items))
            if len(worker.items) > 1:
                return
            pending = self._waiting[0]
            try:
                packed = Packed((pending.number, pending.item))
            except Exception as error:  # the item cannot be pickled
                self._waiting.popleft()
                pending.settle(error, failed=True)
                continue
            # A busy worker does not read its socket. If it were sending a large result, both sides would block.
            if worker.items and packed.inline_bytes > _SMALL:
                return
            self._waiting.popleft()
            worker.items.append(pending.number)
            with self._replacing_broken(worker):
                packed.send(worker.connection)

    # ------------------------------------------------------------------------------------------ results in

    def _wait(self) -> bool:
        """Wait for a result, an exit or a time limit, and handle it. Return False if the pool was stopped."""
        with self._surviving_server():
            return self._wait_once()
        return not self._stopped

    def _wait_once(self) -> bool:
        assert self._server is not None
        self._end_silent(self._server)
        for key, _ in self._selector.select(self._until_next_limit()):
            if key.fileobj is self._awake:
                self._awake.recv(4096)
                continue
            if key.data is None:
                with contextlib.suppress(TimeoutError):  # `_replace` may have read it already
                    self._server.read_exits(0.01)
                continue
            with self._replacing_broken(key.data):
                number, fine, value = receive(key.data.connection)
                key.data.items.remove(number)
                if number in self._pending:
                    self._pending[number].settle(value, failed=not fine)
        self._dispatch()
        return not self._stopped

    @contextlib.contextmanager
    def _surviving_server(self) -> Iterator[None]:
        """Start a new server and new workers if the server was killed. All items without a result are sent again."""
        try:
            yield
        except ServerLostError:
            self._lost_servers += 1
            if self._lost_servers > _SERVERS or self._stopped:
                raise TesseraError(
                    "the server of the worker processes was killed several times",
                    fix="check whether the machine runs out of memory, or set data.workers=0",
                    code="environment.workers-killed",
                ) from None
        else:
            return
        assert self._server is not None
        self._selector.unregister(self._server.control)
        self._server.close()
        for worker in self._workers:
            self._selector.unregister(worker.connection)
            worker.close()
        self._server, self._workers, wanted, self._wanted = None, [], self._wanted, 0
        self._waiting = deque(pending for _, pending in sorted(self._pending.items()) if not pending.done)
        self.grow(wanted)
        with self._surviving_server():
            self._dispatch()

    @contextlib.contextmanager
    def _replacing_broken(self, worker: WorkerProcess) -> Iterator[None]:
        """Replace a worker if sending or receiving fails in the `with` block.

        A part of a message may be missing then, so no later message of this worker can be parsed.
        """
        try:
            yield
        except TimeoutError:
            self._replace(worker, "its worker process stopped in the middle of a message")
        except (EOFError, OSError):
            self._replace(worker)
        except BaseException as error:  # such as Ctrl-C
            self._replace(worker, f"its worker process was interrupted ({type(error).__name__})")
            raise

    def _end_silent(self, server: PoolServer) -> None:
        if self.timeout_s is None:
            return
        for worker in self._workers:
            if worker.killed_for is None and worker.state.silent_seconds > self.timeout_s + self.grace_s:
                server.kill(worker, f"took longer than {self.timeout_s:g} s")

    def _until_next_limit(self) -> float | None:
        if self.timeout_s is None:
            return None
        silent = [worker.state.silent_seconds for worker in self._workers if worker.killed_for is None]
        return max(0.01, self.timeout_s + self.grace_s - max(silent, default=0.0))

    def _replace(self, worker: WorkerProcess, reason: str | None = None) -> None:
        """Replace a worker that has ended. Its current item is lost; its other items go to other workers."""
        assert self._server is not None
        self._selector.unregister(worker.connection)
        self._workers.remove(worker)
        try:
            self._server.kill(worker, reason)
            reason = self._server.exit_reason(worker)
        except ServerLostError:
            worker.close()
            raise
        begun, first = worker.state.item, worker.items[0] if worker.items else None
        for number in reversed(worker.items):
            pending = self._pending.get(number)
            if pending is None:
                continue
            if number == begun:
                pending.lose(Lost(worker.state.noted, reason))
            elif begun is None and number == first:  # the worker was receiving this item or sending its result
                pending.lose_untold(reason)
            if not pending.done:
                self._waiting.appendleft(pending)
        worker.close()
        self._add_worker()

    def _add_worker(self) -> None:
        assert self._server is not None
        worker = self._server.fork()
        self._workers.insert(0, worker)  # first, so that `_dispatch` retries lost items in a new process
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
