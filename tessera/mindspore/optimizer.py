"""AdamW and gradient clipping on MindSpore, with the semantics, groups and state names of `tessera.optim`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from mindspore import ops

from tessera.mindspore.functions import Tensor
from tessera.mindspore.state import MOMENTS, DeviceState
from tessera.optim.adamw import AdamW
from tessera.optim.optimizer import multiply_update


class MindSporeAdamW(AdamW):
    """Update the weights of MindSpore like torch's AdamW, with gradients multiplied by `clip_factor`.

    Parameter groups and state are those of torch's optimizer on the host. Step counts are kept there; moments are
    copied by `DeviceState`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, state: DeviceState
    ) -> None:
        super().__init__(groups, betas, eps, fused=False)
        self._device = state
        for group in self.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter) for name in MOMENTS}
                self.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        factor, self.clip_factor = self.clip_factor, None
        scale = 1.0 if factor is None else float(factor)
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                gradient = self._device.gradients.get(name)
                if gradient is not None:
                    count = self.state[parameter]["step"].add_(1)
                    gradient = gradient if scale == 1.0 else gradient * scale
                    self._update(name, gradient, int(count), group["lr"], group["weight_decay"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._device.gradients = {}

    def _update(self, name: str, gradient: Tensor, count: int, rate: float, decay: float) -> None:
        (beta1, beta2), eps = self.defaults["betas"], self.defaults["eps"]
        weight, (mean, square) = self._device.weights[name], self._device.moments[name]
        mean = mean + (gradient - mean) * (1 - beta1)
        square = square * beta2 + gradient * gradient * (1 - beta2)
        spread = ops.sqrt(square) / math.sqrt(1 - beta2**count) + eps
        ops.assign(weight, weight * (1 - rate * decay) - mean / spread * (rate / (1 - beta1**count)))
        self._device.moments[name] = (mean, square)


def clipping(
    state: DeviceState, optimizer: torch.optim.Optimizer, max_norm: float | None
) -> Callable[[], torch.Tensor]:
    """Return a function that returns the norm of all gradients, and lets the next update clip them to `max_norm`."""

    def clip() -> torch.Tensor:
        squares = [float((gradient * gradient).sum().asnumpy()) for gradient in state.gradients.values()]
        norm = torch.tensor(squares, dtype=torch.float64).sum().sqrt()
        if max_norm is not None:
            multiply_update(optimizer, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    return clip
