"""Several ranks on one machine, in plain pytest: `run_ranks(fn, world, *args)`.

`fn(rank, world, *args)` runs in each of `world` processes that have joined a gloo group through a file. The results
come back in order of rank; the first error of a rank is raised here, with its own traceback.

The processes of a world size serve all calls of a test session: starting a rank and filling the caches of torch takes
longer than most of what tests ask for. After each call a rank restores the state of its process. Ranks in which
something failed are ended at once. Between two files, `check_ranks` ends those that no longer answer each other.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import queue
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

GROUP_TIMEOUT = datetime.timedelta(minutes=10)  # `run_ranks` ends ranks that take longer than its caller allows
SHARED_WORLDS = (1, 2, 4)  # most files need these
MOST_DESCRIPTORS = 500  # of a process that many files have used: each mesh adds groups, and groups have sockets


class RankError(AssertionError):
    """What went wrong on which rank."""


def fork_context() -> Any:
    """A fork server imports what ranks need once, outside of the test process with its threads, and forks cheaply."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.preload"])
    return context


class Ranks:
    """Processes that have joined one group and call what they are sent, until they are ended."""

    def __init__(self, world: int) -> None:
        context = fork_context()
        self.reports: Any = context.Queue()
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        pipes = [context.Pipe() for _ in range(world)]
        self.calls = [ours for ours, _ in pipes]
        self.processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(rank, world, store, theirs, self.reports), daemon=False)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, leave: bool) -> list[Any]:
        for connection in self.calls:
            connection.send(sys.path)  # test files that were imported since the ranks began may have added to it
            connection.send((fn, args, leave))
        return _collect(self.processes, self.reports, time.monotonic() + timeout)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for connection in self.calls:
            connection.close()
        self.folder.cleanup()


_ranks: dict[int, Ranks] = {}


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, leave: bool = False) -> list[Any]:
    """`fn` is a module's function; it returns plain data, no tensors (their memory would die with the process).

    `leave`: each rank ends when it has returned, so that others which wait for it notice.
    """
    ranks = _ranks.pop(world, None) or Ranks(world)
    try:
        results = ranks.call(fn, args, timeout, leave)
    except BaseException:
        ranks.end()
        raise
    if leave:
        ranks.end()
    else:
        _ranks[world] = ranks
    return results


def end_ranks(world: int | None = None) -> None:
    """End the processes of a world size, or all, so that the next call runs in new ones."""
    for each in list(_ranks) if world is None else [world]:
        if each in _ranks:
            _ranks.pop(each).end()


def check_ranks() -> None:
    """End the processes that the next test file should not use: of rare world sizes, worn, or out of step.

    A test may have left one rank a collective ahead of the others. Ranks that cannot agree are ended, and so are those
    of a machine so crowded that they do not answer in time: the next file then starts new ones.
    """
    token = time.monotonic_ns()
    for world in list(_ranks):
        with contextlib.suppress(RankError):
            if world in SHARED_WORLDS and all(run_ranks(_fit_for_more, world, token, timeout=20.0)):
                continue
        end_ranks(world)


def _fit_for_more(rank: int, world: int, token: int) -> bool:
    tokens: list[Any] = [None] * world
    dist.all_gather_object(tokens, token)
    return tokens == [token] * world and len(os.listdir("/dev/fd")) < MOST_DESCRIPTORS


atexit.register(end_ranks)  # before multiprocessing would wait for them


class SharedLoop(ProcessGroupGloo):
    """A gloo group that shares one thread for its sockets with all other groups of the process.

    Otherwise each group has its own, which wakes up a hundred times a second: the hundreds of groups of ranks that have
    served many tests took a fifth of each core.
    """

    _devices: ClassVar[list[Any]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options = ProcessGroupGloo._Options()
        if not self._devices:
            self._devices.append(ProcessGroupGloo.create_default_device())
        options._devices, options._timeout, options._threads = self._devices, timeout, 2
        super().__init__(store, rank, size, options)


def _rank_main(rank: int, world: int, store: str, calls: Any, reports: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = SharedLoop  # type: ignore[misc]
    init = f"file://{store}"
    try:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    except BaseException:
        reports.put((rank, (time.monotonic(), traceback.format_exc()), None))
        return
    state = ProcessState()
    with contextlib.suppress(EOFError):  # whoever called is gone
        while True:
            sys.path[:] = calls.recv()
            fn, args, leave = calls.recv()
            try:
                result, failure = fn(rank, world, *args), None
            except BaseException:
                result, failure = None, (time.monotonic(), traceback.format_exc())
            reports.put((rank, failure, result))
            if leave:
                dist.destroy_process_group()
                return
            state.restore()


class ProcessState:
    """What a call may change in its process. Every call begins where the first one did."""

    def __init__(self) -> None:
        self.environment, self.folder = dict(os.environ), Path.cwd()
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.streams = sys.stdout, sys.stderr
        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_rng_state(self.random[0])
        random.setstate(self.random[1])
        np.random.set_state(self.random[2])
        sys.stdout, sys.stderr = self.streams
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        # A product in bf16 switches oneDNN off where the CPU has none: all fp32 products then add in another order.
        torch.backends.mkldnn.set_flags(True)


def _collect(processes: list[BaseProcess], reports: Any, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    silent = 0
    while len(results) < len(processes):
        try:
            rank, failure, result = reports.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if p.exitcode is not None and r not in results]
            silent = silent + 1 if dead or failures else 0
            if silent > 4:  # time for a last word to arrive
                _raise_first(failures)
                message = f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode} and said nothing"
                raise RankError(message) from None
            if time.monotonic() > deadline:
                waiting = sorted(set(range(len(processes))) - set(results))
                raise RankError(f"ranks {waiting} did not finish in time") from None
            continue
        if failure is None:
            results[rank] = result
        else:
            failures.append((failure[0], rank, failure[1]))
            if len(failures) == len(processes):
                break
    _raise_first(failures)
    return [results[rank] for rank in range(len(processes))]


def _raise_first(failures: list[tuple[float, int, str]]) -> None:
    """The earliest is the cause; the others mostly lost their partner."""
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} failed:\n{text}") from None
