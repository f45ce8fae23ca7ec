"""Parameter groups by pattern, and the optimizer over them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core import device as devices
from tessera.core.errors import TesseraError
from tessera.core.names import clean
from tessera.core.pattern import select_trees
from tessera.core.run_config import OptimSection
from tessera.optim.adamw import AdamW


def parameter_groups(module: nn.Module, section: OptimSection, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """Every trained parameter lands in one group: the last pattern that names it wins. Vectors do not decay unasked.

    `names`: all trained parameters of the model, when `module` may be a part of it; patterns speak of these.
    """
    # Two stages of a pipeline on one rank may have copies of one parameter, with one name: both are trained.
    trained: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained.setdefault(clean(name), []).append(parameter)
    settings: dict[str, tuple[float, float]] = {}
    for name, copies in trained.items():
        settings[name] = (section.lr, section.weight_decay if copies[0].dim() > 1 else 0.0)
    for number, group in enumerate(section.groups):
        for name in select_trees([group.pattern], names or trained, f"optim.groups.{number}.pattern"):
            if name not in settings:
                continue  # on another stage
            lr, decay = settings[name]
            settings[name] = (
                lr if group.lr is None else group.lr,
                decay if group.weight_decay is None else group.weight_decay,
            )
    by_setting: dict[tuple[float, float], list[str]] = {}
    for name, setting in settings.items():
        by_setting.setdefault(setting, []).append(name)
    return [
        {
            "params": [p for n in group for p in trained[n]],
            "names": [n for n in group for _ in trained[n]],
            "lr": lr,
            "base_lr": lr,
            "weight_decay": decay,
        }
        for (lr, decay), group in by_setting.items()
    ]


def build_optimizer(
    module: nn.Module,
    section: OptimSection,
    device: torch.device,
    names: Collection[str] = (),
    offloaded: bool = False,
) -> AdamW:
    """`offloaded`: parameters lie in host memory, and are updated there."""
    groups = parameter_groups(module, section, names)
    if not groups and not names:
        raise TesseraError("no parameter is trained", where="model.freeze")
    if not groups:  # a stage that is frozen as a whole: an optimizer over nothing
        groups = [{"params": [], "names": [], "lr": section.lr, "base_lr": section.lr}]
    names = [group.pop("names") for group in groups]
    optimizer = AdamW(
        groups,
        section.betas,
        section.eps,
        fused=devices.supports(device, "fused_optimizer"),
        together=devices.supports(device, "triton") and not offloaded,
    )
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        group["names"] = group_names
    return optimizer
