"""The loader: any number of ranks, micro-batches and workers sees the same rows at the same step."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import pytest
import torch
from data_cases import LetterProcessor, pictures, seen, texts, write_jsonl

import tessera
from tessera.config.run_config import DataSection
from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader, RowReader, Tuner, workers_per_rank
from tessera.errors import TesseraError
from tests.errors import raises


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    path = texts(tmp_path_factory.mktemp("data"), 50)
    section = DataSection.model_validate({"train": [{"path": path}], "length": 64})
    return KINDS.get("chat")(RowRequest(section, "train", LetterProcessor(), 7))


def take(
    source: RowSource, steps: int, *, ranks: int, micro: int, workers: int = 0, start_row: int = 0
) -> list[list[Batch]]:
    """For each step, all ranks' micro-batches in the order of their rows."""
    dealt = []
    for rank in range(ranks):
        with Loader(
            source, global_batch=8, micro_batch=micro, rank=rank, ranks=ranks, workers=workers, start_row=start_row
        ) as loader:
            dealt.append([next(loader) for _ in range(steps)])
    return [
        [dealt[rank][step][j] for j in range(8 // (micro * ranks)) for rank in range(ranks)] for step in range(steps)
    ]


def ids(steps: list[list[Batch]]) -> list[tuple[str, ...]]:
    return [sum((batch.sample_ids for batch in step), ()) for step in steps]


@pytest.fixture(scope="module")
def expected(source: RowSource) -> list[tuple[str, ...]]:
    return [source.batch(range(step * 8, step * 8 + 8)).sample_ids for step in range(6)]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 8), (2, 2), (4, 1), (4, 2)])
def test_ranks_and_micro_batches_share_one_order(
    source: RowSource, expected: list[tuple[str, ...]], ranks: int, micro: int
) -> None:
    steps = take(source, 6, ranks=ranks, micro=micro)
    assert ids(steps) == expected
    assert [seed for batch in steps[2] for seed in batch.seeds] == list(source.batch(range(16, 24)).seeds)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_do_not_change_the_order(source: RowSource, expected: list[tuple[str, ...]], workers: int) -> None:
    plain, loaded = take(source, 3, ranks=2, micro=2), take(source, 3, ranks=2, micro=2, workers=workers)
    assert ids(loaded) == ids(plain) == expected[:3]
    for first, other in zip(chain(*plain), chain(*loaded), strict=True):
        assert torch.equal(first["tokens"], other["tokens"])
        assert first.counts == other.counts


@pytest.mark.parametrize("workers", [0, 1])
def test_a_task_prepares_every_batch_before_it_goes_to_the_device(source: RowSource, workers: int) -> None:
    threads = set()

    def prepare(batch: Batch) -> Batch:
        threads.add(threading.current_thread().name)
        return batch.with_tensors(prepared=torch.tensor(len(batch.sample_ids)))

    with Loader(source, global_batch=4, micro_batch=4, workers=workers, prepare=prepare) as loader:
        for _ in range(2):
            (batch,) = next(loader)
            assert batch["prepared"] == len(batch.sample_ids)
    assert threads == ({"tessera-loader"} if workers else {"MainThread"})


def test_batches_of_several_steps_are_encoded_together(source: RowSource, expected: list[tuple[str, ...]]) -> None:
    calls: list[int] = []

    def encode(batches: Sequence[Batch]) -> list[Batch]:
        calls.append(len(batches))
        return [batch.with_tensors(encoded=torch.tensor(len(calls))) for batch in batches]

    with Loader(source, global_batch=8, micro_batch=4, steps=5, encode=encode, encode_steps=3) as loader:
        steps = [next(loader) for _ in range(5)]
    assert calls == [6, 4], "nothing is encoded that no step will use"
    assert [int(batch["encoded"]) for step in steps for batch in step] == [1] * 6 + [2] * 4
    assert ids(steps) == expected[:5]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (4, 0), (2, 1)])
def test_starting_later_goes_on_with_the_same_rows(
    source: RowSource, expected: list[tuple[str, ...]], ranks: int, workers: int
) -> None:
    steps = take(source, 2, ranks=ranks, micro=2, workers=workers, start_row=4 * 8)
    assert ids(steps) == expected[4:]


