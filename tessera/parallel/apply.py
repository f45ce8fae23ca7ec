"""Apply a plan to a model, in a fixed order:

freeze -> types -> pipeline split -> tensor -> experts -> context -> activation offload -> block offload -> recompute
-> compile -> fully_shard -> materialize -> initialize.

Loading weights comes after, in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.config.pattern import home
from tessera.core.engine import TrainingEngine
from tessera.core.spec import AdjustsAfterInit, InitializesByName
from tessera.errors import TesseraError
from tessera.lora.select import is_factor
from tessera.parallel.activations import apply_activation_offload, apply_recompute
from tessera.parallel.block_offload import apply_block_offload, waiting_on_host
from tessera.parallel.collectives import PostBackward
from tessera.parallel.context_parallel import apply_context
from tessera.parallel.engine import SimpleEngine
from tessera.parallel.experts import apply_experts
from tessera.parallel.fsdp import apply_fsdp, fsdp_arguments, sum_gradients, whole_gradients, whole_parameters
from tessera.parallel.mesh import LOSS, Mesh
from tessera.parallel.modules import apply_compile, present
from tessera.parallel.pipeline_engine import PipelineEngine
from tessera.parallel.pipeline_stages import LocalStages, split_into_stages
from tessera.parallel.plan import Plan, ShardsItself
from tessera.parallel.tensor import apply_tensor, partial_gradients
from tessera.runtime import device as devices
from tessera.runtime.gradients import LossScale
from tessera.runtime.modules import clean_name, computed_buffers, copy_shard, put_back_buffers, seeded
from tessera.runtime.rng import generator


def parallelize(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> nn.Module:
    """Apply the plan to a module on the meta device, and allocate this rank's parameter shards uninitialized."""
    buffers = computed_buffers(module)
    module = parallelize_on_meta(module, plan, mesh, device)
    materialize(module, plan, device)
    put_back_buffers(module, buffers)
    if isinstance(module, AdjustsAfterInit):
        module.post_meta_init()
    return module


