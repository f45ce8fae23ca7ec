"""Ranks: joining a world, leaving it, and the few small exchanges that need no mesh."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tessera.core import device as devices
from tessera.core.errors import TesseraError


@dataclass(frozen=True)
class World:
    """Who this process is. Handed around explicitly; nothing reads it from thin air."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def environment_ranks(env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) when started plainly."""
    try:
        return int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0))
    except ValueError:
        raise TesseraError("RANK, WORLD_SIZE and LOCAL_RANK must be numbers", where="environment") from None


@contextlib.contextmanager
def world(device: str = "auto", timeout_s: float = 600) -> Iterator[World]:
    """Joins the world that the environment describes; leaves it at the end, whatever happened.

    A single process gets a group of one as well, over an in-process store: no port, and one path for one or many ranks.
    A group that the caller has set up already (tests, a user's own program) is used and left alone.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        yield World(rank, size, 0 if device == "cpu" else environment_ranks()[2], devices.resolve(device, 0))
        return
    rank, size, local = environment_ranks()
    here = devices.resolve(device, local)
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = devices.backend(here, with_host=True)
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        _join(backend, rank, size, timeout)
    try:
        yield World(rank, size, local, here)
    finally:
        dist.destroy_process_group()


def _join(backend: str, rank: int, size: int, timeout: datetime.timedelta) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise TesseraError(
            f"WORLD_SIZE is {size} but MASTER_ADDR and MASTER_PORT are not set",
            where="environment",
            fix="start with `tessera train --nproc N recipe.yaml` or with torchrun",
        )
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TesseraError(
            f"rank {rank} of {size} could not join the others at {address}:{port}: {str(error).splitlines()[0]}",
            fix="check that the address is reachable, the port is free, and every rank was started",
        ) from None


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[World]:
    """A world of any size in one process: collectives return at once and move nothing. For plans and dry runs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
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
    """In place; a no-op without a group."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is true on one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    vote = torch.tensor(float(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
