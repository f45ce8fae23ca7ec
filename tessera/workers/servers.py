"""Start worker processes by servers, which only fork and have neither threads nor a device.

The first server imports torch once for all pools of a program, and the modules of Tessera that their work needs. For
each pool it forks a second server, which unpickles the pool's work once and forks the workers. So workers start in
milliseconds and share memory. Every process ends with its parent, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError, first_line
from tessera.workers.messages import Packed, receive, send
from tessera.workers.worker import (
    STATE_BYTES,
    WORKER_VARIABLE,
    MainModule,
    WorkerState,
    load_main,
    main_module,
    work_until_end,
)

# (kind, number). FORK (sent with file descriptors) and KILL: the number that the pool gives the child process. IMPORT:
# the number of bytes of the module names that follow.
REQUEST = struct.Struct("<cQ")
EXIT = struct.Struct("<Qi")  # (number, exit code) of a child process that has ended
FORK, KILL, IMPORT = b"f", b"k", b"i"
# The terminal or scheduler sends these to all processes of a group. The trainer handles them and ends its workers.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, the option of prctl by which a process ends when its parent ends


@dataclass(frozen=True)
class Surroundings:
    """Hold the user's working folder, import path, environment and main module, for workers."""

    folder: str
    path: list[str]
    environment: dict[str, str]
    main: MainModule | None


def first_server(control_fd: int, client: int) -> None:
    """Serve requests to fork a server process for each pool. `_FirstServer` runs this function in a new interpreter."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _serve(socket.socket(fileno=control_fd), _pool_server, client=client, report_exits=False)


def _pool_server(fds: Sequence[int]) -> None:
    control = socket.socket(fileno=fds[0])
    surroundings: Surroundings = receive(control)
    sys.path[:] = surroundings.path
    os.environ.clear()
    os.environ.update(surroundings.environment)
    try:
        os.chdir(surroundings.folder)
        work = receive(control, shared=False, before_find=functools.partial(load_main, surroundings.main))
    except Exception as error:
        error.add_note("(raised while a worker process unpickled its work)")
        with contextlib.suppress(OSError):
            send(control, error)
        return
    send(control, None)
    gc.freeze()  # else the garbage collector of a forked worker would write to shared pages, which copies them
    _serve(control, functools.partial(work_until_end, work))


def _serve(
    control: socket.socket, child: Callable[[Sequence[int]], None], client: int | None = None, report_exits: bool = True
) -> None:
    """Fork and kill children on request, until the client closes its end of `control`. Then kill all children."""
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    alive: dict[int, int] = {}  # number of the child -> process id
    while True:
        ready, _, _ = select.select([control, awake], [], [], 1.0)
        if client is not None and os.getppid() != client:
            break  # the client has ended; a process that it forked may still keep the socket open
        if awake in ready:
            awake.recv(4096)
        for number, code in _ended(alive):
            if report_exits:
                try:
                    control.sendall(EXIT.pack(number, code))
                except OSError:
                    break
        if control not in ready:
            continue
        try:
            request, fds, _, _ = socket.recv_fds(control, REQUEST.size, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            break
        if len(request) < REQUEST.size:
            break
        verb, number = REQUEST.unpack(request)
        if verb == IMPORT:
            _import_modules(control.recv(number, socket.MSG_WAITALL).decode().split())
            continue
        if verb == KILL:
            if number in alive:
                os.kill(alive[number], signal.SIGKILL)
            continue
        here = os.getpid()
        process = os.fork()
        if process == 0:
            _run_child(functools.partial(child, fds), here, [control, awake, wake])
        alive[number] = process
        for fd in fds:
            os.close(fd)
    for process in alive.values():
        os.kill(process, signal.SIGKILL)
    for process in alive.values():
        os.waitpid(process, 0)  # wait, because a server must not end before its children


def _import_modules(names: Sequence[str]) -> None:
    """Import modules for all children. The child that needs a module reports why it cannot be imported."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _ended(alive: dict[int, int]) -> list[tuple[int, int]]:
    ended = []
    for number, process in list(alive.items()):
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            del alive[number]
            ended.append((number, os.waitstatus_to_exitcode(status)))
    return ended


