"""For models written the MindSpeed-MM way: bases that let a module say how it is sharded, started and frozen.

None of them is needed: a plain `nn.Module` is dealt out by the plan alone. `parallel.apply` hands the work to a module
that has these methods, and what a method is not told it takes from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tessera.core.names import clean
from tessera.parallel.fsdp import prefetch_modules, shard_modules
from tessera.parallel.memory.recompute import apply_recompute
from tessera.parallel.plan import Plan, Recompute


@dataclass(frozen=True)
class Fsdp2Settings:
    """The plan in the words of `fsdp2_config.yaml`: what a model's own `_fully_shard` is given to read."""

    plan: Plan
    sharding_size: int
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool
    sub_modules_to_wrap: tuple[str, ...]
    ignored_modules: tuple[str, ...]
    recompute_modules: tuple[str, ...]
    use_reentrant: bool
    reshard_after_forward: bool | int
    offload_to_cpu: bool
    pin_memory: bool
    num_to_forward_prefetch: int
    num_to_backward_prefetch: int

    @staticmethod
    def of(plan: Plan) -> Fsdp2Settings:
        return Fsdp2Settings(
            plan=plan,
            sharding_size=plan.shard,
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            output_dtype=plan.output_dtype,
            cast_forward_inputs=plan.cast_forward_inputs,
            sub_modules_to_wrap=plan.blocks,
            ignored_modules=plan.ignored,
            recompute_modules=tuple(part.path for part in plan.recompute),
            use_reentrant=plan.use_reentrant,
            reshard_after_forward=plan.reshard_after_forward,
            offload_to_cpu=plan.offload,
            pin_memory=plan.pin_memory,
            num_to_forward_prefetch=plan.prefetch_forward,
            num_to_backward_prefetch=plan.prefetch_backward,
        )


@runtime_checkable
class ShardsItself(Protocol):
    """What `parallel.apply` looks for on a module."""

    def _pre_fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Fsdp2Settings) -> None: ...

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Fsdp2Settings) -> None: ...

    def _post_fully_shard(self) -> None: ...


class FSDP2Mixin:
    """Sharding as the plan says; override `_fully_shard` to say it in code, with the helpers below."""

    fsdp2_kwargs: dict[str, Any]  # the keywords of torch's fully_shard for a block
    fsdp2_config: Fsdp2Settings

    def _pre_fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Fsdp2Settings) -> None:
        self.fsdp2_kwargs = fsdp2_kwargs
        self.fsdp2_config = fsdp2_config

    def _fully_shard(
        self, fsdp2_kwargs: dict[str, Any] | None = None, fsdp2_config: Fsdp2Settings | None = None
    ) -> None:
        self.set_recompute_modules_to_wrap()
        self.set_fullyshard_modules_to_wrap()
        self.set_modules_to_prefetch()

    def _post_fully_shard(self) -> None: ...

    def set_recompute_modules_to_wrap(self, modules: Sequence[str | nn.Module] | None = None) -> None:
        """Recomputes these modules (paths, or modules of this one) whole; by default what the recipe asks for."""
        config = self.fsdp2_config
        parts = config.plan.recompute if modules is None else [Recompute(path) for path in self._paths(modules)]
        apply_recompute(self._module, parts, config.use_reentrant)

    def set_fullyshard_modules_to_wrap(self, modules: Sequence[str | nn.Module] | None = None) -> None:
        """Makes each of these a shard group of its own, and this module the root; by default the plan's blocks."""
        paths = self.fsdp2_config.sub_modules_to_wrap if modules is None else self._paths(modules)
        shard_modules(self._module, paths, self.fsdp2_kwargs, self.fsdp2_config.plan)

    def set_modules_to_prefetch(
        self,
        num_to_forward_prefetch: int | None = None,
        num_to_backward_prefetch: int | None = None,
        modules: Sequence[str | nn.Module] | None = None,
    ) -> None:
        """Gathers ahead along `modules` in order of execution; by default along all shard groups below this one."""
        config = self.fsdp2_config
        forward = config.num_to_forward_prefetch if num_to_forward_prefetch is None else num_to_forward_prefetch
        backward = config.num_to_backward_prefetch if num_to_backward_prefetch is None else num_to_backward_prefetch
        prefetch_modules(self._module, self._paths(modules or self._groups()), forward, backward)

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self)

    def _groups(self) -> list[str]:
        """The plan's blocks where these are the groups, in its order; otherwise the groups in order of the tree."""
        found = [clean(n + ".")[:-1] for n, m in self._module.named_modules() if n and isinstance(m, FSDPModule)]
        planned = self.fsdp2_config.sub_modules_to_wrap
        return list(planned) if set(planned) == set(found) else found

    def _paths(self, modules: Iterable[str | nn.Module]) -> list[str]:
        names = {part: clean(name + ".")[:-1] for name, part in self._module.named_modules()}
        return [part if isinstance(part, str) else names[part] for part in modules]


class WeightInitMixin:
    """First weights by rule: biases are zero, weights of norms are one, everything else is normal.

    Runs on a whole module in host memory, under the run's seed, and each rank keeps its shards: any layout starts from
    the same numbers. A model too large for that gives `initialize(name, tensor, generator)` instead, or loads weights.
    """

    initializer_range: float = 0.02

    def init_weights(self) -> None:
        for part in cast(nn.Module, self).modules():
            self._init_weights(part)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The parameters of one module, without those below it."""
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in type(module).__name__.lower():
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.initializer_range)


class MultiModalModule(nn.Module):
    """A module made of towers, with the helpers that freezing towers takes."""

    def freeze(self, *paths: str) -> None:
        """Stops training of whole submodules; without a path, of everything."""
        for part in [self.get_submodule(path) for path in paths] or [self]:
            part.requires_grad_(False)

    def unfreeze(self, *paths: str) -> None:
        for part in [self.get_submodule(path) for path in paths] or [self]:
            part.requires_grad_(True)
