"""The state of a run in host memory: the nearest place to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tessera.core import device as devices
from tessera.core.tensors import local_part


class HostCopy:
    """This rank's parts of all tensors, kept in memory that is taken once; page-locked where that makes it faster."""

    def __init__(self, device: torch.device) -> None:
        self._pin = devices.supports(device, "pinned_memory")
        self._parts: dict[str, Tensor] = {}
        self.step = -1
        self.state: Mapping[str, Any] = {}

    @torch.no_grad()
    def take(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        for name, tensor in tensors.items():
            part = local_part(tensor).detach()
            if name not in self._parts:
                self._parts[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pin)
            self._parts[name].copy_(part)
        self.step, self.state = step, state

    @torch.no_grad()
    def put_back(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local_part(tensor).detach().copy_(self._parts[name])