def test_a_split_that_is_uneven_is_explained(source: RowSource) -> None:
    with pytest.raises(TesseraError) as raised:
        Loader(source, global_batch=10, micro_batch=2, ranks=4)
    assert raised.value.allowed == ["global_batch=8", "global_batch=16"]
    with pytest.raises(TesseraError) as raised:
        Loader(source, global_batch=12, micro_batch=4, ranks=2)
    assert raised.value.allowed == ["micro_batch=1", "micro_batch=2", "micro_batch=3", "micro_batch=6"]


class Odd(RowSource):
    """A source whose third row cannot be read, and which takes its time."""

    def __len__(self) -> int:
        return 10

    def batch(self, rows: Sequence[int]) -> Batch:
        time.sleep(0.02)
        if rows[0] == 2:
            raise TesseraError("row two is broken", where="here", allowed=["a", "b"], fix="mend it")
        about = torch.tensor([torch.get_num_threads(), os.getpid()])
        return Batch({"about": about}, sample_ids=tuple(map(str, rows)))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_arrives_as_it_was(workers: int) -> None:
    loader = Loader(Odd(), global_batch=1, workers=workers)
    next(loader), next(loader)
    with pytest.raises(TesseraError) as raised:
        next(loader)
    assert (raised.value.what, raised.value.where) == ("row two is broken", "here")
    assert (raised.value.allowed, raised.value.fix) == (["a", "b"], "mend it")
    assert next(loader, None) is None  # closed


def test_workers_outlive_signals_and_end_with_the_loader() -> None:
    loader = Loader(Odd(), global_batch=1, workers=2, start_row=3)
    threads, worker = next(loader)[0]["about"].tolist()
    assert threads == 1
    assert worker != os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    assert [next(loader)[0].sample_ids for _ in range(6)] == [(str(n),) for n in range(4, 10)]
    began = time.perf_counter()
    loader.close()
    assert time.perf_counter() - began < 60
    assert not Path(f"/proc/{worker}").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "tessera-loader"]
    assert next(loader, None) is None


def test_no_file_is_needed_for_a_source_of_ones_own(tmp_path: Path) -> None:
    with Loader(Odd(), global_batch=2, micro_batch=2, start_row=4) as loader:
        assert next(loader)[0].sample_ids == ("4", "5")
        assert next(loader)[0].sample_ids == ("6", "7")


# ---------------------------------------------------------------------------------------------- samples that kill


class Deadly(RowSource):
    """A guarded source: row r holds samples 10 r and 10 r + 1, some of which end their reader."""

    def __init__(self, how: dict[int, str]) -> None:
        self.how = how

    def __len__(self) -> int:
        return 100

    def batch(self, rows: Sequence[int]) -> Batch:
        return self.guarded(rows, {}, lambda _: None)

    def guarded(self, rows: Sequence[int], lost: Mapping[int, str], note: Callable[[int], None]) -> Batch:
        read, holes = [], []
        for sample in (10 * row + place for row in rows for place in range(2)):
            if sample in lost:
                holes.append((str(sample), lost[sample]))
                continue
            note(sample)
            if self.how.get(sample) == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how.get(sample) == "hangs":
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                ctypes.CDLL(None).sleep(1000)
            read.append(str(sample))
        return Batch({"tokens": torch.tensor([0])}, sample_ids=tuple(read), problems=tuple(holes))


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_kill_their_reader_leave_holes(workers: int) -> None:
    deadly = Deadly({10: "dies", 11: "dies", 31: "dies"})
    with Loader(deadly, global_batch=2, micro_batch=1, workers=workers) as loader:
        batches = [batch for _ in range(3) for batch in next(loader)]
    assert [batch.sample_ids for batch in batches] == [
        *(("0", "1"), (), ("20", "21")),
        *(("30",), ("40", "41"), ("50", "51")),
    ]
    assert [bad[0] for bad in batches[1].problems] == ["10", "11"]
    assert batches[3].problems[0][1].startswith("its worker process died of signal 9 (SIGKILL)")


def test_a_sample_stuck_in_c_leaves_a_hole() -> None:
    with Loader(Deadly({10: "hangs"}), global_batch=2, micro_batch=2, workers=1, sample_timeout_s=0.5) as loader:
        loader._pool.grace_s = 1.0
        assert next(loader)[0].problems == (("10", "took longer than 0.5 s"),)


def test_a_source_that_cannot_leave_out_samples_ends_the_run() -> None:
    loader = Loader(Fragile(), global_batch=1, workers=1)
    assert next(loader)[0].sample_ids == ("0",)
    with raises("data.batch-ends-worker", "11"):
        next(loader)
    assert next(loader, None) is None


