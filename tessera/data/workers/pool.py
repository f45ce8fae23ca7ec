"""A pool of worker processes. A worker that dies or hangs is replaced, and the item it worked on is reported.

The processes are forked by a server that never had threads or a device; the script that was started is not run again in
them. Results are pickles whose tensors and arrays are in anonymous shared memory.

Against a thin layer over torch.multiprocessing (forkserver with torch preloaded, a pipe per worker), with batches of
four tensors, two workers and two cores: the receiving process spends 0.5 instead of 2.0 ms of CPU time on a batch of
0.16 MiB, 0.6 instead of 2.0 ms on 1.2 MiB and 1.8 instead of 3.3 ms on 8.2 MiB; 150 to 240 small batches arrive in a
second instead of 70 to 100. Such a layer also imports the script again, and names no item that was lost.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera.data.workers.messages import Packed, receive
from tessera.data.workers.servers import PoolServer, ServerLostError, WorkerProcess
from tessera.errors import TesseraError

Note = Callable[[int], None]
PoolWork = Callable[[Any, Note], Any]  # (item, note) -> result; `note(n)` reports the sample that is being worked on

_SMALL = 1 << 14  # bytes of an item that surely fit into a socket whose other side is busy
_SERVERS = 3  # that may be ended from outside before a pool gives up
_TRIES = 3  # of an item whose process ended before the work began, or after it


@dataclass(frozen=True)
class Lost:
    """Hold why an item has no result: its process died or did not answer in time."""

    at: int | None  # last noted
    reason: str


Again = Callable[[Any, Lost], Any | None]


@dataclass(eq=False)
class _PendingItem:
    """Hold one item that has no result yet."""

    number: int
    again: Again | None
    drawn: Any = None  # from the caller's iterator
    item: Any = None  # sent to a worker: `drawn`, or its replacement from `again`
    tries: int = 0
    blamed: set[int | None] = field(default_factory=set)  # samples at which this item ended a process
    done: bool = False
    failed: bool = False
    value: Any = None

    def settle(self, value: Any, failed: bool = False) -> None:
        self.done, self.failed, self.value, self.item = True, failed, value, None

    def lose(self, lost: Lost, once_more: bool = True) -> None:
        """Settle an item whose process ended, or have it tried again.

        `once_more`: a process may end for what its item cannot help (memory that ran out, someone's kill, a stop for
        longer than the time limit, a file system that hung), so the item is tried in a fresh one before it is blamed.
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
        """Have an item tried again whose process ended beside the work on it, not for ever."""
        self.tries += 1
        if self.tries == _TRIES:
            self.lose(Lost(None, reason), once_more=False)


class Pool:
    """Do `work(item, note)` for many items in `workers` processes; with none, in this one.

    A worker that dies is replaced, and its item is tried once more; if that ends its worker too, the result is a
    `Lost`. A worker that is silent for `timeout_s` + `grace_s` after a note is ended, too. That is the last resort, for
    work that is stuck in C and for a process that was stopped: use `time_limit` inside the work. Work that makes no
    notes has no time-out. To be used by one thread at a time; `stop` may be called by any.
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
        self._pending: dict[int, _PendingItem] = {}  # sent or waiting, by number
        self._waiting: deque[_PendingItem] = deque()  # not sent yet
        self._last = 0
        self._wanted = 0  # workers
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
        """Add workers, also while a `map` is under way (between two of its results)."""
        if not more:
            return
        if self._server is None:
            self._server = PoolServer(self.work)
            self._selector.register(self._server.control, selectors.EVENT_READ, None)
        self._wanted += more
        with self._surviving_server():
            for _ in range(more):
                self._add_worker()

    def map(self, items: Iterable[Any], again: Again | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (item, result) in the order of the items, which may be endless.

        At most `workers * ahead` items are drawn ahead. What the work raised is raised here. `again(item, lost)` may
        answer a loss with another item to work on; None: the result is `Lost`.
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
                    more = more and self._draw(source, order, again)  # before the caller goes off with this one
                yield first.drawn, first.value
        finally:
            for pending in order:  # answers that still come are dropped
                self._pending.pop(pending.number, None)
            self._waiting = deque(pending for pending in self._waiting if pending.number in self._pending)

    def stop(self) -> None:
        """End a `map` that another thread is in, without a further result. The pool can then only be closed."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def close(self) -> None:
        """End all processes at once, stuck or not."""
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
        """Take as many items as may be under way; return False when there are no more."""
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
                pending.settle(error, failed=True)  # raised when all before it have been given back
                more = False
            order.append(pending)
            if not pending.done and not self._workers:
                pending.settle(self.work(pending.item, lambda number: None))
            elif not pending.done:
                self._pending[pending.number] = pending
                self._waiting.append(pending)
        with self._surviving_server():
            self._dispatch()
        return more

    def _dispatch(self) -> None:
        """Send items until every worker has one to work on and one to go on with."""
        while self._waiting:
            worker = min(self._workers, key=lambda one: len(one.items))
            if len(worker.items) > 1:
                return
            pending = self._waiting[0]
            packed = Packed((pending.number, pending.item))
            # A worker that is sending a large result does not read: more than its socket holds would block both.
            if worker.items and packed.inline_bytes > _SMALL:
                return
            self._waiting.popleft()
            worker.items.append(pending.number)
            with self._replacing_broken(worker):
                packed.send(worker.connection)

    # ------------------------------------------------------------------------------------------ results in

    def _wait(self) -> bool:
        """Wait for something to happen; return False when the pool was stopped."""
        with self._surviving_server():
            return self._wait_once()
        return not self._stopped

    def _wait_once(self) -> bool:
        assert self._server is not None
        self._end_silent(self._server)
        for key, _ in self._selector.select(self._until_next_limit()):
            if key.fileobj is self._awake:
                return False
            if key.data is None:
                with contextlib.suppress(TimeoutError):  # replacing a worker may have read it already
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
        """Begin again with a new server where the old one was ended from outside. No item is to blame for that."""
        try:
            yield
        except ServerLostError:
            self._lost_servers += 1
            if self._lost_servers > _SERVERS or self._stopped:
                raise TesseraError(
                    "the process that begins worker processes was ended from outside, again and again",
                    fix="look for what ends processes on this machine (memory?), or set data.workers=0",
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
        """Replace a worker with which a message broke off: what follows on its connection means nothing."""
        try:
            yield
        except TimeoutError:
            self._replace(worker, "its reader stopped in the middle of a message")
        except (EOFError, OSError):
            self._replace(worker)
        except BaseException as error:  # Ctrl-C, memory
            self._replace(worker, f"its reader was interrupted ({type(error).__name__})")
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
        """Replace a worker that is gone: its current item is lost, items that it had not begun go to others."""
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
            elif begun is None and number == first:  # it ended while it took this item over, or sent its result
                pending.lose_untold(reason)
            if not pending.done:
                self._waiting.appendleft(pending)
        worker.close()
        self._add_worker()

    def _add_worker(self) -> None:
        assert self._server is not None
        worker = self._server.fork()
        self._workers.insert(0, worker)  # first in turn: what killed another worker is tried in a fresh one
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
