"""The one place where a model meets its plan, in a fixed order:

freeze -> types -> pipeline cut -> tensor -> experts -> context -> swap -> recompute -> compile -> fully_shard ->
materialize -> initialize.

Loading weights comes after, in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from tessera.core.errors import TesseraError
from tessera.core.meta import computed_buffers, put_back_buffers, seeded
from tessera.core.names import clean
from tessera.core.rng import generator
from tessera.parallel.compile import apply_compile
from tessera.parallel.context.apply import apply_context
from tessera.parallel.experts.apply import apply_experts
from tessera.parallel.fsdp import apply_fsdp, fsdp_arguments, sum_gradients
from tessera.parallel.memory.materialize import materialize
from tessera.parallel.memory.recompute import apply_recompute
from tessera.parallel.memory.swap import apply_swap
from tessera.parallel.mesh import Mesh
from tessera.parallel.mixin import Fsdp2Settings, ShardsItself
from tessera.parallel.pipeline.engine import cut_stages
from tessera.parallel.plan import Plan
from tessera.parallel.tensor import apply_tensor
from tessera.parallel.wrapping import present


def parallelize(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> nn.Module:
    """Takes a module on the meta device; gives this rank's part of it: allocated, not yet filled."""
    buffers = computed_buffers(module)
    module = arrange(module, plan, mesh, device)
    materialize(module, plan, device)
    put_back_buffers(module, buffers)
    return module


def arrange(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> nn.Module:
    """All but memory: what computes what, and with whom. The result is still on the meta device."""
    frozen = set(plan.frozen)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _set_types(module, plan)
    if plan.pipeline is None:
        _deal_out(module, module, plan, mesh, device)
    else:
        stages = cut_stages(module, plan, mesh)
        for stage in stages.children():
            _deal_out(stage._stage_model, stage, plan, mesh, device)  # type: ignore[arg-type]
        module = stages
    sum_gradients(module)
    return module


def _deal_out(module: nn.Module, root: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
    """`module` has the names that the plan speaks of, not always all of them; `root` is it, or a stage around it."""
    if plan.tensor is not None:
        apply_tensor(module, plan.tensor, mesh)
    if plan.experts is not None:
        apply_experts(module, plan.experts, mesh)
    if plan.context is not None:
        apply_context(module, plan.context, mesh)
    apply_swap(module, present(module, plan.swap), device)
    if plan.sharded and isinstance(module, ShardsItself):
        # Before the class recomputes or shards anything: both are hooks around a block, or a call of it, and what is
        # compiled is the block's own code.
        apply_compile(module, present(module, plan.compiled))
        _let_it_shard_itself(module, plan, mesh, device)
        return
    here = set(present(module, [part.path for part in plan.recompute]))
    apply_recompute(module, [part for part in plan.recompute if part.path in here], plan.use_reentrant)
    apply_compile(module, present(module, plan.compiled))
    if plan.sharded:
        apply_fsdp(module, plan, mesh, device, root)


def _set_types(module: nn.Module, plan: Plan) -> None:
    """Of parameters alone: a table that a module keeps in a buffer has the type its author chose."""
    whole = {p for path in plan.ignored for p in module.get_submodule(path).parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            # Nobody casts an ignored module for computing, and being frozen it needs no master weights.
            parameter.data = parameter.data.to(plan.param_dtype if parameter in whole else plan.storage_dtype)


def _let_it_shard_itself(module: ShardsItself, plan: Plan, mesh: Mesh, device: torch.device) -> None:
    assert isinstance(module, nn.Module)
    arguments, settings = fsdp_arguments(module, plan, mesh, device), Fsdp2Settings.of(plan)
    module._pre_fully_shard(arguments, settings)
    module._fully_shard(arguments, settings)
    module._post_fully_shard()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dim() and not isinstance(parameter, DTensor):
            raise TesseraError(
                f"{type(module).__name__}._fully_shard left {clean(name)} out: every rank would train its own",
                fix="end it with self.set_fullyshard_modules_to_wrap(), or with fully_shard(self, **fsdp2_kwargs)",
            )


def initialize(
    module: nn.Module, seed: int, device: torch.device, fresh: Callable[[], nn.Module] | None = None
) -> None:
    """Fills every parameter as a function of the seed alone, so any layout starts from the same numbers.

    A module with `initialize(name, tensor, generator)` is filled by name: each full tensor exists once, on the device,
    while its own shard is taken from it. Drawn there also where weights are kept on the host: another device's
    generator gives other numbers. Any other module has only its constructor to ask: `fresh` makes the whole module in
    the memory of each rank's host, and each rank keeps its shards. Nothing is communicated either way.
    """
    start: Callable[[str, torch.Tensor, torch.Generator], None] | None = getattr(module, "initialize", None)
    if start is None:
        assert fresh is not None, "a module without `initialize` needs its constructor"
        _take_from(module, fresh, seed)
        return
    start_parameters(module, start, seed, device)


@torch.no_grad()
def start_parameters(
    module: nn.Module,
    start: Callable[[str, Tensor, torch.Generator], None],
    seed: int,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fills the wanted parameters by name, each a function of the seed and its name."""
    for name, parameter in module.named_parameters():
        name = clean(name)
        if wanted(name):
            full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            start(name, full, generator(device, seed, "init", name))
            _keep_shard(parameter, full)


@torch.no_grad()
def start_tensors(module: nn.Module, tensors: Mapping[str, Tensor], seed: int, device: torch.device) -> None:
    """The same for whole tensors that are no parameters of the module, under the names that they would have there."""
    start: Callable[[str, Tensor, torch.Generator], None] | None = getattr(module, "initialize", None)
    assert start is not None or not tensors, "a module without `initialize` cannot say how a tensor begins"
    for name, tensor in tensors.items():
        if start is not None:
            start(name, tensor, generator(device, seed, "init", name))


def _take_from(module: nn.Module, fresh: Callable[[], nn.Module], seed: int) -> None:
    with seeded(seed, "init"), torch.device("cpu"):
        whole = dict(fresh().named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _keep_shard(parameter, whole[clean(name)].detach())


def _keep_shard(parameter: Tensor, full: Tensor) -> None:
    full = full.to(device=parameter.device, dtype=parameter.dtype)
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    # Torch's checkpoint protocol knows which boxes of the whole a rank holds, whatever cut it how often.
    for box in parameter.__create_chunk_list__():
        if 0 not in box.sizes:
            piece = full[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            find_tensor_shard(parameter.detach(), MetadataIndex("", box.offsets)).copy_(piece)
