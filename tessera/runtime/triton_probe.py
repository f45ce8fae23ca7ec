"""Compile a minimal Triton kernel, to test whether Triton works on this machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(at):
    tl.store(at, 1)


def probe(device: torch.device) -> None:
    """Compile and launch the kernel; raise the error of Triton if that fails."""
    _write[(1,)](torch.empty(1, dtype=torch.int32, device=device))
