"""Place frozen components that are not the model itself, such as VAEs and text encoders, where their residence says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tessera.core.spec import Residence
from tessera.parallel.mesh import FSDP, Axes, Mesh


@dataclass(frozen=True)
class FrozenBytes:
    """Hold how many bytes of weights a frozen component takes on a rank, and where it lives between uses."""

    size: int
    residence: Residence


def frozen_bytes(module: nn.Module, residence: Residence, axes: Axes) -> FrozenBytes:
    """Return what a component will take, given it on the meta device."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return FrozenBytes(-(-size // axes.size(FSDP)) if residence == "sharded" else size, residence)


def place_frozen(module: nn.Module, residence: Residence, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a component, whose weights are on the host, to where it lives.

    The ranks that share it are those that share the trained model; where they are stages of a pipeline, each stage has
    a copy, since each computes the same inputs. Buffers are on the device always.
    """
    if residence == "sharded" and mesh.size(FSDP) > 1:
        for path in _layers(module):
            fully_shard(module.get_submodule(path).to(device), mesh=mesh.view(FSDP))
        fully_shard(module.to(device), mesh=mesh.view(FSDP))
        return module
    if residence != "offloaded":
        return module.to(device)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


def _layers(module: nn.Module) -> list[str]:
    """Return the outermost modules in lists: the layers of an encoder, which are gathered one after another."""
    lists = [path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{number}" for path in outer for number, _ in enumerate(module.get_submodule(path).children())]
