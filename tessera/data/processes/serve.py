"""Processes that do nothing but begin others, by fork, from a state without threads and without a device.

The first one imports torch once for all pools of a program. For each pool it forks a second one, which unpickles the
pool's work once and forks the workers: they begin in milliseconds, and share what the work holds. Each ends with the
one that began it, whichever way that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.data.processes.main_module import MainModule, load_main
from tessera.data.processes.messages import receive, send
from tessera.data.processes.worker import work_until_end

REQUEST = struct.Struct("<cQ")  # FORK with file descriptors, or KILL; the number of the child
EXIT = struct.Struct("<Qi")  # the number of the child, how it ended
FORK, KILL = b"f", b"k"
# Sent to a whole group of processes, these are the trainer's to answer: it saves, then ends its workers.
_NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Place:
    """Where the work believes to be."""

    folder: str
    path: list[str]
    environment: dict[str, str]
    main: MainModule | None


def first_server(control_fd: int, client: int) -> None:
    """Runs in the new interpreter that `launch` starts."""
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    _serve(socket.socket(fileno=control_fd), _pool_server, client=client, tells=False)


def _pool_server(fds: Sequence[int]) -> None:
    control = socket.socket(fileno=fds[0])
    place: Place = receive(control)
    sys.path[:] = place.path
    os.environ.clear()
    os.environ.update(place.environment)
    try:
        os.chdir(place.folder)
        work = receive(control, shared=False, before_find=functools.partial(load_main, place.main))
    except Exception as error:
        error.add_note("(raised while a worker process took over its work)")
        with contextlib.suppress(OSError):
            send(control, error)
        return
    send(control, None)
    gc.freeze()  # the workers' collections leave what they share alone: no page of it is copied for their sake
    _serve(control, functools.partial(work_until_end, work))


def _serve(
    control: socket.socket, child: Callable[[Sequence[int]], None], client: int | None = None, tells: bool = True
) -> None:
    """Forks and kills children as asked, until the other side of `control` is gone; then ends them all."""
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    alive: dict[int, int] = {}  # number -> process
    while True:
        ready, _, _ = select.select([control, awake], [], [], 1.0)
        if client is not None and os.getppid() != client:
            break  # a process that the client forked may still hold the other side open
        if awake in ready:
            awake.recv(4096)
        for number, code in _ended(alive):
            if tells:
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
        if verb == KILL:
            if number in alive:
                os.kill(alive[number], signal.SIGKILL)
            continue
        here = os.getpid()
        process = os.fork()
        if process == 0:
            _become(functools.partial(child, fds), here, [control, awake, wake])
        alive[number] = process
        for fd in fds:
            os.close(fd)
    for process in alive.values():
        os.kill(process, signal.SIGKILL)
    for process in alive.values():
        os.waitpid(process, 0)  # whoever hears that this process is gone knows that its children are


def _ended(alive: dict[int, int]) -> list[tuple[int, int]]:
    ended = []
    for number, process in list(alive.items()):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            del alive[number]
            ended.append((number, os.waitstatus_to_exitcode(status)))
    return ended


def _become(child: Callable[[], None], parent: int, not_ours: Sequence[socket.socket]) -> None:
    """The rest of the life of a process that was just forked."""
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
