"""How a pool gets worker processes: from a server of its own, which is forked by one that serves the whole program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tessera.core.errors import TesseraError, first_line
from tessera.data.processes.main_module import main_module
from tessera.data.processes.messages import Packed, receive, send
from tessera.data.processes.serve import EXIT, FORK, KILL, REQUEST, Place
from tessera.data.processes.worker import STATE_BYTES, WorkerState

# One thread per process, and no device: a worker shares the machine with many like it and touches no accelerator.
_ALONE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
_BEGIN = """
import sys
sys.path[:] = {path!r}
from tessera.data.processes.serve import first_server
first_server({control}, {client})
"""
_PATIENCE_S = 30.0  # for a process that is alive to send the rest of a message


class WorkerProcess:
    """One worker as the pool sees it."""

    def __init__(self, number: int, connection: socket.socket, state: WorkerState) -> None:
        self.number = number
        self.connection = connection
        self.state = state
        self.items: deque[int] = deque()  # sent and not answered, in order
        self.killed_for: str | None = None


class PoolServer:
    """The process that holds a pool's work and forks its workers."""

    def __init__(self, work: Any) -> None:
        packed = _packed(work)
        self.control, theirs = socket.socketpair()
        with theirs:
            _first_server().fork(theirs)
        self._last = 0
        self._codes: dict[int, int] = {}
        place = Place(os.getcwd(), list(sys.path), _environment(os.environ), main_module())
        try:
            send(self.control, place)
            packed.send(self.control)
            refused = receive(self.control)
        except (EOFError, OSError):
            refused = TesseraError("the process that was to begin worker processes died", fix="set data.workers=0")
        if refused is not None:
            self.close()
            raise refused

    def fork(self) -> WorkerProcess:
        self._last += 1
        ours, theirs = socket.socketpair()
        state = os.memfd_create("tessera-worker")
        try:
            os.ftruncate(state, STATE_BYTES)
            view = WorkerState(state)
            view.end()
            socket.send_fds(self.control, [REQUEST.pack(FORK, self._last)], [theirs.fileno(), state])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(state)
        ours.settimeout(_PATIENCE_S)
        return WorkerProcess(self._last, ours, view)

    def kill(self, worker: WorkerProcess, reason: str | None = None) -> None:
        worker.killed_for = worker.killed_for or reason
        self.control.sendall(REQUEST.pack(KILL, worker.number))

    def fate(self, worker: WorkerProcess) -> str:
        """Why a worker ended, in words. To be asked when its connection is gone."""
        until = time.monotonic() + 5
        while worker.number not in self._codes and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self.hear_exits(left)
        code = self._codes.pop(worker.number, None)
        return worker.killed_for or _in_words(code)

    def hear_exits(self, wait: float = _PATIENCE_S) -> None:
        self.control.settimeout(wait)
        said = self.control.recv(EXIT.size, socket.MSG_WAITALL)
        if len(said) < EXIT.size:
            raise TesseraError("the process that begins worker processes was ended from outside")
        number, code = EXIT.unpack(said)
        self._codes[number] = code

    def close(self) -> None:
        """Ends the workers, also those that are stuck, and waits until they are gone."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)
            self.control.settimeout(2)
            while self.control.recv(4096):
                pass
        self.control.close()


class _FirstServer:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            begin = _BEGIN.format(path=list(sys.path), control=theirs.fileno(), client=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", begin],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(os.environ),
            )
        self._last = 0
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, control: socket.socket) -> None:
        with self._lock:
            self._last += 1
            socket.send_fds(self._control, [REQUEST.pack(FORK, self._last)], [control.fileno()])

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # still importing
            self._process.kill()
            self._process.wait()


def begin_early() -> None:
    """Importing torch in the process that begins others takes seconds: whoever will need it may let it start now."""
    _first_server()


def _first_server() -> _FirstServer:
    server = _first_server_of(os.getpid())
    if not server.alive:
        _first_server_of.cache_clear()
        server = _first_server_of(os.getpid())
    return server


@functools.cache
def _first_server_of(process: int) -> _FirstServer:
    """By process: a child that was forked from this one must not speak through the sockets of its parent."""
    return _FirstServer()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {**given, **_ALONE}


def _packed(work: Any) -> Packed:
    try:
        return Packed(work)
    except TesseraError:
        raise
    except Exception as error:
        raise TesseraError(
            f"this work cannot be handed to worker processes: {first_line(error)}",
            fix="define its classes and functions at the top level of a module, or set data.workers=0",
        ) from error


def _in_words(code: int | None) -> str:
    if code is None:
        return "its reader vanished"
    if code >= 0:
        return f"its reader ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    hint = ": the machine may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its reader died of signal {-code}{name}{hint}"
