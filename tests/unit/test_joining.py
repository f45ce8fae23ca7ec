"""Joining a world leaves nothing behind in the process, and its meeting point is no wider than the machine."""

from __future__ import annotations

import datetime
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

from tessera.cli import launch as launching
from tessera.cli.cluster import Cluster
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.distributed import free_port, is_peer_error, rank_on_machine, world
from tessera.runtime.rendezvous import RankInfo, check_ranks, open_store, rank_info, report_refusal
from tests.errors import raises


def listens_at(port: int) -> set[str]:
    """Addresses, as the kernel spells them, at which something listens on a port."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                addresses.add(address)
    return addresses


LOOPBACK = "0100007F" if sys.byteorder == "little" else "7F000001"


def test_the_main_rank_serves_one_machine_on_loopback_alone() -> None:
    port = free_port()
    store = open_store(0, 2, 5, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    assert listens_at(port) == {LOOPBACK}
    other = open_store(1, 2, 5, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    other.set("word", "heard")
    assert store.get("word") == b"heard"


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_refuses_to_start_is_quoted_by_the_others(refusing: int) -> None:
    """At once, and not as a missing rank at the end of the time to join."""
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    error = TesseraError("unknown key: optim.weight_deccay", where="recipe.yaml")
    waits = 1 - refusing

    def join() -> list[RankInfo]:
        return check_ranks(open_store(waits, 2, 600, env), rank_info(waits, 2, waits), 600)

    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        joined = pool.submit(join)
        report_refusal(error, {**env, "RANK": str(refusing)})
        with raises("environment.ranks-differ", str(refusing)) as caught:
            joined.result()
    assert "recipe.yaml" in caught.value.what
    assert time.monotonic() - began < 300


def test_a_rank_that_has_come_and_one_that_is_alone_tell_nothing() -> None:
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    store = open_store(0, 2, 120, env)
    store.set("infos/1", "here")
    report_refusal(TesseraError("later"), {**env, "RANK": "1"})
    assert not store.check(["refused"])
    report_refusal(TesseraError("alone"), {})


def test_the_launcher_serves_one_machine_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def elastic_launch(settings: Any, program: str) -> Any:
        def start(*words: str) -> None:
            # What torch's launcher does first: it opens the store at the endpoint that it was given.
            parameters = RendezvousParameters(
                settings.rdzv_backend, settings.rdzv_endpoint, settings.run_id, 1, 1, **settings.rdzv_configs
            )
            info = create_rdzv_handler(parameters).next_rendezvous()
            info.store.set("word", "heard")
            seen.append(listens_at(int(settings.rdzv_endpoint.rpartition(":")[2])))

        return start

    monkeypatch.setattr(launching, "elastic_launch", elastic_launch)
    monkeypatch.setattr(launching, "build_meta_model", lambda config, ranks: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config: Any = SimpleNamespace(folder=Path("nowhere"), parallel=SimpleNamespace(join_timeout_s=120.0))
    launching.launch(["train"], Cluster(nproc=2), config)
    assert seen == [{LOOPBACK}]


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:14404",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation",
        "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error",
        "NCCL communicator was aborted on rank 1.",
        "Process group watchdog thread terminated with exception: collective operation timeout",
    ],
)
def test_words_of_a_lost_partner_are_known(text: str) -> None:
    assert is_peer_error(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "my loader read the word gloo in a caption",
        "backend gloo does not support bfloat16 here",
        "no process group was given to MyModule",
        "could not open nccl.txt",
    ],
)
def test_errors_of_ones_own_may_name_a_backend(text: str) -> None:
    assert not is_peer_error(RuntimeError(text))


def test_in_a_group_of_the_callers_a_rank_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two machines, looked at one by one through one store."""
    store = HashStore()
    machines = ["a", "a", "b", "b"]
    taken = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr("tessera.runtime.distributed.default_store", lambda: store)
    monkeypatch.setattr(devices, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    for rank, machine in enumerate(machines):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        with world("auto") as joined:
            taken.append((joined.local_rank, joined.device.index))
    assert taken == [(0, 0), (1, 1), (0, 0), (1, 1)]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_on_machine() == 1
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # each process was shown its own
    with world("auto") as joined:
        assert joined.device.index == 0


def test_loading_over_ranks_takes_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera.inference.load import _own_device

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(devices, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    assert _own_device("auto", with_others=True).index == 1
    assert _own_device("auto", with_others=False).index == 1


def test_a_store_that_is_closed_frees_its_port() -> None:
    port = free_port()
    for _ in range(2):
        store = open_store(0, 2, 5, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        store.set_timeout(datetime.timedelta(seconds=1))
        del store
    assert listens_at(port) == set()
