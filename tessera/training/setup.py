"""Set up a run without weights: the model on the meta device with its adapters, its plan and its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tessera.checkpoint.weights import check_config_numbers
from tessera.config.run_config import LoraSection, PrecisionSection, RunConfig
from tessera.config.run_length import check_batch
from tessera.core.model_plan import ModelPlan
from tessera.core.outputs import REWARDS
from tessera.core.spec import FULL, Component, ModelSpec, Training
from tessera.core.task import Task
from tessera.diffusion.family import GenerationSpec
from tessera.errors import TesseraError
from tessera.lora.export import check_forms
from tessera.lora.load import part_of, settled, targets_origin
from tessera.lora.modules import add_adapters, find_adapters, trained_in_full, with_adapters
from tessera.lora.select import Adapters, spelled_out
from tessera.mindspore.limits import check_model
from tessera.models import build_on_meta, resolve
from tessera.models.files.exported_config import exported_config
from tessera.models.module import spec_of_object
from tessera.optim.optimizer import check_offload, parameter_groups, state_bytes
from tessera.parallel.frozen import FrozenBytes, frozen_bytes
from tessera.parallel.make_plan import make_plan, parameter_bytes
from tessera.parallel.mesh import CONTEXT, DATA
from tessera.parallel.plan import Plan, Workload
from tessera.parallel.plan_text import DescribedPlan
from tessera.runtime import device as devices
from tessera.tasks import build_task
from tessera.tasks.language import LanguageTask
from tessera.training.best import check_measured
from tessera.training.passes import training_of
from tessera.weights.layouts import detect_layout


@dataclass(frozen=True)
class Objects:
    """Hold the parts of a run that the caller of `tessera.train` passed as objects. None: the recipe names the part."""

    model: nn.Module | None = None
    task: Task | None = None
    dataset: Any = None  # a torch Dataset or DataLoader, a RowSource, a StepSource, or a sequence or iterable
    eval_dataset: Any = None
    # Function from parameter groups to an optimizer, such as an optimizer class.
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None

    def __post_init__(self) -> None:
        """Raise if an object has the wrong type."""
        wanted = {
            "model": (self.model, isinstance(self.model, nn.Module), "an nn.Module"),
            "task": (self.task, isinstance(self.task, Task), "an object of a subclass of tessera.core.task.Task"),
            "optimizer": (self.optimizer, callable(self.optimizer), "a function of parameter groups, such as a class"),
        }
        for name, (value, fits, what) in wanted.items():
            if value is not None and not fits:
                kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
                raise TesseraError(
                    f"the argument {name} is {kind}", where=f"{name}=...", allowed=[what], code="run.wrong-object-type"
                )

    def settings(self) -> dict[str, Any]:
        """Return the recipe keys that objects require, with their values, such as data.kind=custom for a dataset."""
        settings: dict[str, Any] = {}
        if self.model is not None:
            settings["model.family"] = "module"
        if self.dataset is not None:
            settings["data.kind"] = "custom"
        return settings

    @property
    def names(self) -> list[str]:
        """Return the names of the objects, for `run.json`."""
        return [name for name, value in vars(self).items() if value is not None]

    def check_resumed(self, recorded: list[str]) -> None:
        """Raise if a resume lacks an object that the run began with. `recorded`: names in `run.json`."""
        missing = [name for name in recorded if name not in self.names]
        if missing:
            words = ", ".join(f"{name}=..." for name in missing)
            raise TesseraError(
                f"the run began with Python objects, which its folder does not contain: {', '.join(missing)}",
                where="tessera.resume",
                fix=f"give them again: tessera.resume(folder, {words})",
                code="run.object-missing",
            )


NONE = Objects()
HEAD_PATH = "head"


@dataclass(frozen=True)
class FrozenSetup:
    """Hold a frozen model of the task, on the meta device."""

    component: Component
    module: nn.Module
    plan: Plan | None  # how a model with stage "split" is split over ranks; None: another stage


@dataclass(frozen=True)
class ModelSetup:
    """Hold the model of a recipe on the meta device, with its plan and its task."""

    spec: ModelSpec
    config: Any
    module: nn.Module
    plan: DescribedPlan
    lora: LoraSection | None = None  # `model.lora` with explicit target modules
    adapters: Adapters = field(default_factory=dict)
    task: Task = field(default_factory=LanguageTask)
    frozen: Mapping[str, FrozenSetup] = field(default_factory=dict)  # frozen models of the task, by name

    @cached_property
    def training(self) -> Training:
        """Return how often a step computes each matrix product (cached; must be read before the model is sharded)."""
        trained = [shard.name for shard in self.plan.param_shards if shard.trained]
        passes = training_of(self.module, self.spec.main.plan(self.config), trained)
        shares = self.task.computed_shares
        return {**passes, **{part: passes.get(part, FULL).scaled(share) for part, share in shares.items()}}


def build_meta_model(config: RunConfig, world_size: int, objects: Objects = NONE) -> ModelSetup:
    """Build the model on the meta device and plan its layout. Needs no process group and no accelerator.

    `objects`: parts that the caller of `tessera.train` passed as objects.
    """
    config = config.on_host()
    devices.check_name(config.train.device)
    spec, model_config, task = _model_and_task(config, objects)
    if config.framework == "mindspore":
        check_model(spec.name, model_config, objects.names)
    module = build_on_meta(spec, model_config)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    lora, adapters = _add_adapters(config, spec, model_config, module)
    names = {name for name, _ in module.named_parameters()}
    model_plan = _with_shares(spec.main.plan(model_config), task.computed_shares)
    plan = make_plan(
        config.parallel,
        model_plan if lora is None else with_adapters(model_plan),
        module,
        world_size,
        precision=resolve_precision(config),
        freeze=config.model.freeze,
        workload=_workload(config, spec, model_config),
        state=state_bytes(config.optim, module),
    )
    if config.framework == "mindspore":
        plan = unsharded(plan)
    _check_keys(config, spec, module, plan, objects)
    task.bind(spec, model_config)
    task.check(config, module)
    frozen = {
        name: _frozen_setup(name, component, config, spec, model_config, world_size)
        for name, component in task.components(config, spec).items()
    }
    plan = replace(
        plan,
        parameters=plan.parameters
        # The plan lacks parameters that quantization replaced by buffers.
        + sum(size for name, size in sizes.items() if name not in names),
        memory=replace(
            plan.memory,
            frozen={name: _frozen_bytes(part, plan) for name, part in frozen.items()},
            encoded_ahead=_encoded_ahead(config, spec, model_config, task, plan),
        ),
    )
    return ModelSetup(spec, model_config, module, plan, lora, adapters, task, frozen)


def _with_shares(plan: ModelPlan, shares: Mapping[str, float]) -> ModelPlan:
    """Return the plan with lower costs of pipeline units of which a task computes a share only."""
    units = (replace(unit, cost=unit.cost * shares.get(unit.pattern, 1.0)) for unit in plan.units)
    return replace(plan, units=tuple(units))


def unsharded(plan: DescribedPlan) -> DescribedPlan:
    """Return the plan without FSDP: every rank has all weights, and the engine itself sums gradients over ranks."""
    return replace(plan, layout=replace(plan.layout, sharding=replace(plan.layout.sharding, active=False)))


def _check_keys(config: RunConfig, spec: ModelSpec, module: nn.Module, plan: Plan, objects: Objects) -> None:
    """Raise if keys of the optimizer or of evaluation do not fit the model or its layout."""
    parameter_groups(module, config.optim, [shard.name for shard in plan.param_shards if shard.trained])
    if config.parallel.offload and objects.optimizer is None:
        check_offload(config.optim)
    check_measured(config)
    answers = config.train.generate_every or config.evaluation.tasks
    if answers and plan.layout.axes.size(CONTEXT) > 1 and not isinstance(spec, GenerationSpec):
        raise TesseraError(
            "answers cannot be generated with parallel.cp above 1: growing prompts are not split over ranks",
            where="train.generate_every, evaluation.tasks",
            fix="leave train.generate_every and evaluation.tasks out, or set parallel.cp=1",
            code="layout.generation-with-cp",
        )


def _model_and_task(config: RunConfig, objects: Objects) -> tuple[ModelSpec, Any, Task]:
    """Return the model family, the configuration of the model, and the task. Raise if they do not fit."""
    path = config.model.path
    layout = None if path is None or (path / "config.yaml").is_file() else detect_layout(path)
    if path is not None and layout is not None:
        check_config_numbers(layout.config(), path)
    section = config.model
    named = None if config.train.task is None else build_task(config.train.task, config.train.task_options)
    task = objects.task or named
    if task is not None and REWARDS in task.reads and section.head is None:
        section = section.model_copy(update={"head": "reward"})
    spec, model_config = resolve(section) if objects.model is None else spec_of_object(objects.model)
    task = task or build_task(spec.task, config.train.task_options)
    _check_removed_methods(task)
    rewards = spec.gives(REWARDS)
    check_reads(
        task,
        spec,
        where="train.task" if config.model.head is None else "model.head",
        fix="train.task=reward trains a reward model; model.family=transformers trains the class by its own loss"
        if rewards
        else "model.head=reward, or leave it out"
        if REWARDS in task.reads
        else None,
    )
    if rewards and config.checkpoint.export and (config.model.lora is None or config.model.lora.merge):
        exported_config(model_config, None, torch.float32, rewards)  # raises if this model cannot be exported
    return spec, model_config, task


def _check_removed_methods(task: Task) -> None:
    """Raise if a task defines a method of an earlier version of `Task`, which is no longer called."""
    for name in ("frozen_components", "frozen_parts"):
        if hasattr(task, name):
            raise TesseraError(
                f"{type(task).__name__}.{name} is a method of an earlier version: Task.components replaced it",
                where="train.task",
                fix="return the frozen models from components(config, spec)",
                code="task.removed-method",
            )


def _add_adapters(
    config: RunConfig, spec: ModelSpec, model_config: Any, module: nn.Module
) -> tuple[LoraSection | None, Adapters]:
    """Add the adapters of the recipe to the model. Return its LoRA section with explicit targets, and the adapters."""
    lora, tp = config.model.lora, config.parallel.tp
    if lora is None:
        return None, {}
    if lora.quantize is not None and tp > 1:
        raise TesseraError(
            f"quantized weights are unsharded on every rank, and parallel.tp={tp} would split them",
            where="model.lora.quantize",
            fix="set parallel.tp=1, and use data ranks or a pipeline instead",
            code="layout.quantized-with-tp",
        )
    if lora.dora and tp > 1:
        raise TesseraError(
            f"dora needs the norms of full rows, and parallel.tp={tp} splits them",
            where="model.lora.dora",
            fix="set parallel.tp=1 or model.lora.dora=false",
            code="layout.dora-with-tp",
        )
    if spec.gives(REWARDS) and HEAD_PATH not in lora.modules_to_save:  # the reward head is new and has to be trained
        lora = lora.model_copy(update={"modules_to_save": [*lora.modules_to_save, HEAD_PATH]})
    weight_map, origin = spec.main.weight_map(model_config), targets_origin(lora)
    names = [name for name, _ in module.named_parameters()]
    lora = settled(lora, names, weight_map, part_of(config.model.path))
    check_forms(lora.forms, weight_map, not isinstance(spec, GenerationSpec), "model.lora.forms")
    adapters = find_adapters(lora, module, spec.main.plan(model_config), origin)
    add_adapters(module, adapters, lora.dropout, lora.quantize, trained_in_full(lora, module, adapters))
    return spelled_out(lora, adapters), adapters


def _encoded_ahead(
    config: RunConfig, spec: ModelSpec, model_config: Any, task: Task, plan: Plan
) -> tuple[int, int] | None:
    """Return how many steps frozen encoders encode at a time, and the bytes of these encoded rows on a rank.

    Rows are assumed to have their full length. Return None if each step is encoded separately, or if the
    family has no example row.
    """
    if task.encode_steps == 1 or spec.example is None:
        return None
    with torch.device("meta"):
        row = spec.example(model_config, config.data.length)
    size = sum(tensor.nbytes for tensor in row.tensors.values() if tensor.is_floating_point())
    rows = config.train.global_batch // plan.layout.axes.size(DATA)
    return task.encode_steps, task.encode_steps * rows * size


def resolve_precision(config: RunConfig) -> PrecisionSection:
    """Return the precision section with its automatic values resolved for the device of the run."""
    config = config.on_host()
    return config.precision.resolved(accelerator=devices.is_accelerator(config.train.device))


def check_rows(config: RunConfig, plan: Plan) -> None:
    """Raise if the rows of a step cannot be divided among the ranks. Custom data kinds, and recipes with
    `train.samples_per_step`, are not checked."""
    if config.data.kind.isidentifier() and config.data.kind != "custom" and config.train.samples_per_step is None:
        check_batch(config.train.global_batch, config.train.micro_batch, plan.layout.axes.size(DATA))


def precision_guess(config: RunConfig) -> str:
    """Return a note for plans made on a CPU if an accelerator would compute in another precision; otherwise ""."""
    precision = config.precision
    there = precision.resolved(accelerator=True).compute
    if config.train.device != "auto" or devices.is_accelerator("auto") or there == resolve_precision(config).compute:
        return ""
    return (
        f"as on the CPU, since this machine has no accelerator; on one a run computes and sends {there}: "
        f"`--device NAME` or train.device={devices.ACCELERATORS[0]} counts that"
    )


def _frozen_setup(
    name: str, component: Component, config: RunConfig, spec: ModelSpec, model_config: Any, world_size: int
) -> FrozenSetup:
    """Return a frozen model on the meta device. With `stage="split"` it is sharded like the trained model, and
    stored in bfloat16 if the run computes in bfloat16, otherwise in the dtype of the trained weights."""
    if component.trained:
        raise TesseraError(
            f"the component {name} of the task is marked as trained, but only the main model can be trained",
            where="train.task",
            fix=f"return Component(trained=False, ...) for {name} from Task.components",
            code="task.trained-component",
        )
    module = build_on_meta(replace(spec, main=component), model_config)
    if component.stage != "split":
        return FrozenSetup(component, module, None)
    if config.parallel.pp > 1:
        raise TesseraError(
            f"the second copy of the model that this objective needs ({name}) cannot be split over pipeline stages",
            where="parallel.pp",
            fix="train adapters (model.lora: {}), which need no second copy, or set parallel.pp=1",
            code="layout.reference-with-pp",
        )
    precision = resolve_precision(config)
    stored = "bfloat16" if precision.compute == "bfloat16" else precision.weights  # frozen weights need no fp32 copy
    plan = make_plan(
        config.parallel,
        component.plan(model_config),
        module,
        world_size,
        precision=precision.model_copy(update={"weights": stored}),
        workload=_workload(config, spec, model_config),
    )
    return FrozenSetup(component, module, plan)


def _frozen_bytes(frozen: FrozenSetup, plan: Plan) -> FrozenBytes:
    if frozen.plan is None:
        return frozen_bytes(frozen.module, frozen.component, plan.layout.axes, plan.layout.pipeline)
    return FrozenBytes(parameter_bytes(frozen.plan), frozen.component.residence)


def _workload(config: RunConfig, spec: ModelSpec, model_config: Any) -> Workload:
    tokens, elements = config.data.length * config.train.micro_batch, {}
    if spec.example is not None:
        with torch.device("meta"):
            typical = spec.example(model_config, tokens)
        streams = spec.main.plan(model_config).streams
        elements = {name: stream.elements(typical) for name, stream in streams.items() if stream.module}
    return Workload(tokens, elements, config.train.global_batch, config.train.micro_batch)


def with_model_resolved(config: RunConfig, setup: ModelSetup) -> RunConfig:
    """Return the recipe with every field of the model config, so that a resume needs no preset and no config folder."""
    full: dict[str, Any] = {"family": config.model.family or setup.spec.name, "preset": None}
    full["config"] = setup.config.model_dump(mode="json")
    full["lora"] = setup.lora
    full["head"] = "reward" if setup.spec.gives(REWARDS) else "language"
    model = config.model.model_copy(update=full)
    return config.model_copy(update={"model": model, "precision": resolve_precision(config)})


def check_reads(task: Task, spec: ModelSpec, where: str, fix: str | None = None) -> None:
    """Raise unless the model family declares every output that the task reads. A family that declares no outputs is not
    checked."""
    for name in task.reads:
        if spec.outputs is not None and not spec.gives(name):
            raise TesseraError(
                f"{type(task).__name__} reads the output {name!r}, which {spec.name} models do not return",
                where=where,
                allowed=spec.outputs,
                fix=fix,
                code="task.output-not-given",
            )
