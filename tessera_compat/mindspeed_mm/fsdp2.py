"""Offer `Fsdp2Config` and the helper functions of MindSpeed-MM's `_fully_shard`, under their names and arguments.

Module patterns are those of `tessera.config.pattern`. A pattern that matches no module is an error; in MindSpeed-MM it
is a printed warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tessera.config.pattern import select
from tessera.errors import TesseraError
from tessera.parallel.activations import apply_recompute
from tessera.parallel.fsdp import prefetch_modules, shard_modules
from tessera.parallel.make_plan import DTYPES
from tessera.parallel.modules import Recompute, native_patterns
from tessera.parallel.plan import Plan
from tessera.runtime import device as devices
from tessera.runtime.distributed import rank_on_machine
from tessera.runtime.modules import clean_name
from tessera_compat.mindspeed_mm.fsdp2_file import TYPE_NAMES, read_fsdp2_file
from tessera_compat.state import current

_WORDS = {DTYPES[name]: word for word, name in TYPE_NAMES.items()}
REPLICATE, SHARD = "Replicate", "Shard"


@dataclass
class Fsdp2Config:
    """Store the keys of `fsdp2_config.yaml`. The method `_fully_shard` of a model class gets this object."""

    sharding_size: int | str | None = None
    sub_modules_to_wrap: Sequence[str] | None = None
    reshard_after_forward: bool | int = True
    param_dtype: str | None = None  # bf16, fp16 or fp32
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    offload_to_cpu: bool = False
    pin_memory: bool = True
    num_to_forward_prefetch: int = 0
    num_to_backward_prefetch: int = 0
    ignored_modules: Sequence[str] | None = None
    recompute_modules: Sequence[str] | None = None
    use_reentrant: bool = True
    align_fsdp_param_groups: bool = False
    expert_parallel_size: int = 1
    reshard_local_experts: bool = True
    moe_modules: Sequence[str] | None = None
    plan: Plan | None = field(
        default=None, repr=False
    )  # parallel plan of the run; None: the caller shards the module without a run

    @classmethod
    def load_from_yaml(cls, yml_file: str | Path) -> Fsdp2Config:
        """Read a `fsdp2_config.yaml`. Missing keys get the defaults of the file."""
        file = read_fsdp2_file(Path(yml_file))
        return cls(**{one.name: file.value(one.name) for one in fields(cls) if one.name != "plan"})

    @classmethod
    def from_plan(cls, plan: Plan) -> Fsdp2Config:
        """Translate a parallel plan to the keys of the file."""
        sharding, modules = plan.layout.sharding, plan.layout.modules
        return cls(
            sharding_size=plan.layout.axes.size("fsdp"),
            sub_modules_to_wrap=modules.blocks,
            reshard_after_forward=sharding.reshard_after_forward,
            param_dtype=_WORDS[plan.precision.compute],
            reduce_dtype=_WORDS[plan.precision.reduce],
            output_dtype=None if plan.precision.output is None else _WORDS[plan.precision.output],
            cast_forward_inputs=plan.precision.cast_inputs,
            offload_to_cpu=sharding.offload,
            pin_memory=sharding.pin_memory,
            num_to_forward_prefetch=sharding.prefetch_forward,
            num_to_backward_prefetch=sharding.prefetch_backward,
            ignored_modules=modules.ignored,
            recompute_modules=tuple(one.path for one in modules.recompute),
            use_reentrant=modules.use_reentrant,
            plan=plan,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the keywords of torch's `fully_shard` for a block, without the mesh.

        The dtype of outputs is for the root module only: blocks would get inputs in another dtype than their weights.
        """
        policy = MixedPrecisionPolicy(
            param_dtype=_dtype(self.param_dtype),
            reduce_dtype=_dtype(self.reduce_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )
        # Pinned host memory needs an accelerator.
        pin = self.pin_memory and devices.is_accelerator("auto")
        return {
            "mp_policy": policy,
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=pin) if self.offload_to_cpu else OffloadPolicy(),
        }


def _dtype(word: str | None) -> torch.dtype | None:
    return None if word is None else DTYPES[TYPE_NAMES[word]]


# ---------------------------------------------------------------------------------------------- mesh of a file


def device_of_group(process_group: dist.ProcessGroup) -> torch.device:
    """Return the device of this rank for collectives of the group."""
    if dist.get_backend(process_group) == "gloo":
        return torch.device("cpu")
    return devices.resolve_shared("auto", rank_on_machine())


def create_device_mesh(sharding_size: int | str | None, process_group: dist.ProcessGroup) -> DeviceMesh:
    """Return a device mesh of the group's ranks: [ranks], or [replicas, shards] if fewer ranks share the weights."""
    ranks = dist.get_process_group_ranks(process_group)
    size = len(ranks) if sharding_size == "auto" else int(sharding_size or 1)
    if len(ranks) % size:
        raise TesseraError(
            f"{len(ranks)} ranks cannot be divided into groups of {size}",
            where="sharding_size",
            allowed=[n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0],
            code="job.group-size",
        )
    kind = device_of_group(process_group).type
    if size == len(ranks):
        return DeviceMesh.from_group(process_group, kind, mesh_dim_names=(SHARD,))
    return DeviceMesh(kind, torch.tensor(ranks).view(-1, size), mesh_dim_names=(REPLICATE, SHARD))