class Fragile(Odd):
    def batch(self, rows: Sequence[int]) -> Batch:
        if rows[0] == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().batch(rows)


# ---------------------------------------------------------------------------------------------- work, order, memory


class Weighed(Odd):
    def work(self, rows: Sequence[int]) -> list[float]:
        return [float(1 + row % 4) for row in rows]

    def batch(self, rows: Sequence[int]) -> Batch:
        return Batch({"rows": torch.tensor(rows)}, sample_ids=tuple(map(str, rows)))


def test_ranks_get_rows_by_their_weight() -> None:
    seen, loads = set(), []
    for rank in range(2):
        with Loader(Weighed(), global_batch=8, micro_batch=2, rank=rank, ranks=2) as loader:
            step = [row for batch in next(loader) for row in batch["rows"].tolist()]
        seen |= set(step)
        loads.append(sum(Weighed().work(step)))
    assert seen == set(range(8))
    assert loads[0] == loads[1]


class Forward(Odd):
    """Can only go forward."""

    sequential = True

    def __init__(self) -> None:
        self.at = 0

    def batch(self, rows: Sequence[int]) -> Batch:
        assert rows[0] == self.at
        self.at = rows[-1] + 1
        return Batch({"pid": torch.tensor(os.getpid())}, sample_ids=tuple(map(str, rows)))


@pytest.mark.parametrize("workers", [0, 3, "auto"])
def test_rows_that_only_go_forward_have_one_reader(workers: int | Literal["auto"]) -> None:
    with Loader(Forward(), global_batch=2, micro_batch=1, workers=workers) as loader:
        batches = [batch for _ in range(5) for batch in next(loader)]
    assert [batch.sample_ids for batch in batches] == [(str(n),) for n in range(10)]
    assert len({int(batch["pid"]) for batch in batches}) == 1
    assert (int(batches[0]["pid"]) == os.getpid()) == (workers != 3)


class Heavy(Odd):
    def batch(self, rows: Sequence[int]) -> Batch:
        return Batch({"pixels": torch.full((1 << 20,), rows[0], dtype=torch.uint8)}, sample_ids=(str(rows[0]),))


def test_batches_ahead_of_a_slow_consumer_are_bounded() -> None:
    with Loader(Heavy(), global_batch=2, micro_batch=1, workers=2, prefetch=2) as loader:
        files = len(os.listdir("/proc/self/fd"))
        for step in range(100):
            first, second = next(loader)
            assert (int(first["pixels"][-1]), int(second["pixels"][-1])) == (2 * step % 256, (2 * step + 1) % 256)
            if step % 10 == 0:
                time.sleep(0.05)  # workers could go on
                shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tessera " in line]
                # In hand 2, ready 2, in the thread's hand 1; what waits in workers' sockets is not mapped yet.
                assert 2 <= len(shared) <= 2 + 2 + 1 + 2 * 2
                assert len(os.listdir("/proc/self/fd")) <= files + 1


# ---------------------------------------------------------------------------------------------- workers: auto


def simulate(make: float, compute: float, *, cpus: int, micro: int = 1, steps: int | None = None) -> Tuner:
    """A run whose workers make batches at a steady pace."""
    tuner = Tuner(cpus, micro, steps)
    for _ in range(200):
        making = micro * make / max(1, tuner.workers)
        waited = making if tuner.workers == 0 else max(0.0, making - compute)
        tuner.observe(waited, waited + compute)
        if tuner.settled:
            return tuner
    raise AssertionError("never settled")


@pytest.mark.parametrize(
    ("make", "compute", "cpus", "workers"),
    [
        (0.0001, 0.1, 8, 0),  # costs nothing
        (0.041, 0.120, 8, 1),
        (0.300, 0.120, 8, 4),
        (0.300, 0.120, 2, 2),  # no more than there are
        (3.0, 0.5, 16, 8),
        (3.0, 0.0, 4, 4),  # nothing but waiting
    ],
)
def test_as_many_workers_as_keep_the_wait_short(make: float, compute: float, cpus: int, workers: int) -> None:
    tuner = simulate(make, compute, cpus=cpus)
    assert tuner.workers == workers
    assert tuner.batch_seconds == pytest.approx(make)


def test_a_short_run_begins_no_processes_for_little() -> None:
    assert simulate(0.01, 0.1, cpus=4, steps=100).workers == 0
    assert simulate(0.01, 0.1, cpus=4, steps=10_000).workers == 1
    text = simulate(0.041, 0.120, cpus=4, micro=8).describe()
    assert text == "loader: 4 workers (a batch takes 41 ms, a step 120 ms)"
    assert workers_per_rank(1) >= workers_per_rank(2) >= 1


