"""The pool: items in, results out in their order, whatever happens to the processes in between."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.errors import TesseraError
from tessera.workers.messages import receive, send
from tessera.workers.pool import Lost, Note, Pool
from tessera.workers.worker import TooSlow, memory_limit, time_limit
from tests.errors import raises


class Refusal(Exception):
    def __init__(self, first: int, two: int) -> None:  # two arguments: what pickle would rebuild it from is one
        super().__init__(f"{first} {two}")


def do(item: Any, note: Note) -> Any:
    """(what to do, number) -> (number, process)."""
    what, number = item
    note(number)
    if what == "nap":
        time.sleep(0.002 * (number * 7 % 5))
    elif what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "leave":
        os._exit(3)
    elif what == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).sleep(1000)
    elif isinstance(what, Path):  # a marker: only the first process that comes here is stopped
        with contextlib.suppress(FileExistsError):
            what.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "dawdle":
        with time_limit(0.1):
            while True:
                pass
    elif what == "refuse":
        raise Refusal(1, 2)
    elif what == "fail":
        raise TesseraError("broken", where="here", allowed=["a"], nearest="b", fix="mend")
    elif what == "raise":
        raise KeyError(number)
    elif what == "tensor":
        return torch.full((300, 200), float(number)), os.getpid()
    return number, os.getpid()


def numbers(pool: Pool, items: Any) -> list[int]:
    return [result[0] for _, result in pool.map(items)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(do, 2, timeout_s=0.3, grace_s=1.2, ahead=3) as pool:
        yield pool


# ---------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    items = [("nap", n) for n in range(40)]
    with Pool(do, workers) as pool:
        results = list(pool.map(items))
        assert [item for item, _ in results] == items
        assert [result[0] for _, result in results] == list(range(40))
        processes = {result[1] for _, result in results}
        assert len(processes) <= max(1, workers)
        assert (os.getpid() in processes) == (workers == 0)
        assert numbers(pool, items[:3]) == [0, 1, 2]  # again, with the same processes
        assert numbers(pool, []) == []


def test_growing_does_not_change_the_order() -> None:
    with Pool(do, 0) as pool:
        results, processes = [], set()
        for _, (number, process) in pool.map(("nap", n) for n in range(60)):
            results.append(number)
            processes.add(process)
            if number in (5, 20):
                pool.grow(1)
        assert results == list(range(60))
        assert len(processes) == 3


def test_no_item_is_drawn_before_it_may_start() -> None:
    drawn = 0

    def endless() -> Iterator[tuple[str, int]]:
        nonlocal drawn
        for drawn in itertools.count(1):
            yield "nap", drawn

    with Pool(do, 2, ahead=3) as pool:
        for taken, _ in enumerate(itertools.islice(pool.map(endless()), 20), start=1):
            time.sleep(0.01)  # a slow consumer
            assert drawn <= taken + 6


def test_large_items_and_results_do_not_block_each_other() -> None:
    with Pool(echo, 2) as pool:
        items = [bytes([n]) * 3_000_000 for n in range(8)]
        assert [result for _, result in pool.map(items)] == items


def echo(item: Any, note: Note) -> Any:
    return item


class Counts:
    """Work with state of its own."""

    def __init__(self) -> None:
        self.seen = np.zeros(100_000, dtype=np.int64)

    def __call__(self, item: int, note: Note) -> tuple[int, int]:
        time.sleep(0.02)
        self.seen[0] += 1
        return os.getpid(), int(self.seen[0])


def test_what_the_work_holds_is_each_workers_own() -> None:
    with Pool(Counts(), 2) as pool:
        last = {process: count for _, (process, count) in pool.map(range(10))}
    assert len(last) == 2
    assert sum(last.values()) == 10


# ---------------------------------------------------------------------------------------------- losses


def test_a_worker_that_dies_is_replaced_and_its_item_named(pool: Pool) -> None:
    items = [("die" if n in (3, 4) else "leave" if n == 9 else "nap", n) for n in range(12)]
    results = [result for _, result in pool.map(items)]
    assert [n for n, result in enumerate(results) if isinstance(result, Lost)] == [3, 4, 9]
    assert results[3] == Lost(3, "its worker process died of signal 11 (SIGSEGV)")
    assert results[9] == Lost(9, "its worker process ended with exit code 3")
    assert pool.workers == 2


def die_once(item: Path, note: Note) -> int:
    """Dies as many times as the file says. Its answer is the process, which must be a fresh one."""
    note(7)
    remaining = int(item.read_text())
    if remaining:
        item.write_text(str(remaining - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_what_a_worker_died_at_is_tried_once_more_before_it_is_blamed(tmp_path: Path) -> None:
    files = [tmp_path / str(n) for n in range(6)]
    for file, times in zip(files, (0, 1, 0, 2, 0, 0), strict=True):
        file.write_text(str(times))
    blamed: list[tuple[Any, Any]] = []

    def again(item: Any, lost: Lost) -> Any:
        blamed.append((item, lost.at))
        return item

    with Pool(die_once, 2) as pool:
        results = [result for _, result in pool.map(files, again)]
    assert all(isinstance(result, int) for result in results)
    assert blamed == [(files[3], 7)]  # by its second death, not by its first
    assert results[1] not in (results[0], results[2])


class EndsItsReader:
    """An item of which a worker dies while it takes it over: before the work on it has begun."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (5,)


