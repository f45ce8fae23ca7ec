"""Build parameter groups and the optimizer, set its learning rate, and clip gradients by their global norm.

The learning rate depends only on the step, so that a resume needs no scheduler state. No function waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from tessera.config.pattern import select_trees
from tessera.config.run_config import OptimSection, ScheduleSection
from tessera.errors import TesseraError
from tessera.lora.select import is_output_factor
from tessera.optim.adafactor import Adafactor, adafactor_bytes
from tessera.optim.adamw import AdamW
from tessera.optim.lion import Lion
from tessera.optim.muon import Muon, matrices_of
from tessera.runtime import device as devices
from tessera.runtime.gradients import scale_gradients
from tessera.runtime.modules import clean_name, local_shard
from tessera.runtime.torch_internals import foreach_norm

NOT_OFFLOADED = ("adafactor", "muon")  # their updates contain collectives or matrix products, which need the device


def parameter_groups(module: nn.Module, section: OptimSection, names: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the groups of all trained parameters. If several patterns match a parameter, the last one counts. Vectors
    have no weight decay unless a group of the recipe sets it.

    `names`: names of all trained parameters of the full model, for matching patterns; `module` may be a pipeline stage.
    """
    # Two pipeline stages on one rank may have copies of a tied parameter with the same name: both are trained.
    trained: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained.setdefault(clean_name(name), []).append(parameter)
    matrices = matrices_of(module) if section.name == "muon" else set()
    settings: dict[str, tuple[float, float]] = {}
    for name, copies in trained.items():
        rate = section.lr * (section.loraplus_lr_ratio if is_output_factor(name) else 1)
        settings[name] = (rate, section.weight_decay if copies[0].dim() > 1 else 0.0)
    for number, group in enumerate(section.groups):
        for name in select_trees([group.pattern], names or trained, f"optim.groups.{number}.pattern"):
            if name not in settings:
                continue  # the parameter is on another pipeline stage
            lr, decay = settings[name]
            settings[name] = (
                lr if group.lr is None else group.lr,
                decay if group.weight_decay is None else group.weight_decay,
            )
            if group.optimizer == "muon" and trained[name][0].dim() not in (2, 3):
                raise TesseraError(
                    f"{name} is no matrix, and muon updates only matrices",
                    where=f"optim.groups.{number}.optimizer",
                    allowed=["adamw"],
                    code="recipe.muon-not-matrix",
                )
            if group.optimizer is not None:
                (matrices.add if group.optimizer == "muon" else matrices.discard)(name)
    # Unsharded parameters have a separate group: torch does not mix tensors and DTensors in one update.
    by_setting: dict[tuple[float, float, bool, bool], list[str]] = {}
    for name, setting in settings.items():
        kind = (isinstance(trained[name][0], DTensor), name in matrices)
        by_setting.setdefault((*setting, *kind), []).append(name)
    return [
        {
            "params": [p for n in group for p in trained[n]],
            "names": [n for n in group for _ in trained[n]],
            "lr": lr,
            "base_lr": lr,
            "weight_decay": decay,
            **({"muon": True} if muon else {}),
        }
        for (lr, decay, _, muon), group in by_setting.items()
    ]


def check_offload(section: OptimSection) -> None:
    """Raise if the optimizer cannot update weights in host memory (`parallel.offload`)."""
    if section.name in NOT_OFFLOADED:
        raise TesseraError(
            f"{section.name} updates weights on the device, and with parallel.offload they are in host memory",
            where="optim.name",
            fix="optim.name=adamw or lion, or parallel.offload=false",
            code="recipe.optimizer-offload",
        )


