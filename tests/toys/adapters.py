"""Find the adapters of a module."""

from __future__ import annotations

from torch import nn

from tessera.lora.modules import LoraExperts, LoraLinear
from tessera.lora.select import Adapter
from tessera.runtime.modules import clean_name


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """Return the adapters in this module by layer name."""
    parts = ((clean_name(name + ".")[:-1], part) for name, part in module.named_modules())
    return {name: part.adapter for name, part in parts if isinstance(part, LoraLinear | LoraExperts)}