def test_what_waits_behind_a_deadly_item_is_never_blamed() -> None:
    def again(item: Any, lost: Lost) -> Any:
        return ("die", item[1] + 1) if item[1] < 4 else None  # eight deaths in all: each item dies twice

    with Pool(do, 1, ahead=2) as pool:  # one worker: what comes next stands behind the deadly item every time
        assert [result for _, result in pool.map([("die", 1), ("nap", 9)], again)][1][0] == 9
        results = [result for _, result in pool.map([EndsItsReader(), ("nap", 9)])]
    assert results[0] == Lost(None, "its worker process ended with exit code 5")
    assert results[1][0] == 9


def server_of(item: int, note: Note) -> int:
    note(item)
    time.sleep(0.005)
    return os.getppid()


def end_servers(pool: Pool, at: int) -> list[int]:
    """Kill the server of a pool at every so many results; return the server of each result."""
    servers: list[int] = []
    for number, (item, server) in enumerate(pool.map(range(60))):
        assert (item, type(server)) == (number, int)
        servers.append(server)
        if number % at == at - 1:
            os.kill(server, signal.SIGKILL)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.005)
    return servers


def test_a_server_that_is_ended_from_outside_is_replaced_and_no_item_blamed() -> None:
    with Pool(server_of, 2) as pool:
        assert len(set(end_servers(pool, at=25))) == 3
    with Pool(server_of, 2) as pool, raises("environment.workers-killed"):
        end_servers(pool, at=10)


class EndsItsServer:
    """Work that ends the first servers of its pool while they start."""

    def __init__(self, file: Path, times: int) -> None:
        self.file, self.times = file, times

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        with self.file.open("a") as file:
            file.write("x")
        if self.file.stat().st_size <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, item: int, note: Note) -> int:
        return item


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_starts_is_replaced(tmp_path: Path) -> None:
    with Pool(EndsItsServer(tmp_path / "two", 2), 1) as pool:
        assert [result for _, result in pool.map(range(3))] == [0, 1, 2]
    with raises("environment.workers-killed"):
        Pool(EndsItsServer(tmp_path / "always", 99), 1)


def test_what_a_stopped_worker_was_at_is_tried_in_another(pool: Pool, tmp_path: Path) -> None:
    assert numbers(pool, [("nap", 1), (tmp_path / "stopped", 2), ("nap", 3)]) == [1, 2, 3]
    assert (tmp_path / "stopped").exists()


def test_a_worker_stuck_in_c_is_ended(pool: Pool) -> None:
    began = time.monotonic()
    results = [result for _, result in pool.map([("nap", 0), ("hang", 1), ("hang", 2), ("nap", 3)])]
    assert [results[1], results[2]] == [Lost(1, "took longer than 0.3 s"), Lost(2, "took longer than 0.3 s")]
    assert [results[0][0], results[3][0]] == [0, 3]
    assert time.monotonic() - began < 300  # it would hang for longer


def test_slowness_that_python_sees_is_no_loss(pool: Pool) -> None:
    with pytest.raises(TooSlow, match=r"took longer than 0\.1 s"):
        list(pool.map([("dawdle", 0)]))


def test_a_lost_item_can_be_answered_with_another(pool: Pool) -> None:
    question = []

    def again(item: Any, lost: Lost) -> Any:
        question.append((item, lost.at))
        return ("die", item[1] + 100) if item[1] < 100 else ("nap", item[1])

    results = list(pool.map([("nap", 0), ("die", 1), ("nap", 2)], again))
    assert [(item, result[0]) for item, result in results] == [(("nap", 0), 0), (("die", 1), 101), (("nap", 2), 2)]
    assert question == [(("die", 1), 1), (("die", 101), 101)]


