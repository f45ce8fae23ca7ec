"""Join and leave the process group of a run, and exchange small values between ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.launcher import watch_launcher
from tessera.runtime.rendezvous import JOIN_TIMEOUT_S, check_ranks, open_store, rank_info
from tessera.runtime.torch_internals import default_store, fake_store

# If a peer or a connection is lost, errors of torch's backends contain a location in the backend's source, or one of
# these phrases. The name of a backend alone is not enough, because other errors contain it, too.
_BACKENDS = "|".join(devices.COLLECTIVE_BACKENDS)
_PEER_WORDS = re.compile(
    rf"\b({_BACKENDS})/[\w./-]+\.(cc|cpp|h):\d+|\b({_BACKENDS}) (error|communicator was aborted|connect\w* failed)"
    r"|\b(closed|reset) by peer\b|\bbroken pipe\b|\bprocess ?group\S* .*\b(abort\w*|timed out|timeout|watchdog)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class World:
    """Hold the rank, the number of ranks, the local rank and the device of this process."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def environment_ranks(env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as torchrun sets them; (0, 1, 0) without a launcher."""
    try:
        return int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0))
    except ValueError:
        raise TesseraError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be integers", where="environment", code="environment.rank-variables"
        ) from None


def expected_rank() -> int:
    """Return the rank of this process, also before it has joined the process group."""
    return dist.get_rank() if dist.is_initialized() else environment_ranks()[0]


def expected_world_size() -> int:
    """Return the number of ranks, also before this process has joined the process group."""
    return dist.get_world_size() if dist.is_initialized() else environment_ranks()[1]


@contextlib.contextmanager
def world(
    device: str = "auto",
    timeout_s: float = 600,
    *,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    config: str = "",
    folder: Path | None = None,
) -> Iterator[World]:
    """Join the process group that the environment variables describe, and leave it after the `with` block.

    A single process has a group of one rank, without a port. An existing process group is used and not destroyed. Raise
    an error that lists the ranks that do not join within `join_timeout_s`, have another `config` or cannot write into
    `folder`.
    """
    watch_launcher()
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        local = 0 if device == "cpu" else rank_on_machine()
        yield World(rank, size, local, devices.resolve_shared(device, local))
        return
    rank, size, local = environment_ranks()
    here = devices.resolve(device, local)
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = devices.backend(here, with_host=True)
    if size == 1:
        store: Store = HashStore()
    else:
        store = open_store(rank, size, join_timeout_s)
        check_ranks(store, rank_info(rank, size, local, config), join_timeout_s, folder)
        store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield World(rank, size, local, here)
    finally:
        dist.destroy_process_group()


def rank_on_machine() -> int:
    """Return the local rank: LOCAL_RANK, or if it is not set, computed from the host names that all ranks exchange."""
    if "LOCAL_RANK" in os.environ:
        return environment_ranks()[2]
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return 0
    # Exchange host names through the store: collectives of an accelerator need a device, which is not chosen yet.
    store = PrefixStore("machines", default_store())
    store.set(str(rank), socket.gethostname())
    return sum(store.get(str(other)).decode() == socket.gethostname() for other in range(rank))


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """Simulate a process group of any size in one process: collectives return at once and copy nothing."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        yield World(rank, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum a tensor over ranks in place and return it; without a process group, return it unchanged."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def gather_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Gather a tensor [n] of each rank into [ranks, n] on every rank.

    It is an all-reduce of a table with a row per rank. If another rank calls a collective of another size, gloo raises
    an error in an all-reduce, but kills the process in an all-gather.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values[None]
    table = values.new_zeros(dist.get_world_size(), *values.shape)
    table[dist.get_rank()] = values
    dist.all_reduce(table)
    return table


def agree_on_step(step: int, count: int, *flags: bool) -> tuple[bool, list[bool]]:
    """Return whether `count` is equal on all ranks, and for each flag whether it is true on any rank.

    Raise `OutOfStep` if ranks are at different steps: otherwise later collectives would add up values of different
    steps without an error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True, list(flags)
    vote = torch.tensor([step, -step, count, -count, *map(float, flags)], dtype=torch.float64)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    highest, lowest, most, least, *raised = vote.tolist()
    if highest != -lowest:
        raise OutOfStep(gather_over_ranks(torch.tensor([step]))[:, 0].tolist())
    return most == -least, [bool(flag) for flag in raised]


class RankFailure(TesseraError):
    """Report a failure of another rank, or of the communication between ranks."""

    exit_code = 3


class OutOfStep(RankFailure):
    """Report ranks that are at different steps. `ranks`: those that differ from the majority."""

    def __init__(self, steps: Sequence[int]) -> None:
        # If two steps are equally frequent, the step of rank 0 counts as the common one.
        common = max(dict.fromkeys(steps), key=lambda s: (steps.count(s), s == steps[0]))
        self.ranks = [rank for rank, step in enumerate(steps) if step != common]
        steps_by_rank = ", ".join(f"rank {rank} is at step {steps[rank]}" for rank in self.ranks[:8])
        super().__init__(
            f"{steps_by_rank}, the others are at step {common}: the ranks are out of step",
            fix="a callback or loader that ends or skips a step must do so on every rank; then `tessera resume`",
            code="run.out-of-step",
        )


def is_peer_error(error: BaseException) -> bool:
    """Return whether an error of a collective was caused by another rank that ended or lost its connection."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_WORDS.search(str(error)))


@contextlib.contextmanager
def main_rank_first(world: World) -> Iterator[None]:
    """Run the `with` block on rank 0 first, then on the other ranks.

    The other ranks poll the store until rank 0 is done, which may take longer than the timeout of a barrier.
    """
    if world.size == 1:
        yield
        return
    store = PrefixStore("main-rank-first", default_store())
    done = f"done/{store.add(f'turns/{world.rank}', 1)}"  # number of the call: each rank counts its own calls
    if world.is_main:
        try:
            yield
        except BaseException:
            store.set(done, "failed")
            raise
        store.set(done, "done")
        return
    while not store.check([done]):
        time.sleep(0.05)
    if store.get(done) != b"done":
        raise RankFailure("rank 0 failed", fix="read the error of rank 0", code="run.main-rank-failed")
    yield


def wait_for_all_ranks(world: World) -> None:
    """Wait until every rank has called this function, by polling the store: a barrier could time out."""
    if world.size == 1:
        return
    store = PrefixStore("wait-for-all-ranks", default_store())
    turn = store.add(f"turns/{world.rank}", 1)  # index of this call, equal on all ranks
    store.set(f"{turn}/{world.rank}", "here")
    while not store.check([f"{turn}/{rank}" for rank in range(world.size)]):
        time.sleep(0.05)


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait for started collectives. If this function is on a rank's stack, the watchdog knows that the rank waits."""
    for work in works:
        if work is not None:
            work.wait()


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
