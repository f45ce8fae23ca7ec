"""Offer the bases of models that are written for MindSpeed-MM: `MultiModalModule`, `FSDP2Mixin`, `WeightInitMixin`.

None of them is needed here: the plan of the recipe splits a plain `nn.Module`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.core.spec import InitializesItself
from tessera.errors import TesseraError
from tessera.parallel.plan import Plan
from tessera.runtime.modules import computed_buffers, local_shard, put_back_buffers
from tessera_compat.megatron.module import MegatronModule
from tessera_compat.mindspeed_mm.fsdp2 import (
    REPLICATE,
    Fsdp2Config,
    create_device_mesh,
    device_of_group,
    select_paths,
    set_fullyshard_modules_to_wrap,
    set_modules_to_prefetch,
    set_recompute_modules_to_wrap,
    sharding,
)


class MultiModalModule(MegatronModule):
    """Base class of models: stores the configuration, and the input from the previous pipeline stage."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the tensor that replaces the input of `forward`."""
        self.input_tensor = input_tensor


class FSDP2Mixin:
    """Add FSDP2 sharding to a model class: by the recipe, or by the method `_fully_shard` of the class.

    In a run of Tessera, `fsdp2_config` is made from the recipe. A script with its own training loop calls
    `fully_shard(process_group, fsdp2_config_path)`.
    """

    fsdp2_kwargs: dict[str, Any]  # keyword arguments of torch's fully_shard for each block
    fsdp2_config: Fsdp2Config

    def freeze(self, config: Any) -> None:
        """Freeze parameters. `TransformersModel` calls it with the configuration of the model."""

    def post_meta_init(self) -> None:
        """Compute buffers after memory is allocated; see `AdjustsAfterInit`."""

    def shard_itself(self, plan: Plan, arguments: dict[str, Any]) -> None:
        """Shard this module by the plan of a Tessera run. `arguments`: keyword arguments of torch's fully_shard.

        Recompute and prefetch are applied, too. Scripts without a plan call `fully_shard`.
        """
        self.fsdp2_config, self.fsdp2_kwargs = Fsdp2Config.from_plan(plan), arguments
        self._run_fully_shard()

    def fully_shard(
        self, process_group: dist.ProcessGroup | None = None, fsdp2_config_path: str | Path | None = None, **kwargs: Any
    ) -> bool:
        """Shard this module over a process group (None: all ranks) by a configuration file, and return True.

        Parameters on the meta device are allocated, filled by `init_weights` and completed by `post_meta_init`.
        """
        group = process_group or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialized"
        self._pre_fully_shard(group, fsdp2_config_path, **kwargs)
        buffers = computed_buffers(self._module)
        self._run_fully_shard()
        self._allocate(group, buffers)
        return True

    def _pre_fully_shard(
        self, process_group: dist.ProcessGroup, fsdp2_config_path: str | Path | None, **kwargs: Any
    ) -> None:
        config = Fsdp2Config() if fsdp2_config_path is None else Fsdp2Config.load_from_yaml(fsdp2_config_path)
        if config.expert_parallel_size > 1:
            raise TesseraError(
                f"{type(self).__name__} shards itself, but expert parallelism needs the parallel plan of a run",
                where=f"{fsdp2_config_path}: expert_parallel_size",
                allowed=[1],
                fix="train a model family with experts by a recipe with parallel.ep",
                code="job.experts-of-class",
            )
        self.fsdp2_config = config
        self.fsdp2_kwargs = {**config.to_dict(), "mesh": create_device_mesh(config.sharding_size, process_group)}
        ignored = select_paths(self._module, config.ignored_modules)
        for path in ignored:
            part = self._module.get_submodule(path)
            if not any(parameter.is_meta for parameter in part.parameters()):
                part.to(device_of_group(process_group))
        if ignored:
            parameters = {p for path in ignored for p in self._module.get_submodule(path).parameters()}
            self.fsdp2_kwargs["ignored_params"] = parameters

    def _fully_shard(self, fsdp2_kwargs: dict[str, Any], fsdp2_config: Fsdp2Config) -> None:
        """Shard this module by the configuration. Subclasses may override it."""
        set_recompute_modules_to_wrap(self._module, fsdp2_config.recompute_modules, fsdp2_config.use_reentrant)
        set_fullyshard_modules_to_wrap(self._module, fsdp2_config.sub_modules_to_wrap, **fsdp2_kwargs)
        set_modules_to_prefetch(
            self._module,
            fsdp2_config.sub_modules_to_wrap,
            fsdp2_config.num_to_forward_prefetch,
            fsdp2_config.num_to_backward_prefetch,
        )

    def _post_fully_shard(self) -> None:
        """Do nothing after sharding. Subclasses may override it."""

    def _run_fully_shard(self) -> None:
        with sharding(self._module, self.fsdp2_config, self.fsdp2_kwargs):
            self._fully_shard(self.fsdp2_kwargs, self.fsdp2_config)
        self._post_fully_shard()

    def _allocate(self, group: dist.ProcessGroup, buffers: dict[str, Tensor]) -> None:
        module = self._module
        if not any(parameter.is_meta for parameter in module.parameters()):
            return
        if not isinstance(self, InitializesItself):
            raise TesseraError(
                f"{type(self).__name__} is on the meta device and has no init_weights() to fill its parameters",
                fix="add WeightInitMixin to its bases, or build it on a real device",
                code="job.meta-without-init",
            )
        module.to_empty(device="cpu" if self.fsdp2_config.offload_to_cpu else device_of_group(group))
        put_back_buffers(module, buffers)
        self.init_weights()
        self._share_copies(group)
        self.post_meta_init()

    def _share_copies(self, group: dist.ProcessGroup) -> None:
        """Broadcast each replicated parameter or shard from its first rank: initial values differ between ranks."""
        mesh = self.fsdp2_kwargs["mesh"]
        copies = mesh.get_group(REPLICATE) if REPLICATE in (mesh.mesh_dim_names or ()) else None
        for parameter in self._module.parameters():
            ranks = (
                copies if isinstance(parameter, DTensor) else group
            )  # parameters of ignored modules are replicated on all ranks
            if ranks is not None:
                first = dist.get_process_group_ranks(ranks)[0]
                dist.broadcast(local_shard(parameter.detach()), first, group=ranks)

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self)


class WeightInitMixin:
    """Initialize weights: biases are zero, weights of norms are one, other weights are normally distributed.

    In a run, each rank initializes the full module in host memory with the seed of the run, and keeps its shards. So
    every layout starts from the same weights. A model that is too large for this defines
    `initialize(name, tensor, generator)` instead, or loads weights.
    """

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize all parameters of this module and its submodules."""
        for part in cast(nn.Module, self).modules():
            self._init_weights(part)

    def _init_weights(self, module: nn.Module, std: float = 0.02) -> None:
        """Initialize the parameters of a module, without its submodules."""
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in type(module).__name__.lower():
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std)
