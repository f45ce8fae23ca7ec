"""A kernel that does next to nothing, to see whether any can be built."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(at):
    tl.store(at, 1)


def probe(device: torch.device) -> None:
    """Raises what Triton raises, which has a piece of C compiled for each kernel. The device is not waited for."""
    _write[(1,)](torch.empty(1, dtype=torch.int32, device=device))
