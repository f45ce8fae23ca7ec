"""Several ranks on one machine, in plain pytest: `run_ranks(fn, world, *args)`.

`fn(rank, world, *args)` runs in each of `world` new processes that have joined a gloo group through a file. The results
come back in order of rank; the first error of a rank is raised here, with its own traceback.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """What went wrong on which rank."""


def fork_context() -> Any:
    """A fork server imports what ranks need once, outside of the test process with its threads, and forks cheaply."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.preload"])
    return context


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`fn` is a module's function; it returns plain data, no tensors (their memory would die with the process)."""
    context = fork_context()
    reports: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank_main, args=(fn, rank, world, store, timeout, reports, args), daemon=False)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, reports, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(10)


def _rank_main(
    fn: Callable[..., Any], rank: int, world: int, store: str, timeout: float, reports: Any, args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    joined = False
    try:
        patience = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patience)
        joined = True
        reports.put((rank, None, fn(rank, world, *args)))
    except BaseException:
        reports.put((rank, (time.monotonic(), traceback.format_exc()), None))
    finally:
        if joined:
            dist.destroy_process_group()


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
