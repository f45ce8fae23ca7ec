"""The resolved answer to "how is this model dealt out": frozen, printable, and made without any process group.

All validation is here, so that what cannot work is refused on a laptop and not on a thousand devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tessera.core.errors import TesseraError
from tessera.core.pattern import select, select_trees
from tessera.core.run_config import ParallelSection
from tessera.core.types import ModelPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ADAMW_STATES = 2  # exp_avg and exp_avg_sq, each of a parameter's own shape and type


@dataclass(frozen=True)
class Plan:
    world: int
    replicate: int  # copies of the model
    shard: int  # ranks that share one copy
    sharded: bool  # whether fully_shard runs at all
    blocks: tuple[str, ...]  # modules that are gathered and freed as one, in order of the tree
    recompute: tuple[str, ...]  # modules whose activations are recomputed in backward
    frozen: tuple[str, ...]  # parameters that are not trained
    storage_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    parameters: int
    trained: int
    parameter_bytes: int  # per rank, as are the next two
    gradient_bytes: int
    optimizer_bytes: int

    def describe(self) -> str:
        """For people: what `tessera plan` prints."""
        held = (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes)
        types = (self.storage_dtype, self.param_dtype, self.reduce_dtype)
        rows = [
            ("ranks", f"{self.world} = {self.replicate} replicated x {self.shard} sharded"),
            ("parameters", f"{self.parameters:,} ({self.trained:,} trained)"),
            ("shard groups", f"{len(self.blocks)} blocks + root" if self.sharded else "none: one rank, no casting"),
            ("recompute", _summary(self.recompute)),
            ("types", "kept {}, computed {}, summed {}".format(*map(_word, types))),
            ("per rank", "parameters {}, gradients {}, optimizer {}".format(*map(_size, held))),
        ]
        return "\n".join(f"{name:<13} {text}" for name, text in rows)


def make_plan(
    section: ParallelSection,
    model_plan: ModelPlan,
    module: nn.Module,
    world: int,
    *,
    storage_dtype: str = "float32",
    freeze: Sequence[str] = (),
) -> Plan:
    """`module` is only looked at (names and shapes): one on the meta device serves."""
    shard = world if section.shard == "auto" else section.shard
    if world % shard:
        raise TesseraError(
            f"parallel.shard={shard} does not divide the {world} ranks",
            where="parallel.shard",
            allowed=["auto", *(d for d in range(1, world + 1) if world % d == 0)],
        )
    module_names = [name for name, _ in module.named_modules() if name]
    parameters = dict(module.named_parameters())
    frozen = select_trees(freeze, parameters, "model.freeze") if freeze else []
    blocks = select(model_plan.blocks, module_names, "the model's plan (blocks)")
    recompute = select(section.recompute, module_names, "parallel.recompute") if section.recompute else []
    for inner in recompute:
        outer = next((o for o in recompute if inner.startswith(o + ".")), None)
        if outer:
            raise TesseraError(
                f"{inner} would be recomputed twice: it lies inside {outer}",
                where="parallel.recompute",
                fix="name one of the two",
            )
    kept = DTYPES[storage_dtype]
    computed = DTYPES[section.param_dtype] if section.param_dtype else kept
    total = sum(p.numel() for p in parameters.values())
    trained = total - sum(parameters[name].numel() for name in frozen)
    if not trained:
        raise TesseraError("every parameter is frozen: there is nothing to train", where="model.freeze")
    # fully_shard splits the first dimension into equal chunks, so a rank holds ceil(rows / shard) rows of each tensor.
    held = {n: _rows_per_rank(p, shard) * kept.itemsize for n, p in parameters.items()}
    trained_bytes = sum(size for n, size in held.items() if n not in set(frozen))
    return Plan(
        world=world,
        replicate=world // shard,
        shard=shard,
        # One rank without casting gains nothing from fully_shard; with casting it is what keeps master weights.
        sharded=world > 1 or computed != kept,
        blocks=tuple(blocks),
        recompute=tuple(recompute),
        frozen=tuple(frozen),
        storage_dtype=kept,
        param_dtype=computed,
        reduce_dtype=DTYPES[section.reduce_dtype],
        reshard_after_forward=section.reshard_after_forward,
        parameters=total,
        trained=trained,
        parameter_bytes=sum(held.values()),
        gradient_bytes=trained_bytes,
        optimizer_bytes=ADAMW_STATES * trained_bytes,
    )


def _rows_per_rank(parameter: nn.Parameter, shard: int) -> int:
    if parameter.dim() == 0:
        return 1
    return -(-parameter.shape[0] // shard) * (parameter.numel() // max(parameter.shape[0], 1))


def _summary(paths: Sequence[str]) -> str:
    if not paths:
        return "none"
    return f"{len(paths)} modules, {paths[0]} … {paths[-1]}" if len(paths) > 2 else ", ".join(paths)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.2f} {unit}" if unit != "B" else f"{count} B"
