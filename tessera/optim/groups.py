"""Parameter groups by pattern, and the optimizer over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera.core import device as devices
from tessera.core.errors import TesseraError
from tessera.core.names import clean
from tessera.core.pattern import select_trees
from tessera.core.run_config import OptimSection


def parameter_groups(module: nn.Module, section: OptimSection) -> list[dict[str, Any]]:
    """Every trained parameter lands in one group: the last pattern that names it wins. Vectors do not decay unasked."""
    trained = {clean(n): p for n, p in module.named_parameters() if p.requires_grad}
    settings: dict[str, tuple[float, float]] = {}
    for name, parameter in trained.items():
        settings[name] = (section.lr, section.weight_decay if parameter.dim() > 1 else 0.0)
    for number, group in enumerate(section.groups):
        for name in select_trees([group.pattern], trained, f"optim.groups.{number}.pattern"):
            lr, decay = settings[name]
            settings[name] = (
                lr if group.lr is None else group.lr,
                decay if group.weight_decay is None else group.weight_decay,
            )
    by_setting: dict[tuple[float, float], list[str]] = {}
    for name, setting in settings.items():
        by_setting.setdefault(setting, []).append(name)
    return [
        {"params": [trained[n] for n in names], "names": names, "lr": lr, "base_lr": lr, "weight_decay": decay}
        for (lr, decay), names in by_setting.items()
    ]


def build_optimizer(module: nn.Module, section: OptimSection, device: torch.device) -> torch.optim.Optimizer:
    groups = parameter_groups(module, section)
    if not groups:
        raise TesseraError("no parameter is trained", where="model.freeze")
    fused = devices.supports(device, "fused_optimizer")
    names = [group.pop("names") for group in groups]
    optimizer = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps, fused=fused)
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        group["names"] = group_names
    return optimizer