def _run_child(child: Callable[[], None], parent: int, not_ours: Sequence[socket.socket]) -> None:
    """Run `child` in a process that was just forked, and exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in not_ours:
            end.close()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            child()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# Environment variables of workers: one thread each, because there are many workers, and no accelerator.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    WORKER_VARIABLE: "1",
}
_BEGIN = """
import sys
sys.path[:] = {path!r}
from tessera.workers.servers import first_server
first_server({control}, {client})
"""
_OWN_MODULES = __name__.partition(".")[0] + "."
_MESSAGE_TIMEOUT_S = 30.0  # after the first bytes of a message, wait at most this many seconds for the others


@dataclass(eq=False)
class WorkerProcess:
    """Hold the connection to a worker process, and its items."""

    number: int
    connection: socket.socket
    state: WorkerState
    # indices of the items that it has received and not finished, in order
    items: deque[int] = field(default_factory=deque)
    killed_for: str | None = None

    def close(self) -> None:
        self.connection.close()
        self.state.close()


class ServerLostError(Exception):
    """Report that the server process, which forks the workers, was killed."""


@contextlib.contextmanager
def _of_server() -> Iterator[None]:
    """Convert socket errors of a dead server to `ServerLostError`, except time-outs."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise ServerLostError from error


class PoolServer:
    """Start the server process of a pool, which unpickles the work once, and forks and kills the workers."""

    def __init__(self, work: Any) -> None:
        packed = _packed(work)
        self.control, theirs = socket.socketpair()
        with theirs:
            _first_server().fork(theirs, packed.modules)
        self._last = 0
        self._codes: dict[int, int] = {}
        surroundings = Surroundings(os.getcwd(), list(sys.path), _environment(os.environ), main_module())
        try:
            send(self.control, surroundings)
            packed.send(self.control)
            refused = receive(self.control)
        except (EOFError, OSError):
            refused = TesseraError(
                "the server of the worker processes died at its start",
                fix="set data.workers=0",
                code="environment.workers-killed",
            )
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
            with _of_server():
                socket.send_fds(self.control, [REQUEST.pack(FORK, self._last)], [theirs.fileno(), state])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(state)
        ours.settimeout(_MESSAGE_TIMEOUT_S)
        return WorkerProcess(self._last, ours, view)

    def kill(self, worker: WorkerProcess, reason: str | None = None) -> None:
        worker.killed_for = worker.killed_for or reason
        with _of_server():
            self.control.sendall(REQUEST.pack(KILL, worker.number))

    def exit_reason(self, worker: WorkerProcess) -> str:
        """Return why a worker ended, after its connection was closed."""
        until = time.monotonic() + 5
        while worker.number not in self._codes and (remaining := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self.read_exits(remaining)
        code = self._codes.pop(worker.number, None)
        return worker.killed_for or _in_words(code)

    def read_exits(self, wait: float = _MESSAGE_TIMEOUT_S) -> None:
        with _of_server():
            self.control.settimeout(wait)
            message = self.control.recv(EXIT.size, socket.MSG_WAITALL)
        if len(message) < EXIT.size:
            raise ServerLostError
        number, code = EXIT.unpack(message)
        self._codes[number] = code

    def close(self) -> None:
        """Kill all workers and wait until they have ended."""
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
        self._imported: set[str] = set()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, control: socket.socket, modules: Set[str]) -> None:
        """Fork the server of a pool. Before that, import those of `modules` that belong to Tessera: a user's modules
        may start threads, which a process that forks must not have.
        """
        with self._lock:
            new = {name for name in modules if name.startswith(_OWN_MODULES)} - self._imported
            if new:
                names = " ".join(sorted(new)).encode()
                self._control.sendall(REQUEST.pack(IMPORT, len(names)) + names)
                self._imported |= new
            self._last += 1
            socket.send_fds(self._control, [REQUEST.pack(FORK, self._last)], [control.fileno()])

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:  # the server is still importing torch
            self._process.kill()
            self._process.wait()


def start_early() -> None:
    """Start the first server in advance, because its import of torch takes seconds."""
    _first_server()


def _first_server() -> _FirstServer:
    server = _first_server_of(os.getpid())
    if not server.alive:
        _first_server_of.cache_clear()
        server = _first_server_of(os.getpid())
    return server


@functools.cache
def _first_server_of(process: int) -> _FirstServer:
    """Return the first server of the process `process`, cached by id, so that a forked child starts another one."""
    return _FirstServer()


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, **_WORKER_ENVIRONMENT}


def _packed(work: Any) -> Packed:
    try:
        return Packed(work)
    except TesseraError:
        raise
    except Exception as error:
        raise TesseraError(
            f"the data source cannot be pickled for worker processes: {first_line(error)}",
            fix="define its classes and functions at the top level of a module, or set data.workers=0",
            code="data.not-picklable",
        ) from error


def _in_words(code: int | None) -> str:
    if code is None:
        return "its worker process vanished"
    if code >= 0:
        return f"its worker process ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    hint = ": the machine may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its worker process died of signal {-code}{name}{hint}"
