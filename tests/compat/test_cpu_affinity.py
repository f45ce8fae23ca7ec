"""CPU cores for ranks: the grammar of CPU_AFFINITY_CONF, cores and NUMA nodes of imitated machines, real threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera_compat import affinity
from tessera_compat.affinity import ThreadBinder, Topology, format_cores, parse_cores, read_topology
from tessera_compat.cpu_affinity import AffinityConf, KeepThreadsBound, bind_rank, cores_of_rank, parse_affinity
from tests.dist.spawn import fork_context
from tests.errors import raises


def machine(cores: int, nodes: int = 1, allowed: range | None = None) -> Topology:
    each = cores // nodes
    every = frozenset(range(cores))
    split = {node: frozenset(range(node * each, (node + 1) * each)) for node in range(nodes)}
    return Topology(every, every if allowed is None else frozenset(allowed), split)


def cores(text: str, device: int, topology: Topology, devices: int = 8) -> str:
    return format_cores(cores_of_rank(parse_affinity(text), device, [None] * devices, topology).cores)


@pytest.fixture
def masks() -> Iterator[None]:
    """Give every thread of this process back the cores that it had."""
    before = os.sched_getaffinity(0)
    yield
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), before)
        except ProcessLookupError:
            continue


# ---------------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AffinityConf()),
        ("0", AffinityConf()),
        ("1", AffinityConf(1)),
        ("mode:2", AffinityConf(2)),
        ("1,npu0:0-2", AffinityConf(1, {0: frozenset({0, 1, 2})})),
        ("npu0:0-0,1", AffinityConf(1, {0: frozenset({0})})),
        ("1,npu1:4,npu1:6-7", AffinityConf(1, {1: frozenset({4, 6, 7})})),
        ("2,gpu0:3,device1:5", AffinityConf(2, {0: frozenset({3}), 1: frozenset({5})})),
        ("1,force:1,npu_affine:1", AffinityConf(1, force=True, npu_affine=True)),
        ("1,lazy_bind:0,bind_irq:1", AffinityConf(1, lazy_bind=False)),
    ],
)
def test_values_that_can_be_meant(text: str, expected: AffinityConf) -> None:
    assert parse_affinity(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("3", "environment.affinity-invalid"),
        ("1,2", "environment.affinity-invalid"),
        ("1,npu0:5-2", "environment.affinity-invalid npu0:2-5"),
        ("1,npu0:a-b", "environment.affinity-invalid"),
        ("1, npu0:0-2", "environment.affinity-invalid"),
        ("1,lazy_bnd:0", "environment.affinity-invalid lazy_bind"),
        ("1,force:2", "environment.affinity-invalid"),
        ("npu0:0-2", "environment.affinity-without-mode CPU_AFFINITY_CONF=1,npu0:0-2"),
        ("9" * 5000, "environment.affinity-invalid"),
        ("npu" + "9" * 5000 + ":1", "environment.affinity-invalid"),
        ("1,,2", "environment.affinity-invalid"),
        ("on", "environment.affinity-invalid"),
        ("1,npu0:99999999999", "environment.affinity-invalid"),
    ],
)
def test_values_that_cannot_be_meant_are_errors(text: str, error: str) -> None:
    with raises(error):
        parse_affinity(text)


# ---------------------------------------------------------------------------------------------- machines


def test_cores_of_a_server_are_split_as_documented() -> None:
    server = machine(160)
    assert [cores("1", device, server) for device in (0, 1, 7)] == ["0-19", "20-39", "140-159"]
    assert cores("1", 7, machine(163)) == "140-159"  # what is left over stays unused
    assert [cores("1", device, machine(2), 4) for device in range(4)] == ["0", "0", "1", "1"]


def test_a_partial_list_leaves_other_devices_alone() -> None:
    assert [cores("1,npu0:0-0", device, machine(8), 2) for device in (0, 1)] == ["0", "4-7"]


def test_numa_nodes_are_split_among_their_devices() -> None:
    server = machine(16, nodes=4)
    conf = parse_affinity("1,npu_affine:1")
    nodes = [3, 3, 0, 0]
    by_device = [format_cores(cores_of_rank(conf, device, nodes, server).cores) for device in range(4)]
    assert by_device == ["12-13", "14-15", "0-1", "2-3"]
    spread = [format_cores(cores_of_rank(conf, device, [None] * 8, server).cores) for device in (0, 1, 7)]
    assert spread == ["0-1", "2-3", "14-15"]
    assert cores("1,npu_affine:1", 0, machine(16, 4, range(8, 16)), 4) == "8-9"  # its node may not be used


def test_overlaps_are_named_and_foreign_cores_leave_all_unbound() -> None:
    shared = cores_of_rank(parse_affinity("1,npu0:0-4,npu1:4-7"), 0, [None] * 2, machine(8))
    assert shared.warnings == ("CPU_AFFINITY_CONF: devices 0 and 1 share the cores 4",)
    small = machine(8, allowed=range(4))
    unbound = cores_of_rank(parse_affinity("1,npu1:6-7"), 0, [None] * 2, small)
    assert not unbound.cores
    assert "not allowed to use the cores 6-7; force:1" in unbound.warnings[0]
    assert cores("1,npu1:6-7,force:1", 1, small, 2) == "6-7"
    assert cores("1", 1, small, 2) == "2-3"  # what is not named is taken from the cores that may be used


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1,npu4:0-1", "environment.affinity-unknown-device"),
        ("1,npu0:6-9", "environment.affinity-unknown-core 8-9"),
    ],
)
def test_what_the_machine_does_not_have_is_an_error(text: str, error: str) -> None:
    with raises(error):
        cores_of_rank(parse_affinity(text), 0, [None] * 2, machine(8))


def test_a_machine_is_read_from_its_files(tmp_path: Path) -> None:
    for name, text in {
        "devices/system/cpu/online": "0-3,6-7\n",
        "devices/system/node/node0/cpulist": "0-3\n",
        "devices/system/node/node1/cpulist": "6-7\n",
        "devices/system/node/node2/cpulist": "\n",  # memory alone
        "bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:5e:00.0/numa_node": "-1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    topology = read_topology(tmp_path, allowed=[0, 1])
    assert topology == Topology(
        parse_cores("0-3,6-7"), frozenset({0, 1}), {0: parse_cores("0-3"), 1: parse_cores("6-7")}
    )
    addresses = ["0000:3B:00.0", "0000:5e:00.0", "0000:ff:00.0", None]
    assert [affinity.numa_node(address, tmp_path) for address in addresses] == [1, None, None, None]


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.allowed <= topology.online
    assert topology.allowed & frozenset().union(*topology.nodes.values())


# ---------------------------------------------------------------------------------------------- threads


def test_fine_binding_gives_important_threads_a_core_each() -> None:
    binder = ThreadBinder(range(8), fine=True)
    named = {name: binder.cores_of(name, False) for name in ("pt_autograd_0", "pt_nccl_watchdg", "python", "")}
    assert binder.cores_of("python", True) == (0,)
    assert named == {"pt_autograd_0": (1,), "pt_nccl_watchdg": (2,), "python": (3, 4, 5, 6, 7), "": (3, 4, 5, 6, 7)}
    assert not ThreadBinder(range(4), fine=True).fine


def test_threads_are_bound_also_those_that_begin_later(masks: None) -> None:
    core = min(os.sched_getaffinity(0))
    go_on = threading.Event()
    earlier = threading.Thread(target=go_on.wait)
    earlier.start()
    try:
        binder = ThreadBinder([core])
        binder.bind()
        assert earlier.native_id is not None
        assert [os.sched_getaffinity(thread) for thread in (0, earlier.native_id)] == [{core}, {core}]
        with raises("device.cores-not-allowed", "4000"):
            ThreadBinder([4000]).bind()
    finally:
        go_on.set()
        earlier.join()


def test_binding_waits_for_the_first_step_unless_told_otherwise(masks: None) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    (callback,) = bind_rank(parse_affinity(f"1,npu0:{core}"), 0, [None])
    assert isinstance(callback, KeepThreadsBound)
    assert os.sched_getaffinity(0) == before
    assert callback.children == before
    callback.on_step_end(None, None)  # type: ignore[arg-type]
    assert os.sched_getaffinity(0) == {core}
    os.sched_setaffinity(0, before)
    (eager,) = bind_rank(parse_affinity(f"1,npu0:{core},lazy_bind:0"), 0, [None])
    assert isinstance(eager, KeepThreadsBound)
    assert os.sched_getaffinity(0) == eager.children == {core}
    assert bind_rank(AffinityConf(), 0, [None]) == []


def bind_and_look_at_a_child(before: set[int]) -> None:
    """In a process of its own: hooks of forks stay for the life of a process."""
    affinity.bind_children(before)
    os.sched_setaffinity(0, {min(before)})
    worker = os.fork()
    if worker == 0:
        os._exit(0 if os.sched_getaffinity(0) == before else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))


def test_children_of_a_bound_process_get_cores_of_their_own() -> None:
    child = fork_context().Process(target=bind_and_look_at_a_child, args=(os.sched_getaffinity(0),))
    child.start()
    child.join()
    assert child.exitcode == 0
