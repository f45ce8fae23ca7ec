"""What stages of a pipeline exchange in generation models: tokens, and conditions that are computed once and travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.errors import TesseraError

CARRY = 2  # rows per token: tokens, then conditions


def pack_carry(x: Tensor, *conditions: Tensor) -> Tensor:
    """Return tokens [T, D] and conditions, rows of the same width, as one activation of `CARRY` x T rows."""
    rows = torch.cat([x, *conditions])
    spare = CARRY * x.shape[0] - rows.shape[0]
    if spare < 0:
        raise TesseraError(
            f"between pipeline stages {rows.shape[0]} rows of tokens and conditions do not fit into {CARRY} x "
            f"{x.shape[0]} tokens",
            where="parallel.pp",
            fix="raise data.length, or leave out the pipeline: small images beside long captions gain nothing",
            code="layout.carry-overflow",
        )
    return F.pad(rows, (0, 0, 0, spare))


def unpack_carry(carry: Tensor | None, *counts: int) -> Sequence[Tensor]:
    """Return tokens and conditions, of which there are so many rows."""
    assert carry is not None, "a stage without embeddings needs the activation of the stage before"
    return torch.split(carry, [*counts, carry.shape[0] - sum(counts)])[:-1]
