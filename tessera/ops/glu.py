"""Gated activations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tessera.ops.registry import AUTO, Implementation, Operation


def swiglu(gate: Tensor, up: Tensor, *, implementation: str = AUTO) -> Tensor:
    run = SWIGLU.choose(implementation, "plain", gate.device, gate.dtype)
    out: Tensor = run(gate, up)
    return out


def _swiglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


SWIGLU = Operation("swiglu", (Implementation("eager", _swiglu_eager),))
