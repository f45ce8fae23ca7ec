"""A worker process: it receives items over its socket, works on them under limits, and sends back the results."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tessera.errors import TesseraError, first_line
from tessera.workers.messages import Packed, can_be_pickled, receive

_AGAIN_S = 1.0  # `TooSlow` is raised again every second, because Python ignores exceptions in destructors and callbacks


class TooSlow(TesseraError):
    """Report that a sample exceeded `data.sample_timeout_s`."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TooSlow` inside the `with` block after `seconds`, as soon as the interpreter runs.

    Code that hangs in C is not interrupted; the pool kills such a worker. Only the main thread of a process can be
    interrupted: in other threads there is no limit. A nested limit replaces the outer one until its block ends.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def over(number: int, frame: FrameType | None) -> None:
        if inside:
            raise TooSlow(
                f"took longer than {seconds:g} s",
                fix="raise data.sample_timeout_s if the file is valid",
                code="data.sample-too-slow",
            )

    before = signal.signal(signal.SIGALRM, over)
    began = time.monotonic()
    outer, again = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        try:
            inside = False
        finally:  # a signal that arrives here must not skip this
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if outer:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer - (time.monotonic() - began)), again)


WORKER_VARIABLE = "TESSERA_DATA_WORKER"  # environment variable that tells a process that it is a worker


@contextmanager
def memory_limit(allowed: int) -> Iterator[None]:
    """Inside of the `with` block, let a worker process allocate at most `allowed` more bytes, else `MemoryError`.

    A hostile file may make a decoder allocate much more than the size in its header. Shared memory is not limited. Only
    worker processes are limited: elsewhere allocations of other threads would fail.
    """
    if WORKER_VARIABLE not in os.environ:
        yield
        return
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard, used + allowed) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STATE_BYTES = 32
_NOTHING = -(1 << 63)


class WorkerState:
    """Hold the current item and sample of a worker in shared memory, where the pool can read them after a crash."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, STATE_BYTES)
        self._numbers = memoryview(self._memory).cast("q")

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()

    def begin(self, item: int) -> None:
        self._numbers[1] = _NOTHING
        self._numbers[0] = item

    def note(self, number: int) -> None:
        self._numbers[2] = time.monotonic_ns()
        self._numbers[1] = number

    def end(self) -> None:
        self._numbers[0] = _NOTHING

    @property
    def item(self) -> int | None:
        return None if self._numbers[0] == _NOTHING else self._numbers[0]

    @property
    def noted(self) -> int | None:
        return None if self._numbers[1] == _NOTHING else self._numbers[1]

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the work on the current item last called `note`; 0 before the first call."""
        if self.item is None or self.noted is None:
            return 0.0
        return (time.monotonic_ns() - self._numbers[2]) / 1e9


def work_until_end(work: Callable[[Any, Callable[[int], None]], Any], fds: Sequence[int]) -> None:
    """Work on items until the pool closes the connection. An exception is sent instead of a result."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # if memory runs out, the kernel kills workers first, not the trainer
    pool, state = socket.socket(fileno=fds[0]), WorkerState(fds[1])
    os.close(fds[1])
    while True:
        try:
            number, item = receive(pool)
        except (EOFError, ConnectionError):
            return
        state.begin(number)
        try:
            answer = Packed((number, True, work(item, state.note)))
        except BaseException as error:
            answer = Packed((number, False, _picklable(error)))
        state.end()
        del item
        try:
            answer.send(pool)
        except ConnectionError:
            return
        del answer


def _picklable(error: BaseException) -> BaseException:
    """Return the exception with its traceback as a note; a RuntimeError of the same text if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    error.add_note(f"(in a worker process)\n{text}")
    if can_be_pickled(error):
        return error
    return RuntimeError(f"{type(error).__name__}: {first_line(error)}\n(in a worker process)\n{text}")


# ---------------------------------------------------------------------------------------------- the user's script

# Workers do not run the user's script again. If the work uses classes of the script, the script is imported under
# another name than `__main__`. This needs `if __name__ == "__main__":` around its actions, or a script that only has
# definitions. Other scripts are refused, because they would train again in each worker.


@dataclass(frozen=True)
class MainModule:
    path: Path
    module: str | None  # import name if the script was started by `python -m`


def main_module() -> MainModule | None:
    """Return the script of this process; None if it has no file, as in a notebook or `python -c`."""
    module = sys.modules["__main__"]
    path = getattr(module, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    spec = getattr(module, "__spec__", None)
    return MainModule(Path(path).absolute(), None if spec is None else spec.name)


def load_main(main: MainModule | None, module: str, name: str) -> None:
    """Import the user's script as `__main__` of this process, if the unpickler looks up `name` in it."""
    if module != "__main__" or hasattr(sys.modules["__main__"], name):
        return
    fix = "move it into a module of its own, or set data.workers=0"
    if main is None:
        raise TesseraError(
            f"{name} is not defined in a file, so worker processes cannot import it",
            fix=fix,
            code="data.defined-in-no-file",
        )
    if _has_side_effects(main.path):
        raise TesseraError(
            f"{name} is defined in a script that would run again in each worker process",
            where=str(main.path),
            fix=f'put the actions of the script under `if __name__ == "__main__":`, {fix}',
            code="data.script-without-main",
        )
    if main.module is not None:
        script = importlib.import_module(main.module)
    else:
        spec = importlib.util.spec_from_file_location("__mp_main__", main.path)
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        sys.modules["__mp_main__"] = script  # the name that multiprocessing uses for the main script
        spec.loader.exec_module(script)
    sys.modules["__main__"] = script


def _has_side_effects(path: Path) -> bool:
    """Return whether importing a file does more than define classes, functions and constants.

    A file that tests `__name__` is assumed to do nothing else when it is imported.
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return True
    tests = [inner for node in body if isinstance(node, ast.If) for inner in ast.walk(node.test)]
    if any(isinstance(inner, ast.Name) and inner.id == "__name__" for inner in tests):
        return False
    acting = [inner for node in body if not isinstance(node, _DEFINITIONS) for inner in ast.walk(node)]
    return any(isinstance(inner, (ast.Call, ast.Await, ast.With)) for inner in acting)
