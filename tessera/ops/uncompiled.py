"""Functions that run outside of compiled graphs. Import this file only while a graph is compiled: its decorators import
the compiler, which takes longer than all of Tessera."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its weight. `ends`: end of each group.

    torch.compile leaves it out: it knows the shape of the result only for bf16.
    """
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
