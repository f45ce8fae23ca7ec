"""Activations that are recomputed in backward instead of kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def apply_recompute(module: nn.Module, paths: Sequence[str]) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        setattr(owner, name, checkpoint_wrapper(owner.get_submodule(name)))