def parallelize_on_meta(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> nn.Module:
    """Apply the plan without allocating memory: the result is on the meta device."""
    frozen = set(plan.frozen)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _set_types(module, plan)
    if plan.layout.pipeline is None:
        _apply_to_stage(module, module, plan, mesh, device)
    else:
        stages = split_into_stages(module, plan, mesh)
        for stage in stages.children():
            _apply_to_stage(stage._stage_model, stage, plan, mesh, device)  # type: ignore[arg-type]
        module = stages
    sum_gradients(module)
    return module


def _apply_to_stage(module: nn.Module, root: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
    """Apply the plan to a model, or to a pipeline stage, which has only some of the model's modules.

    `root`: in a pipeline the `StageModule` that wraps `module`, otherwise `module`.
    """
    layout, modules = plan.layout, plan.layout.modules
    if modules.compiled and not devices.supports(device, "compiler"):
        raise TesseraError(
            f"torch.compile has no code generator for {device.type}",
            where="parallel.compile",
            fix="leave parallel.compile out",
            code="device.no-compiler",
        )
    if layout.tensor is not None:
        apply_tensor(module, layout.tensor, mesh)
    if layout.experts is not None:
        apply_experts(module, layout.experts, mesh)
    if layout.context is not None:
        apply_context(module, layout.context, mesh)
    apply_activation_offload(module, present(module, modules.activation_offload), device)
    apply_block_offload(module, present(module, modules.block_offload), device, parameters=not layout.sharding.active)
    if layout.sharding.active and isinstance(module, ShardsItself):
        # Compile before `shard_itself`: recompute and FSDP add hooks to a block, which must stay outside of the graph.
        apply_compile(module, present(module, modules.compiled))
        _let_it_shard_itself(module, plan, mesh, device)
        return
    here = set(present(module, [part.path for part in modules.recompute]))
    apply_recompute(module, [part for part in modules.recompute if part.path in here], modules.use_reentrant)
    apply_compile(module, present(module, modules.compiled))
    if layout.sharding.active:
        apply_fsdp(module, plan, mesh, device, root)


def _set_types(module: nn.Module, plan: Plan) -> None:
    """Set the dtype of each parameter by the plan. Buffers keep their dtypes."""
    ignored = {p for path in plan.layout.modules.ignored for p in module.get_submodule(path).parameters()}
    for name, parameter in module.named_parameters():
        if home(name, plan.precision.float32) is not None:
            parameter.data = parameter.data.float()
        elif parameter.is_floating_point():
            # FSDP does not cast an ignored module. It is frozen, so its weights are stored in the compute dtype.
            parameter.data = parameter.data.to(
                plan.precision.compute if parameter in ignored else plan.precision.weights
            )


def _let_it_shard_itself(module: ShardsItself, plan: Plan, mesh: Mesh, device: torch.device) -> None:
    assert isinstance(module, nn.Module)
    module.shard_itself(plan, fsdp_arguments(module, plan, mesh, device))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dim() and not isinstance(parameter, DTensor):
            raise TesseraError(
                f"`shard_itself` of {type(module).__name__} leaves the parameter {clean_name(name)} unsharded: its "
                "gradient would not be summed over ranks",
                fix="in `shard_itself`, call torch's fully_shard on the root module last, with the same keywords",
                code="layout.parameter-not-sharded",
            )


def initialize(
    module: nn.Module,
    seed: int,
    device: torch.device,
    load: Callable[[], nn.Module | None] | None = None,
) -> None:
    """Initialize every parameter from the seed, with the same values in any layout and without communication.

    `load` returns the unsharded module with its weights in host memory; each rank copies its shards. Without `load`,
    the module's `initialize(name, tensor, generator)` fills one full tensor after another, and each rank copies its
    shard. Random values come from the device's generator even with CPU offload: a CPU generator gives other values.
    """
    with seeded(seed, "init"), torch.device("cpu"):
        loaded = None if load is None else load()
    if loaded is None:
        assert isinstance(module, InitializesByName), "a module without `initialize` needs its constructor"
        start_parameters(module, module.initialize, seed, device)
        return
    weights = dict(loaded.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # the module's constructor creates no adapters; `init_adapters` fills them
            if not is_factor(clean_name(name)):
                copy_shard(parameter, weights[clean_name(name)].detach())


@torch.no_grad()
def start_parameters(
    module: nn.Module,
    start: Callable[[str, Tensor, torch.Generator], None],
    seed: int,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill each parameter for whose name `wanted` returns True. Values depend only on the seed and the name."""
    for name, parameter in module.named_parameters():
        name = clean_name(name)
        if wanted(name):
            full = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            start(name, full, generator(device, seed, "init", name))
            copy_shard(parameter, full)


@torch.no_grad()
def start_tensors(module: nn.Module, tensors: Mapping[str, Tensor], seed: int, device: torch.device) -> None:
    """Initialize full tensors that are not in the module, by parameter name, like the module's parameters."""
    if not tensors:
        return
    assert isinstance(module, InitializesByName), "a module without `initialize` draws no tensor by name"
    for name, tensor in tensors.items():
        module.initialize(name, tensor, generator(device, seed, "init", name))


def build_engine(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    pipeline: type[PipelineEngine] = PipelineEngine,
    loss_scale: LossScale | None = None,
) -> TrainingEngine:
    layout = plan.layout
    shared: list[PostBackward] = [*whole_gradients(module, plan, mesh)]
    if layout.tensor is not None:
        shared += partial_gradients(module, layout.tensor, mesh)
    if layout.pipeline is not None:
        assert isinstance(module, LocalStages)
        return pipeline(module, plan, mesh, device, shared, loss_scale)
    losses = mesh.view(LOSS).get_group()  # ranks with different losses; a single rank if all compute the same loss
    return SimpleEngine(
        module, layout.sharding.accumulate, device=device, group=losses, shared=shared, loss_scale=loss_scale
    )


def counted_elsewhere(module: nn.Module, plan: Plan, mesh: Mesh) -> list[Tensor]:
    """Return the last stage's copies of tied parameters. The gradient norm includes only the originals."""
    pipeline = plan.layout.pipeline
    if pipeline is None:
        return []
    assert isinstance(module, LocalStages)
    stage = module.here().get(len(pipeline.stages) - 1)
    if stage is None:
        return []
    return [p for name, p in stage.named_parameters() if clean_name(name) in pipeline.copies]


Owner = tuple[nn.Module, str]  # a module and the name of its parameter


def materialize(module: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    sharding = plan.layout.sharding
    with waiting_on_host(module, pin=sharding.pin_memory and devices.supports(device, "pinned_memory")):
        allocate(module, torch.device("cpu") if sharding.offload else device)
    if sharding.offload:
        _move_what_computes(module, plan, device)
    return module


def allocate(module: nn.Module, device: torch.device) -> nn.Module:
    ties = _ties(module)
    module.to_empty(device=device)
    if ties:
        _tie_again(ties)
        module.to(device)  # moves nothing, but lets FSDP update its list of parameters
    return module


def _move_what_computes(module: nn.Module, plan: Plan, device: torch.device) -> None:
    """Move buffers, ignored modules and unsharded parameters to the device; FSDP moves sharded parameters."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    for path in present(module, plan.layout.modules.ignored):
        module.get_submodule(path).to(device)
    for parameter in whole_parameters(module, plan).values():
        parameter.data = parameter.data.to(device)


def _ties(module: nn.Module) -> list[list[Owner]]:
    owners: dict[nn.Parameter, list[Owner]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((part, name))
    return [shared for shared in owners.values() if len(shared) > 1]


def _tie_again(ties: list[list[Owner]]) -> None:
    """Tie weights again: `to_empty` replaces parameters one by one, which unties them."""
    for (owner, name), *others in ties:
        weight = getattr(owner, name)
        for other, other_name in others:
            setattr(other, other_name, weight)
