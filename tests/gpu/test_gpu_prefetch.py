"""Batches that travel to an accelerator while it computes: the same ones, beside the computation, never mixed up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import tessera
from tessera.core.batch import Batch, Segments
from tessera.core.row_source import RowSource
from tessera.data.loader.loader import Loader
from tessera.runtime.device import SideCopies
from tests.toys.chat_set import chat_recipe, write_chat_set

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


class Numbers(RowSource):
    """Batches that tell by their content which rows they are."""

    def __len__(self) -> int:
        return 1000

    def batch(self, rows: Sequence[int]) -> Batch:
        time.sleep(0.002)
        pixels = torch.arange(1 << 20, dtype=torch.float32) + rows[0]
        return Batch(
            {"pixels": pixels, "rows": torch.tensor(rows)}, {"text": Segments.of([1 + row % 3 for row in rows])}
        )


def here() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def busy(device: torch.device) -> torch.Tensor:
    """Queues some tens of milliseconds of work."""
    a = torch.randn(8192, 8192, device=device)
    for _ in range(12):
        a = a @ a
        a /= a.norm()
    return a


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_the_same(workers: int) -> None:
    device, source = here(), Numbers()
    with Loader(source, global_batch=4, micro_batch=2, workers=workers, device=device) as loader:
        sums = []
        for step in range(40):
            for j, batch in enumerate(next(loader)):
                expected = source.batch([4 * step + 2 * j, 4 * step + 2 * j + 1])
                assert batch["pixels"].device == batch.segments["text"].bounds.device == device
                assert batch.segments["text"].lengths == expected.segments["text"].lengths
                if step % 4 == 0:
                    busy(
                        device
                    )  # the copy is long done when the computation comes to it; its memory must not be reused
                sums.append(((batch["pixels"] - expected["pixels"].to(device)).abs().sum(), batch["rows"].clone()))
    assert [float(difference) for difference, _ in sums] == [0.0] * 80
    assert torch.stack([rows for _, rows in sums]).flatten().tolist() == list(range(160))


def test_copies_run_beside_the_computation() -> None:
    device = here()
    copies = SideCopies(device)
    host = torch.arange(1 << 22, dtype=torch.float32).pin_memory()
    copies.start(lambda: host.to(device, non_blocking=True))[1].synchronize()  # the first one sets things up
    busy(device)
    torch.accelerator.synchronize()
    busy(device)
    computed = torch.get_device_module(device).Event()
    computed.record()
    began = time.perf_counter()
    moved, done = copies.start(lambda: host.to(device, non_blocking=True))
    queued = time.perf_counter() - began
    done.synchronize()
    assert not computed.query()  # the copy is there, the computation goes on
    assert queued < 0.01  # and nobody waited to queue it
    copies.finish(done, [moved])
    assert torch.equal(moved.cpu(), host)


def test_training_does_not_depend_on_where_batches_are_made(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "chat")
    losses = []
    for workers in (0, 2):
        recipe = chat_recipe(data, tmp_path / f"run{workers}", device="auto", steps=12)
        recipe.setdefault("data", {})["workers"] = workers
        run = tessera.train(recipe)
        losses.append([row["loss"] for row in run.metrics if row["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
