"""Build a Triton kernel that does almost nothing, to find out whether any can be built."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(at):
    tl.store(at, 1)


def probe(device: torch.device) -> None:
    """Raise what Triton raises if it cannot compile the C code of a kernel. The device is not waited for."""
    _write[(1,)](torch.empty(1, dtype=torch.int32, device=device))
