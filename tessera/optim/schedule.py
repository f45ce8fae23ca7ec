"""The learning rate as a pure function of the step: resuming needs no state but the step itself."""

from __future__ import annotations

import math

import torch

from tessera.core.run_config import ScheduleSection


def factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Share of the learning rate for optimizer step number `step` (from 0) out of `steps`."""
    if step < section.warmup:
        return (step + 1) / section.warmup
    if section.kind == "constant":
        return 1.0
    progress = min(1.0, (step - section.warmup) / max(1, steps - section.warmup))
    if section.kind == "linear":
        shape = 1.0 - progress
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.final + (1.0 - section.final) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> float:
    """Sets each group to its own rate times `share`; returns the first group's, for the step line."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
