"""The tensor between pipeline stages of generation models: tokens, and conditions that the first stage computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.errors import TesseraError

# Rows per token of the tensor that pipeline stages send: first a row for each token, then the conditions (timestep,
# text), then zeros.
CARRY = 2


def pack_carry(x: Tensor, *conditions: Tensor) -> Tensor:
    """Concatenate tokens [T, D] and conditions [C, D], and pad them with zeros to `CARRY` x T rows."""
    rows = torch.cat([x, *conditions])
    spare = CARRY * x.shape[0] - rows.shape[0]
    if spare < 0:
        raise TesseraError(
            f"tokens and conditions have {rows.shape[0]} rows, and pipeline stages exchange at most {CARRY} x "
            f"{x.shape[0]}",
            where="parallel.pp",
            fix="increase data.length, or set parallel.pp=1, which suits small images with long captions",
            code="layout.carry-overflow",
        )
    return F.pad(rows, (0, 0, 0, spare))


def unpack_carry(carry: Tensor | None, *counts: int) -> Sequence[Tensor]:
    """Undo `pack_carry`. `counts`: number of rows of the tokens and of each condition; the padding is dropped."""
    assert carry is not None, "a stage without embeddings needs the activation of the stage before"
    return torch.split(carry, [*counts, carry.shape[0] - sum(counts)])[:-1]
