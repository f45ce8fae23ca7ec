"""Who is blamed for what, and that watching changes nothing in a model, compiled or not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessera.config.run_config import ParallelSection
from tessera.observe.watchdog.diagnosis import (
    AT_WORK,
    COMPILING,
    ON_DEVICE,
    OUTSIDE,
    READING,
    UNEXPLAINED,
    CpuUsage,
    Heartbeat,
    Verdict,
    collective_of,
    diagnose,
    is_compiling,
)
from tessera.observe.watchdog.watchdog import Watchdog
from tessera.runtime.distributed import OutOfStep, is_peer_error, wait_for
from tessera.runtime.process import Process

TIMEOUTS = ParallelSection(silence_s=15, stall_s=60, timeout_s=600)
MODEL = Heartbeat(0, 9, 4, "running the model", "forward of a.1", 0.0, "", "h", UNEXPLAINED)


def blamed(
    beats: list[Heartbeat], silent: dict[int, float] | None = None, busy_silent: tuple[int, ...] = ()
) -> tuple[str, tuple[int, ...]] | None:
    quiet = {beat.rank: 0.0 for beat in beats} | (silent or {})
    verdict = diagnose({beat.rank: beat for beat in beats}, quiet, TIMEOUTS, beats[0], busy_silent)
    return None if verdict is None else (verdict.kind, verdict.ranks)


def ranks(count: int, **changes: Any) -> list[Heartbeat]:
    return [replace(MODEL, rank=rank, **changes) for rank in range(count)]


def test_ranks_that_work_or_wait_together_are_left_alone() -> None:
    assert blamed(ranks(4)) is None
    assert blamed(ranks(4, still_s=500, collective="all_gather")) is None  # a slow link is the timeout's business
    slow = [*ranks(3, still_s=59, collective="all_reduce"), replace(MODEL, rank=3, still_s=59, phase="loading data")]
    assert blamed(slow) is None


def test_silence_is_a_loss() -> None:
    assert blamed(ranks(3), {2: 16.0}) == ("lost", (2,))
    assert blamed(ranks(3), {2: 14.0}) is None


def test_a_silent_rank_that_computes_is_not_lost() -> None:
    assert blamed(ranks(3, still_s=70), {2: 70.0}, busy_silent=(2,)) is None
    assert blamed(ranks(3), {2: 601.0}, busy_silent=(2,)) == ("lost", (2,))


def test_the_one_that_does_not_wait_is_waited_for() -> None:
    beats = [*ranks(3, still_s=61, collective="all_gather"), replace(MODEL, rank=3, still_s=61)]
    assert blamed(beats) == ("stalled", (3,))


@pytest.mark.parametrize("activity", sorted(AT_WORK))
def test_a_rank_at_work_is_waited_for(activity: str) -> None:
    """Also by a rank of which nothing can be seen, and longer than a sample or a stall may take."""
    busy = replace(MODEL, rank=3, still_s=599, activity=activity)
    beats = [*ranks(2, still_s=599, collective="all_gather"), replace(MODEL, rank=2, still_s=599), busy]
    assert blamed(beats) is None
    assert blamed([*ranks(2, still_s=599, phase="updating weights"), busy]) is None


def test_past_the_limit_of_collectives_the_slow_rank_is_named_unless_it_compiles() -> None:
    waiting = ranks(2, still_s=601, collective="all_gather")
    assert blamed([*waiting, replace(MODEL, rank=2, still_s=601, activity=READING)]) == ("stalled", (2,))
    assert blamed([*waiting, replace(MODEL, rank=2, still_s=601, activity=COMPILING)]) is None
    assert blamed(ranks(3, still_s=5000, activity=READING)) is None  # all read, none waits


def test_stages_of_a_pipeline_may_wait_for_their_devices() -> None:
    """At different modules, each host for as long as a step takes."""
    stages = [
        replace(MODEL, rank=rank, module=f"forward of a.{rank}", still_s=599, activity=ON_DEVICE) for rank in (0, 1)
    ]
    assert blamed(stages) is None
    asleep = replace(stages[1], activity=UNEXPLAINED)
    assert blamed([stages[0], asleep]) == ("stalled", (1,))


def test_without_a_visible_wait_the_one_behind_is_blamed() -> None:
    beats = [*ranks(2, still_s=61, phase="agreeing to go on", step=5), replace(MODEL, rank=2, still_s=61)]
    assert blamed(beats) == ("stalled", (2,))


def test_saving_and_first_steps_may_take_their_time() -> None:
    waiting = ranks(2, still_s=599, collective="barrier", phase="saving", activity=OUTSIDE)
    assert blamed([waiting[0], replace(waiting[1], collective="")]) is None
    first = ranks(2, still_s=599, collective="all_reduce", activity=OUTSIDE)
    assert blamed([first[0], replace(first[1], collective="", phase="loading data")]) is None
    late = [replace(beat, still_s=601) for beat in first]
    assert blamed([late[0], replace(late[1], collective="")]) == ("stalled", (1,))


def test_waiting_in_different_places_is_a_disagreement() -> None:
    beats = ranks(4, still_s=21, collective="all_gather")
    beats[2] = replace(beats[2], phase="clipping gradients", collective="all_reduce")
    assert blamed(beats) == ("disagree", (2,))
    assert blamed([replace(beat, still_s=19) for beat in beats]) is None


def test_the_minority_is_out_of_step() -> None:
    assert OutOfStep([4, 4, 5, 4]).ranks == [2]
    assert OutOfStep([5, 4]).ranks == [1]
    assert OutOfStep([5, 4, 4]).ranks == [0]
    assert OutOfStep([5, 4]).exit_code == 3


def test_words_go_through_the_store_unchanged() -> None:
    assert Heartbeat.load(MODEL.dump()) == MODEL
    verdict = Verdict("lost", (1, 2), "rank 1 …")
    assert Verdict.load(verdict.dump()) == verdict


def test_a_broken_collective_is_told_from_an_error_of_ones_own() -> None:
    assert is_peer_error(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
    assert not is_peer_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_error(ValueError("closed by peer"))


def test_effort_is_told_of_a_process_and_judged_over_a_window() -> None:
    before = Process.this().effort_s()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert Process.this().effort_s() - before >= 0.1
    naps = []
    for _ in range(10):  # on a crowded machine one may end with waiting for a core, which is effort
        before = Process.this().effort_s()
        time.sleep(0.1)
        naps.append(Process.this().effort_s() - before)
    assert min(naps) < 0.05
    share = CpuUsage(10)
    for second in range(5):
        share.note(second, 0.0)
    assert share.busy  # too early to say
    for second in range(5, 30):
        share.note(second, 0.02 * second)
    assert not share.busy
    for second in range(30, 36):
        share.note(second, 0.6 + 0.5 * (second - 30))
    assert share.busy


def test_compiling_is_seen_from_another_thread_and_only_while_it_lasts() -> None:
    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(is_compiling).result())

        def run(*values: Any) -> Any:
            seen.append(is_compiling())
            return graph.forward(*values)

        return run

    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(2))
    assert seen == [True, False]


class _Work:
    """As C++ gives it: waiting leaves no frame of Python on the stack."""

    def __init__(self, lock: Any) -> None:
        self.wait = lock.acquire


def _placed(file: str, line: str) -> Any:
    """A function that waits, as if it stood in a file of torch."""
    names: dict[str, Any] = {}
    exec(compile(f"def inside(lock, call=None): {line}", f"/site-packages/{file}", "exec"), names)
    return names["inside"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_placed("torch/distributed/distributed_c10d.py", "lock.acquire()"), "inside"),
        (_placed("torch/distributed/pipelining/schedules.py", "lock.acquire()"), "inside"),
        (lambda lock: wait_for([_Work(lock)]), "wait_for"),
        (_placed("torch/distributed/pipelining/stage.py", "lock.acquire()"), ""),  # a stage computes
        (_placed("torch/distributed/tensor/_dispatch.py", "lock.acquire()"), ""),  # a product of sharded tensors
        (_placed("model.py", "lock.acquire()"), ""),
    ],
    ids=["collective", "schedule", "ours", "stage", "sharded tensor", "model"],
)
def test_a_thread_that_waits_for_others_is_told_from_one_that_computes(call: Any, expected: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=call, args=(lock,), daemon=True)
    thread.start()
    collective = ""
    for _ in range(10_000):  # until it has come that far
        collective = collective_of(thread.ident or 0)
        if collective or not expected:
            break
        time.sleep(0.01)
    lock.release()
    thread.join()
    assert collective == expected


def test_what_a_module_computes_below_torch_distributed_is_no_waiting() -> None:
    """A shallow model inside of a stage of a pipeline: the caller's frame is near, and says nothing."""
    seen: list[str] = []
    me = threading.get_ident()
    schedule = _placed("torch/distributed/pipelining/schedules.py", "call()")
    schedule(None, lambda: seen.append(collective_of(me)))
    assert seen == [""]


def test_a_process_is_known_by_more_than_its_number() -> None:
    this = Process.this()
    assert this.visible()
    assert this.alive()
    assert not replace(this, started="1").alive()
    assert not replace(this, realm="elsewhere").visible()
    replace(this, started="1").kill()  # another process of that number would not be hit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.mark.parametrize("compiled", [False, True])
def test_following_a_block_changes_no_number_and_recompiles_nothing(compiled: bool) -> None:
    torch.manual_seed(0)
    plain, watched = Net(), Net()
    watched.load_state_dict(plain.state_dict())
    watch = Watchdog(["blocks.0", "blocks.1"], ParallelSection())
    for path in watch.blocks:
        watch._follow(path, watched.get_submodule(path))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if compiled:
        for block in watched.blocks:
            block.compile(backend=backend)
    seen = []
    for _ in range(4):
        x = torch.randn(3, 4)
        out = watched(x)
        seen.append(watch.module)
        out.sum().backward()
        seen.append(watch.module)
        plain(x).sum().backward()
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert seen[::2] == ["forward of blocks.1"] * 4
    if compiled:
        assert len(graphs) <= 2
    else:
        assert seen[1::2] == ["backward of blocks.0"] * 4