# ---------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_are_raised_at_their_place(workers: int, pool: Pool) -> None:
    with Pool(do, 0) if workers == 0 else Pool(do, 2) as pool:
        results = pool.map([("nap", 0), ("fail", 1), ("raise", 2)])
        assert next(results)[1][0] == 0
        with pytest.raises(TesseraError) as raised:
            next(results)
        error = raised.value
        told = (error.what, error.where, error.allowed, error.nearest, error.fix)
        assert told == ("broken", "here", ["a"], "b", "mend")
        with pytest.raises(KeyError) as other:
            list(pool.map([("raise", 2), ("nap", 3)]))
        assert other.value.args == (2,)
        assert numbers(pool, [("nap", 5)]) == [5]  # what was under way is forgotten


def test_an_exception_that_cannot_travel_is_told(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="Refusal: 1 2"):
        list(pool.map([("refuse", 0)]))
    results = pool.map(("nap", 1 // (1 - n)) for n in range(3))
    assert next(results)[1][0] == 1
    with pytest.raises(ZeroDivisionError):  # of the items themselves, after those before it
        next(results)


def test_work_that_cannot_travel_is_refused() -> None:
    with raises("data.not-picklable") as raised:
        Pool(lambda item, note: item, 1)
    assert "data.workers=0" in str(raised.value.fix)


def test_ctrl_c_leaves_a_pool_that_works(pool: Pool) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Pool(do, 2, timeout_s=300) as other:
            results = other.map([("nap", 0), ("hang", 1)])
            next(results)
            press = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

            def interrupted() -> None:
                press.start()
                next(results)

            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert numbers(other, [("nap", 7), ("nap", 8)]) == [7, 8]
    finally:
        signal.signal(signal.SIGINT, before)
    assert numbers(pool, [("nap", 1)]) == [1]


# ---------------------------------------------------------------------------------------------- what is left behind


def pools_handles() -> Counter[str]:
    """Return what this process holds open of the kinds that a pool opens: other tests leave files and pipes behind."""
    kinds: Counter[str] = Counter()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            kinds[os.readlink(f"/proc/self/fd/{handle}").split(":")[0]] += 1
    return Counter({kind: kinds[kind] for kind in ("/memfd", "socket", "anon_inode")})


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let only what is given back at once be given back."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_nothing_is_left_behind() -> None:
    def held() -> tuple[Counter[str], set[str]]:
        # The names this process has mapped: the folder itself also holds what other programs come and go with.
        mapped = Path("/proc/self/maps").read_text().splitlines()
        return pools_handles(), {line.split()[5] for line in mapped if "/dev/shm/" in line}

    with Pool(do, 1):
        pass  # the server for the whole program stays
    before = held()
    with Pool(do, 2) as pool:
        items = [("die" if n % 50 == 20 else "tensor", n) for n in range(200)]
        stored = []
        for (what, n), result in pool.map(items):
            if what == "tensor":
                assert result[0].shape == (300, 200)
                assert result[0][7, 7] == n
                result[0][7, 7] = -1  # ours to write to
                stored.append(result[0])
        handles, names = held()
        # One memory and one socket for each of two workers, a pair of sockets to wake the pool, one to the server, and
        # what waits for them all: not one for each tensor, nor for each worker that died.
        assert handles - before[0] <= Counter({"/memfd": 2, "socket": 5, "anon_inode": 1})
        assert names == before[1]  # and nothing that would outlive a killed process
        processes = {result[1] for _, result in pool.map([("nap", n) for n in range(8)])}
    handles, names = held()
    assert handles <= before[0]
    assert names == before[1]
    assert torch.stack(stored).double().sum() == sum(n * (300 * 200 - 1) - 1 for n in range(200) if n % 50 != 20)
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_stuck_workers_end_with_the_pool() -> None:
    pool = Pool(do, 2)
    results = pool.map([("nap", 0), ("hang", 1), ("hang", 2)])
    next(results)
    time.sleep(0.1)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 300  # they would hang for longer
    assert list(results) == []
    pool.close()


def test_another_thread_can_stop_a_map() -> None:
    with Pool(do, 1) as pool:
        results = pool.map([("nap", 0), ("hang", 1)])
        next(results)
        threading.Timer(0.2, pool.stop).start()
        assert list(results) == []


USERS_MODULE = """
    import os, sys
    IMPORTED_BY = os.getpid()

    def look(item, note):
        return IMPORTED_BY == os.getppid(), item in sys.modules
"""


def test_pools_share_the_imports_of_tessera_and_of_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module is imported by the server of its pool, where its threads cannot harm other pools."""
    (tmp_path / "module_of_a_user.py").write_text(textwrap.dedent(USERS_MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    look = importlib.import_module("module_of_a_user").look
    module = "tessera.data.index.measure"
    with Pool(importlib.import_module(module).default_workers, 1):
        pass
    for _ in range(2):
        with Pool(look, 1) as pool:
            assert [result for _, result in pool.map([module])] == [(True, True)]


# ---------------------------------------------------------------------------------------------- whole programs

# No guard: a program like those in a README.
SCRIPT = """
    from tessera.errors import TesseraError
    from tessera.workers.pool import Pool
    from test_data_pool import do
    print("begins")

    def double(item, note):
        return 2 * item

    try:
        Pool(double, 1)
    except TesseraError as error:
        print(error.what)
    results = Pool(do, 2).map([("nap", 0), ("nap", 1), ("hang", 2), ("hang", 3)])
    print(*{next(results)[1][1], next(results)[1][1]}, flush=True)
    next(results)
"""

GUARDED = """
    from tessera.workers.pool import Pool
    print("begins", __name__)

    def double(item, note):
        return 2 * item

    if __name__ == "__main__":
        with Pool(double, 2) as pool:
            print([result for _, result in pool.map([1, 2])])
"""


@pytest.mark.slow
def test_a_script_is_not_run_again_and_leaves_no_orphans(tmp_path: Path) -> None:
    with _start(tmp_path, SCRIPT) as program:
        assert program.stdout is not None
        begins, refused, workers = (program.stdout.readline().strip() for _ in range(3))
        processes = [Path(f"/proc/{process}") for process in workers.split()]
        there = [process.exists() for process in processes]
        program.kill()
        assert program.stdout.read() == ""
    assert begins == "begins"
    assert refused.startswith("double ")
    assert there
    assert all(there)
    until = time.monotonic() + 120
    while any(process.exists() for process in processes):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_what_a_guarded_script_defines_reaches_workers(tmp_path: Path) -> None:
    said = _start(tmp_path, GUARDED).communicate()[0].splitlines()
    assert sorted(said) == ["[2, 4]", "begins __main__", "begins __mp_main__"]  # once, whatever the number of workers


def _start(folder: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(Path(__file__).parent)])}
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, env=env, text=True)


# ---------------------------------------------------------------------------------------------- messages


def test_tensors_and_arrays_arrive_as_they_were() -> None:
    kinds = (torch.bfloat16, torch.float32, torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn)
    values: dict[str, Any] = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    values |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "spread": torch.arange(3).expand(4, 3),
        "large": torch.arange(100_000),
        "array": np.arange(50_000, dtype=np.uint16),
        "none": None,
    }
    values["same"] = values["large"]
    weight = torch.nn.Parameter(torch.ones(3))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (values, {"small": torch.arange(3)}, weight):
            send(ours, message)  # one at a time fits into the socket: what is large lies elsewhere
            message_read = receive(theirs)
            if message is weight:
                assert isinstance(message_read, torch.nn.Parameter)
                assert torch.equal(message_read, weight)
                continue
            assert list(message_read) == list(message)
            assert message_read.get("same") is message_read.get("large")
            for name, value in message.items():
                if isinstance(value, torch.Tensor):
                    assert message_read[name].dtype == value.dtype
                    assert torch.equal(message_read[name].to(torch.complex64), value.to(torch.complex64)), name
                elif isinstance(value, np.ndarray):
                    assert np.array_equal(message_read[name], value)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


# ---------------------------------------------------------------------------------------------- time limit


def test_limits_inside_limits() -> None:
    def inner() -> None:
        with pytest.raises(TooSlow, match=r"0\.1 s"), time_limit(0.1):
            time.sleep(600)
        with time_limit(None):
            time.sleep(600)

    began = time.monotonic()
    with pytest.raises(TooSlow, match=r"0\.3 s"), time_limit(0.3):
        inner()
    assert 0.25 < time.monotonic() - began < 300
    with time_limit(1000):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 700
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_swallowed_limit_comes_again() -> None:
    def eats_the_first() -> None:
        with contextlib.suppress(TooSlow):  # as a library's callback may
            time.sleep(600)
        time.sleep(600)

    with pytest.raises(TooSlow), time_limit(0.05):
        eats_the_first()


def allocate(size: int, note: Note) -> int | str:
    try:
        with memory_limit(64 << 20):
            return len(bytearray(size))
    except MemoryError:
        return "refused"


def test_a_worker_allocates_no_more_than_it_may_and_goes_on() -> None:
    sizes = [1 << 20, 1 << 32, 1 << 20]
    with Pool(allocate, 1) as pool:
        assert [result for _, result in pool.map(sizes)] == [1 << 20, "refused", 1 << 20]
    assert allocate(1 << 28, print) == 1 << 28, "the training process is not limited: its threads allocate, too"