def build_optimizer(
    module: nn.Module,
    section: OptimSection,
    device: torch.device,
    names: Collection[str] = (),
    offloaded: bool = False,
    make: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> Optimizer:
    """Return the optimizer of all trained parameters. `offloaded`: parameters are in host memory.

    `make`: function of the caller that gets the parameter groups, with learning rates and weight decays, and returns an
    optimizer.
    """
    groups = parameter_groups(module, section, names)
    if not groups and not names:
        raise TesseraError("no parameter is trained", where="model.freeze", code="model.all-frozen")
    if not groups:  # all parameters of this pipeline stage are frozen
        groups = [{"params": [], "names": [], "lr": section.lr, "base_lr": section.lr}]
    names = [group.pop("names") for group in groups]
    optimizer: Optimizer
    if make is not None:
        optimizer = _made_by_caller(make, groups)
    elif section.name == "lion":
        optimizer = Lion(groups, section.betas)
    elif section.name == "adafactor":
        optimizer = Adafactor(groups)
    else:
        how = {
            "fused": devices.supports(device, "fused_optimizer"),
            "together": devices.supports(device, "triton") and not offloaded,
        }
        if section.name == "muon":
            optimizer = Muon(groups, section.betas, section.eps, momentum=section.momentum, **how)
        else:
            optimizer = AdamW(groups, section.betas, section.eps, **how)
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        group["names"] = group_names
    return optimizer


def _made_by_caller(make: Callable[[list[dict[str, Any]]], Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    optimizer = make(groups)
    if not isinstance(optimizer, Optimizer):
        raise TesseraError(
            f"the function that was given as optimizer returned a {type(optimizer).__name__}",
            where="optimizer",
            fix="return a torch.optim.Optimizer over the parameter groups that it is called with",
            code="recipe.optimizer-type",
        )
    if [g["params"] for g in optimizer.param_groups] != [g["params"] for g in groups]:
        raise TesseraError(
            "the optimizer has other parameter groups than the ones that it was called with",
            where="optimizer",
            fix="pass the groups to the optimizer unchanged; optim.groups in the recipe defines groups",
            code="recipe.optimizer-groups",
        )
    for group, requested in zip(optimizer.param_groups, groups, strict=True):
        group["base_lr"] = requested["base_lr"]
    return optimizer


def state_bytes(section: OptimSection, module: nn.Module) -> Callable[[str, int, Sequence[int]], int]:
    """Return a function (name, bytes, shape of a parameter on a rank) -> bytes of its optimizer state on this rank.

    `module` is the unsharded model, on the meta device.
    """
    matrices: set[str] = set()
    if section.name == "muon":
        groups = parameter_groups(module, section)
        of = {id(p) for group in groups if group.get("muon") for p in group["params"]}
        matrices = {clean_name(name) for name, p in module.named_parameters() if id(p) in of}

    def bytes_of(name: str, size: int, shape: Sequence[int]) -> int:
        if section.name == "adafactor":
            return adafactor_bytes(shape)
        if section.name == "lion" or name in matrices:
            return size
        return 2 * size + 4  # two moments and a step count

    return bytes_of


def lr_factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Return the factor of the learning rate by its schedule, for step number `step` (from 0) out of `steps`."""
    if step < section.warmup:
        return (step + 1) / section.warmup
    if section.kind == "constant":
        return 1.0
    if section.kind == "wsd":
        falling = max(1, round(steps * section.decay))
        remaining = min(1.0, max(0, steps - step) / falling)
        return section.final + (1.0 - section.final) * remaining
    progress = min(1.0, (step - section.warmup) / max(1, steps - section.warmup))
    if section.kind == "linear":
        shape = 1.0 - progress
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.final + (1.0 - section.final) * shape


def set_learning_rate(optimizer: Optimizer, factor: float) -> float:
    """Set the learning rate of each group to its `base_lr` times `factor`; return the rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def clip_gradients(
    optimizer: Optimizer,
    parameters: Iterable[Tensor],
    device: torch.device,
    max_norm: float | None,
    *,
    others: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Return the norm of all gradients, and let the next update clip them to `max_norm`.

    Tessera's AdamW clips as part of its update. For any other optimizer the gradients are scaled here. `others`: ranks
    with other parameters of the same model. A parameter that several ranks have counts once.
    """
    parameters = list(parameters)
    elsewhere = {id(p) for p in counted_elsewhere}
    norm = total_norm([p.grad for p in parameters if p.grad is not None and id(p) not in elsewhere], device, others)
    if max_norm is not None:
        multiply_update(optimizer, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def multiply_update(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply the gradients of the next update by `factor`."""
    if isinstance(optimizer, AdamW):
        before = optimizer.clip_factor
        optimizer.clip_factor = factor if before is None else before * factor.to(before)
    else:
        scale_gradients((p.grad for group in optimizer.param_groups for p in group["params"]), factor)


def total_norm(
    grads: Iterable[Tensor], device: torch.device | None = None, others: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the 2-norm of all gradients, reduced over the mesh axes that shard them.

    The result is on `device`, by default the device of the gradients. `others`: ranks with further gradients.
    """
    grads = list(grads)
    if device is None:
        device = local_shard(grads[0]).device if grads else torch.device("cpu")
    by_layout: dict[tuple[object, tuple[Placement, ...]], list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, tuple(grad.placements)) if isinstance(grad, DTensor) else (None, ())
        by_layout.setdefault(key, []).append(local_shard(grad))
    wide = devices.sum_dtype(device)
    total = torch.zeros((), dtype=wide, device=device)
    for (mesh, placements), tensors in by_layout.items():
        norms = torch.stack(foreach_norm(tensors, dtype=torch.float32))
        # With CPU offload gradients are on the CPU, but process groups communicate only tensors on the device.
        squares = norms.to(device=device, dtype=wide).square().sum()
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():  # strided shards are not instances of `Shard`
                dist.all_reduce(squares, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        total += squares
    if others is not None:
        dist.all_reduce(total, group=others)
    return total.sqrt()
