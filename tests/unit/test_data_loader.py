"""The loader: any number of ranks, micro-batches and workers sees the same rows at the same step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from data_cases import LetterProcessor, texts

from tessera.core.errors import TesseraError
from tessera.core.run_config import DataSection
from tessera.core.types import Batch, RowSource
from tessera.data.kinds import KINDS
from tessera.data.loader import Loader


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    path = texts(tmp_path_factory.mktemp("data"), 50)
    return KINDS.get("chat")(
        DataSection.model_validate({"train": [{"path": path}], "length": 64}), "train", LetterProcessor(), 7, None
    )


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


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_order(source: RowSource, expected: list[tuple[str, ...]], workers: int) -> None:
    plain, loaded = take(source, 3, ranks=2, micro=2), take(source, 3, ranks=2, micro=2, workers=workers)
    assert ids(loaded) == ids(plain) == expected[:3]
    for one, other in zip(chain(*plain), chain(*loaded), strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert one.counts == other.counts


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


class Odd:
    """A source whose third row cannot be read, and which takes its time."""

    bad_samples = ()

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
    before = set(multiprocessing.active_children())
    loader = Loader(Odd(), global_batch=1, workers=2, start_row=3)
    threads, worker = next(loader)[0]["about"].tolist()
    assert threads == 1
    assert worker != os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    assert [next(loader)[0].sample_ids for _ in range(6)] == [(str(n),) for n in range(4, 10)]
    assert loader.wait_seconds > 0
    began = time.perf_counter()
    loader.close()
    assert time.perf_counter() - began < 5
    assert set(multiprocessing.active_children()) <= before
    assert next(loader, None) is None


def test_no_file_is_needed_for_a_source_of_ones_own(tmp_path: Path) -> None:
    with Loader(Odd(), global_batch=2, micro_batch=2, start_row=4) as loader:
        assert next(loader)[0].sample_ids == ("4", "5")
        assert next(loader)[0].sample_ids == ("6", "7")
