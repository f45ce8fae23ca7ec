"""Data and a model that are slow on one rank, each in another way, and sound: a run with them must go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.toys.own_data import Digits
from tests.toys.own_models import PlainNet


def compute_for(seconds: float) -> None:
    """On the processor, as a large block does."""
    until, x = time.monotonic() + seconds, torch.randn(64, 64)
    while time.monotonic() < until:
        x = torch.tanh(x @ x)


def hold_python_for(seconds: float) -> None:
    """One call that lets no other thread of this process run, as some decoders do."""
    probe = 2_000_000
    began = time.perf_counter()
    sum(range(probe))
    sum(range(int(probe * seconds / (time.perf_counter() - began))))


class SlowDigits(Digits):
    """`slow`: item -> seconds in which it sleeps, as if its file were far away; `held`: in which no thread runs."""

    def __init__(self, slow: dict[str, float], held: dict[str, float] | None = None) -> None:
        super().__init__()
        self.slow = {int(number): seconds for number, seconds in slow.items()}
        self.held = {int(number): seconds for number, seconds in (held or {}).items()}

    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(self.slow.get(number, 0))
        if number in self.held:
            hold_python_for(self.held[number])
        return super().__getitem__(number)


class SlowNet(PlainNet):
    """On rank 1, counted in forward passes: compiles late, then computes long."""

    def __init__(self, seconds: float, compile_at: int, compute_at: int) -> None:
        super().__init__()
        self.seconds, self.compile_at, self.compute_at = seconds, compile_at, compute_at
        self.passes = 0

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        self.passes += 1
        if dist.get_rank() == 1:
            if self.passes == self.compile_at:
                pixels = torch.compile(lambda x: x * 1, backend=self._slow_backend)(pixels)
            if self.passes == self.compute_at:
                compute_for(self.seconds)
        return super().forward(pixels, labels)

    def _slow_backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        time.sleep(self.seconds)  # as while a compiler runs in another process
        compiled: Callable[..., Any] = graph.forward
        return compiled
