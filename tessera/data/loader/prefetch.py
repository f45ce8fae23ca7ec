"""Batches on their way to the device while it computes on others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessera.core.device import SideCopies
from tessera.core.types import Batch


class _Moving(NamedTuple):
    batch: Batch
    done: Any  # the event of its copy; None where nothing is copied


class ToDevice:
    """Moves batches through page-locked memory, on a stream of their own. On a CPU they stay where they are."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._copies = None if device is None or device.type == "cpu" else SideCopies(device)

    def start(self, batch: Batch) -> _Moving:
        if self._copies is None or self._device is None:
            return _Moving(batch, None)
        device = self._device
        return _Moving(*self._copies.start(lambda: batch.pin_memory().to(device, non_blocking=True)))

    def finish(self, moving: _Moving) -> Batch:
        """To be called by the thread that computes."""
        if self._copies is not None:
            self._copies.finish(moving.done, _tensors(moving.batch))
        return moving.batch


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.tensors.values(), *(segments.bounds for segments in batch.segments.values())]


class Ahead:
    """Draws batches in a thread of its own, and has at most `depth` of them on the device, or on their way, before they
    are asked for. Page-locking and copying cost the computing thread nothing. What drawing raises is raised in turn."""

    def __init__(self, batches: Generator[Batch], to_device: ToDevice, depth: int) -> None:
        self._batches = batches
        self._to_device = to_device
        self._ready: queue.Queue[_Moving | BaseException | None] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-loader", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        found = self._ready.get()
        if found is None:
            raise StopIteration
        if isinstance(found, BaseException):
            raise found
        return self._to_device.finish(found)

    def close(self) -> None:
        """Whoever the batches come from must have been told to stop."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(self._to_device.start(batch)):
                    break
            self._batches.close()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, found: _Moving | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(found, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