# ---------------------------------------------------------------------------------------------- helpers


@contextmanager
def sharding(module: nn.Module, config: Fsdp2Config, arguments: dict[str, Any]) -> Iterator[None]:
    """Set the default module of the `set_...` functions in this block."""
    stack = current().sharding
    stack.append((module, config, arguments))
    try:
        yield
    finally:
        stack.pop()


def _current() -> tuple[nn.Module, Fsdp2Config, dict[str, Any]]:
    if not current().sharding:
        raise TesseraError(
            "no module is passed; only calls inside of `_fully_shard` may leave it out",
            fix="call it from `_fully_shard`, or pass the module and a list of patterns",
            code="job.fully-shard-call",
        )
    return current().sharding[-1]


def _config_of(module: nn.Module) -> Fsdp2Config:
    """Return the sharding settings of a module; the defaults if user code shards it without a run."""
    return next((config for other, config, _ in reversed(current().sharding) if other is module), Fsdp2Config())


def select_paths(model: nn.Module, config: Sequence[str] | None) -> list[str]:
    """Return the module paths that match patterns or import paths of classes, in the order of the modules."""
    tree = {clean_name(name + ".")[:-1]: part for name, part in model.named_modules() if name}
    return select(native_patterns(config or (), tree, {}), tree, f"modules of {type(model).__name__}")


def get_submodules_by_path(model: nn.Module, config: Sequence[str] | None) -> list[nn.Module] | None:
    """Return the submodules that match patterns; None if `patterns` is None."""
    return None if config is None else [model.get_submodule(path) for path in select_paths(model, config)]


def set_recompute_modules_to_wrap(
    module: nn.Module | None = None,
    recompute_modules_config: Sequence[str] | None = None,
    use_reentrant: bool | None = None,
) -> None:
    """Recompute the activations of modules in backward. Without arguments: the modules that the recipe selects."""
    if module is None:
        module, config, _ = _current()
        recompute_modules_config = config.recompute_modules
    else:
        config = _config_of(module)
    # A recipe can select activations of a recomputed module that are stored instead.
    planned = {} if config.plan is None else {one.path: one for one in config.plan.layout.modules.recompute}
    paths = select_paths(module, recompute_modules_config)
    reentrant = config.use_reentrant if use_reentrant is None else use_reentrant
    apply_recompute(module, [planned.get(path, Recompute(path)) for path in paths], reentrant)


def set_fullyshard_modules_to_wrap(
    module: nn.Module | None = None, fullyshard_modules_config: Sequence[str] | None = None, **fsdp2_kwargs: Any
) -> None:
    """Shard each of the modules as an FSDP2 group, and the rest as the root group.

    Without arguments: the modules that the recipe selects.
    """
    if module is None:
        module, config, arguments = _current()
        fullyshard_modules_config, fsdp2_kwargs = config.sub_modules_to_wrap, {**arguments, **fsdp2_kwargs}
    else:
        config = _config_of(module)
    paths = select_paths(module, fullyshard_modules_config)
    if config.plan is not None:
        shard_modules(module, paths, fsdp2_kwargs, config.plan)
        return
    for path in sorted(paths, key=lambda path: -path.count(".")):
        fully_shard(module.get_submodule(path), **fsdp2_kwargs)
    policy: MixedPrecisionPolicy = fsdp2_kwargs.get("mp_policy", MixedPrecisionPolicy())
    fully_shard(module, **{**fsdp2_kwargs, "mp_policy": replace(policy, output_dtype=_dtype(config.output_dtype))})


def set_modules_to_prefetch(
    module: nn.Module | int | None = None,
    fullyshard_modules_config: Sequence[str] | int | None = None,
    num_to_forward_prefetch: int | None = None,
    num_to_backward_prefetch: int | None = None,
) -> None:
    """Prefetch the weights of the next FSDP2 groups, in the order of the modules.

    Call it as `(module, list, forward, backward)`, as `(forward, backward)`, or without arguments. Missing arguments
    are taken from the recipe.
    """
    if isinstance(module, nn.Module):
        config, patterns = _config_of(module), fullyshard_modules_config
        assert not isinstance(patterns, int), "the second argument is a list of patterns"
        paths = select_paths(module, patterns)
    else:
        if isinstance(module, int):
            assert not isinstance(fullyshard_modules_config, Sequence), "the second argument is a number of groups"
            num_to_forward_prefetch, num_to_backward_prefetch = module, fullyshard_modules_config
        module, config, _ = _current()
        named = ((clean_name(name + ".")[:-1], part) for name, part in module.named_modules() if name)
        paths = [path for path, part in named if isinstance(part, FSDPModule)]
    forward = config.num_to_forward_prefetch if num_to_forward_prefetch is None else num_to_forward_prefetch
    backward = config.num_to_backward_prefetch if num_to_backward_prefetch is None else num_to_backward_prefetch
    prefetch_modules(module, paths, forward, backward)
