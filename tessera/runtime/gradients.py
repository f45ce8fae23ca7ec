"""Scale gradients in place, and the loss dynamically for float16.

The loss is multiplied by a scale before backward, so that small gradients do not become zero in float16, and gradients
are divided by it afterwards. An overflow skips the step and halves the scale; many steps without overflow double it.
The scale is a tensor on the device, so the host does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tessera.config.run_config import LossScaleSection
from tessera.runtime.modules import local_shard
from tessera.runtime.torch_internals import foreach_mul_

LEAST_SCALE = 1.0  # minimum; a scale below 1 would make gradients smaller than without a scale


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by `factor`, which may be on another device (CPU offload)."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            local = local_shard(gradient)
            by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), tensors in by_kind.items():
        if dtype.itemsize >= 4:
            foreach_mul_(tensors, factor.to(device=device, dtype=dtype))
            continue
        # Multiply in fp32 and round the product: a factor rounded to bf16 would change all gradients by the same ratio.
        wide = factor.to(device=device, dtype=torch.float32)
        for tensor in tensors:
            tensor.copy_(tensor.float() * wide)


class LossScale:
    """Hold the scale of the loss and adapt it after every step."""

    def __init__(self, section: LossScaleSection, device: torch.device) -> None:
        self._growth_steps = section.growth_steps
        # The scale, and the number of steps without overflow since it changed.
        self.state = torch.tensor([section.start, 0.0], device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.state[0].to(loss.dtype)

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        scale_gradients((parameter.grad for parameter in parameters), 1.0 / self.state[0])

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """Adapt the scale to a step whose gradients have this norm."""
        scale, good = self.state
        overflow = ~torch.isfinite(grad_norm.to(self.state))
        grown = good + 1 >= self._growth_steps
        larger = torch.where(grown, scale * 2, scale)
        self.state[0], self.state[1] = (
            torch.where(overflow, (scale / 2).clamp(min=LEAST_SCALE), larger),
            torch.where(overflow | grown, torch.zeros_like(good), good + 1),
        )

    def explains(self, loss: float) -> bool:
        """Return whether the scale may be the cause of non-finite gradients. This waits for the device.

        It may be if the loss is finite and the scale is above its minimum.
        """
        return math.isfinite(loss) and float(self.state[0]) > LEAST_SCALE
