"""Hold the weights, gradients and moments of a run on MindSpore, by their names in the torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
import torch
from mindspore import ops
from torch import nn

from tessera.checkpoint.state import model_tensors
from tessera.mindspore.functions import Tensor, from_torch, to_torch

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the moments in torch's AdamW


class DeviceState:
    """Hold the tensors of MindSpore. The torch module and optimizer hold copies on the host."""

    def __init__(self, module: nn.Module) -> None:
        """Store the torch module of the run, which is on the host. `load` copies its tensors to MindSpore."""
        self._module = module
        self.weights: dict[str, Tensor] = {}  # `Parameter` if trained, for `mindspore.value_and_grad`
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[str, Tensor] = {}  # gradients of the current step

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.weights.items() if isinstance(tensor, ms.Parameter)}

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return next(self._module.parameters()).dtype

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights of the torch module and the moments of its optimizer to MindSpore."""
        self.gradients = {}
        for name, tensor in model_tensors(self._module).items():
            copy = from_torch(tensor)
            held = self.weights.get(name)
            if held is None:
                self.weights[name] = ms.Parameter(copy, name=name) if tensor.requires_grad else copy
            elif tensor.requires_grad:
                ops.assign(held, copy)
            else:
                self.weights[name] = copy
        for name, moments in _moments(optimizer).items():
            self.moments[name] = (from_torch(moments[0]), from_torch(moments[1]))

    @torch.no_grad()
    def store(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what training changes, the trained weights and their moments, back to the host."""
        if not self.weights:
            return  # nothing was loaded yet
        tensors = model_tensors(self._module)
        for name, parameter in self.trained.items():
            tensors[name].copy_(to_torch(parameter))
        for name, moments in _moments(optimizer).items():
            for held, computed in zip(moments, self.moments[name], strict=True):
                held.copy_(to_torch(computed))

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        before = self.gradients
        self.gradients = {name: before[name] + g if name in before else g for name, g in gradients.items()}

    def map_gradients(self, function: Callable[[Tensor], Tensor]) -> None:
        self.gradients = {name: function(gradient) for name, gradient in self.gradients.items()}


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return both Adam moments of each trained parameter, by its name. They are on the host."""
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            state: Mapping[str, Any] = optimizer.state[parameter]
            moments[name] = (state[MOMENTS[0]], state[MOMENTS[1]])
    return moments