class Slow(Odd):
    def batch(self, rows: Sequence[int]) -> Batch:
        time.sleep(0.02)
        return Batch({"pid": torch.tensor(os.getpid())}, sample_ids=tuple(map(str, rows)))


def drawn(loader: Loader, steps: int) -> tuple[list[str], set[int]]:
    batches = [batch for _ in range(steps) for batch in next(loader)]
    return [id for batch in batches for id in batch.sample_ids], {int(batch["pid"]) for batch in batches}


@pytest.mark.slow
def test_workers_come_while_the_loader_runs(caplog: pytest.LogCaptureFixture) -> None:
    with Loader(Slow(), global_batch=2, micro_batch=1, workers="auto") as loader:
        ids, processes = drawn(loader, 60)
    assert ids == [str(n) for n in range(120)]
    assert os.getpid() in processes
    assert len(processes) > 1
    with Loader(Slow(), global_batch=2, micro_batch=1, workers="auto", steps=20) as loader:
        assert drawn(loader, 20)[1] == {os.getpid()}
    assert "loader: no worker processes (a batch takes 2" in caplog.text


class Seen(Slow):
    """Rows of media."""

    decodes_media = True


def test_media_are_decoded_in_processes_from_the_first_row_on(caplog: pytest.LogCaptureFixture) -> None:
    with Loader(Seen(), global_batch=2, micro_batch=1, workers="auto", steps=40) as loader:
        ids, processes = drawn(loader, 40)
    assert ids == [str(n) for n in range(80)]
    assert os.getpid() not in processes
    assert "loader: " in caplog.text
    with Loader(Seen(), global_batch=2, micro_batch=1, workers=0) as loader:
        assert drawn(loader, 2)[1] == {os.getpid()}  # asked for
    reader = RowReader(Seen(), 2)
    for _ in range(2):  # with the same processes
        batches = list(reader.batches([n] for n in range(6)))
        assert [batch.sample_ids for batch in batches] == [(str(n),) for n in range(6)]
        processes_seen = {int(batch["pid"]) for batch in batches}
        assert os.getpid() not in processes_seen
    reader.close()
    assert {int(batch["pid"]) for batch in RowReader(Seen(), 0).batches([[1]])} == {os.getpid()}


def test_what_has_media_says_so(tmp_path: Path, source: RowSource) -> None:
    pictures(tmp_path, ["a.png"], (30, 20))
    section = DataSection.model_validate({"train": [{"path": write_jsonl(tmp_path / "a.jsonl", [seen("a.png")])}]})
    assert KINDS.get("chat")(RowRequest(section, "train", LetterProcessor(), 7)).decodes_media
    assert not source.decodes_media


def test_a_decoder_that_crashes_ends_neither_the_first_step_nor_an_evaluation(tmp_path: Path) -> None:
    run = tessera.train(
        {
            "name": "crash",
            "out": str(tmp_path),
            "model": {"family": "tests.toys.denoiser", "preset": "tiny"},
            "data": {"kind": "tests.toys.crashing_rows", "eval": [{"path": "unused"}]},
            "train": {"steps": 2, "global_batch": 4, "micro_batch": 2, "device": "cpu", "eval_rows": 4},
        }
    )
    kinds = [row["kind"] for row in run.metrics]
    assert (kinds.count("train"), kinds.count("eval")) == (2, 1)
    (blamed,) = map(json.loads, (run.folder / "quarantine.jsonl").read_text().splitlines())
    assert "SIGSEGV" in blamed["reason"]


def test_data_that_cannot_travel_is_read_here(caplog: pytest.LogCaptureFixture) -> None:
    class Here(Slow):
        """No worker could find this class."""

    for _ in range(2):
        with Loader(Here(), global_batch=2, micro_batch=1, workers="auto") as loader:
            ids, processes = drawn(loader, 20)
        assert ids == [str(n) for n in range(40)]
        assert processes == {os.getpid()}
        assert {int(batch["pid"]) for batch in RowReader(Here(), 2).batches([[1]])} == {os.getpid()}
        Here.decodes_media = True  # type: ignore[misc]  # the same where processes are wanted at once
    assert "cannot be pickled for worker processes" in caplog.text
    with raises("data.not-picklable"):
        Loader(Here(), global_batch=2, workers=1)
