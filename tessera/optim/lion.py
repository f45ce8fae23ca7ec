"""Lion: update by the sign of an average of gradients. Its state has half the size of AdamW's.

The update is computed element by element, so each rank updates its own shards, and checkpoints can be resharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from tessera.runtime.modules import local_shard


class Lion(Optimizer):
    """Update by sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g. Weight decay is decoupled."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                weight, mean = local_shard(parameter), local_shard(state["exp_avg"])
                grad = local_shard(parameter.grad).to(mean.dtype)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(torch.lerp(grad, mean, beta1).sign_(), alpha=-group["lr"])
                mean.lerp_(grad, 1 - beta2)
