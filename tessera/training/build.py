"""Build a trainer from a recipe: data, model, optimizer, engine, guard, checkpoints and callbacks, in this order."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.checkpoint.manager import CheckpointManager
from tessera.config.run_config import RunConfig
from tessera.config.run_length import RunLength
from tessera.core.callback import Callback
from tessera.core.engine import TrainingEngine
from tessera.core.row_source import ENDLESS, RowSource
from tessera.core.spec import Processor
from tessera.core.step_source import StepSource
from tessera.core.task import FrozenModule, Task
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader
from tessera.data.order.step_order import StepSize
from tessera.diffusion.family import GenerationSpec
from tessera.errors import TesseraError
from tessera.inference.frozen import frozen_module
from tessera.models.files.exported_config import keep_base_config
from tessera.models.files.side_files import seal_side_files, side_folder, write_side_files
from tessera.models.processing.conversation import warn_of_another_template
from tessera.observe.anomaly.guard import Guard
from tessera.optim.optimizer import build_optimizer, clip_gradients
from tessera.parallel.apply import build_engine, counted_elsewhere, parallelize
from tessera.parallel.frozen import place_frozen
from tessera.parallel.mesh import DATA, PP, Mesh
from tessera.parallel.plan import Plan
from tessera.parallel.sequence_sharding import RankDataset
from tessera.runtime.collective import Ranks
from tessera.runtime.distributed import World, main_rank_first
from tessera.runtime.gradients import LossScale
from tessera.runtime.rendezvous import name_ranks
from tessera.training.callbacks import CallbackParts, run_callbacks
from tessera.training.early_checks import has_held_out
from tessera.training.ema import Ema
from tessera.training.held_out import HeldOut
from tessera.training.init_weights import fill_copy, frozen_source, initial_weights
from tessera.training.out_of_memory import MemoryAdvice
from tessera.training.setup import NONE, ModelSetup, Objects
from tessera.training.steps import LoaderSteps
from tessera.training.trainer import Trainer
from tessera.workers.servers import start_early

log = logging.getLogger("tessera")


def build_trainer(
    config: RunConfig,
    setup: ModelSetup,
    world: World,
    extra: Sequence[Callback] = (),
    objects: Objects = NONE,
) -> Trainer:
    """Build the trainer of this rank. The module of `setup` is sharded in place.

    `config`: the recipe with every field of the model (see `with_model_resolved`). `extra`: callbacks of the caller.
    """
    config, plan, task = config.on_host(), setup.plan, setup.task
    if plan.layout.modules.compiled:
        task.compile()
    if config.data.workers not in (0, "auto"):
        start_early()
    processor = build_processor(config, setup, required=_reads_samples(config, objects))
    copy = Path(os.path.abspath(config.folder / "processor"))  # absolute, because it is compared with `model.tokenizer`
    # A resumed run uses its own copy of the tokenizer files and does not rewrite it: other ranks may be reading it.
    if world.is_main and config.model.tokenizer != copy:
        keep_side_files(config, setup, processor, copy)
    mesh = Mesh(plan.layout.axes, world.device)
    source, held_out = _read_rows(config, setup, world, mesh, processor, objects)
    rows = source if isinstance(source, RowSource) else None
    if rows is not None:
        config = _with_rows_per_step(config, plan, rows)
    length = run_length(config, rows)
    if world.is_main:
        _log_length(length)
        if config.model.path is not None and (warning := setup.spec.untrained_parts(config.model.path)) is not None:
            log.warning("%s", warning)

    if config.data.workers == "auto" and any(data.decodes_media for data in (rows, held_out) if data is not None):
        start_early()  # worker processes start while the model is built
    module = parallelize(setup.module, plan, mesh, world.device)
    task.setup(_frozen_components(config, setup, mesh, world), world)
    if world.is_main:
        log.info("%s", plan.describe())
    scale = LossScale(config.precision.loss_scale, world.device) if config.precision.compute == "float16" else None
    engine, optimizer, clip = _engine(config, module, plan, mesh, world, scale, objects)
    evaluated = None if held_out is None else HeldOut(config, mesh, held_out, _ranks_here(world))
    guard = _guard(config, plan, mesh, scale)
    ema = None if config.train.ema is None else Ema(config.train.ema, module)
    frozen = frozen_source(config, setup)
    checkpoints = CheckpointManager(config.folder / "checkpoints", config.checkpoint.keep, frozen_source=frozen)
    fill = initial_weights(module, config, setup, world.device)
    parts = CallbackParts(
        config, setup, processor, world, mesh, module, checkpoints, rows, guard, ema, scale, evaluated
    )

    steps = source
    if not isinstance(steps, StepSource):
        steps = _loader_steps(config, length, world, mesh, steps, task, engine)

    def begin() -> None:
        fill()
        checkpoints.leave_out_frozen()

    return Trainer(
        config=config,
        length=length,
        world=world,
        module=module,
        engine=engine,
        initial_weights=begin,
        task=task,
        optimizer=optimizer,
        clip_gradients=clip,
        steps=steps,
        checkpoints=checkpoints,
        callbacks=run_callbacks(parts, extra),
        optimizer_step=guard,
        eval_weights=ema.in_place if ema is not None and ema.settings.evaluate else contextlib.nullcontext,
        eval_batches=evaluated.batches if evaluated is not None else None,
        memory=MemoryAdvice(config, world.size, plan.layout.modules.blocks),
        data_identity="" if rows is None else rows.identity,
    )


def _engine(
    config: RunConfig,
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    world: World,
    scale: LossScale | None,
    objects: Objects,
) -> tuple[TrainingEngine, Optimizer, Callable[[], Tensor]]:
    """Return the engine and the optimizer of the recipe's framework, and the function that clips gradients."""
    if config.framework == "mindspore":
        from tessera.mindspore.build import build_parts  # imported here, because it imports MindSpore

        return build_parts(module, config.optim, world.size)
    trained = [shard.name for shard in plan.param_shards if shard.trained]
    offloaded = plan.layout.sharding.offload
    optimizer = build_optimizer(module, config.optim, world.device, trained, offloaded, objects.optimizer)
    engine = build_engine(module, plan, mesh, world.device, loss_scale=scale)
    return engine, optimizer, _clip(module, plan, mesh, config.optim.clip_norm, optimizer, world.device, scale)


def _guard(config: RunConfig, plan: Plan, mesh: Mesh, loss_scale: LossScale | None) -> Guard:
    return Guard(
        config.guard,
        clip_norm=config.optim.clip_norm,
        warmup=config.optim.schedule.warmup,
        loss_scale=loss_scale,
        data_rank=mesh.position(DATA),
        microbatches=1 if plan.layout.pipeline is None else plan.layout.pipeline.microbatches,
    )


def _read_rows(
    config: RunConfig, setup: ModelSetup, world: World, mesh: Mesh, processor: Processor | None, objects: Objects
) -> tuple[RowSource | StepSource, RowSource | None]:
    """Return the training data of this rank, and its held-out rows (None if the recipe has no held-out data)."""
    has_eval = has_held_out(config) or objects.eval_dataset is not None

    def read() -> tuple[RowSource | StepSource, RowSource | None]:
        with main_rank_first(world):  # the main rank builds the index of samples, and the other ranks read it
            step = _step_size(config, mesh)
            train: RowSource | StepSource = (
                objects.dataset
                if isinstance(objects.dataset, StepSource)
                else build_rows(config, setup, "train", processor, objects.dataset, step)
            )
            held_out = build_rows(config, setup, "eval", processor, objects.eval_dataset) if has_eval else None
        train = _local(train, setup, mesh) if isinstance(train, RowSource) else train
        return train, None if held_out is None else _local(held_out, setup, mesh)

    return _same_on_all_ranks(read)


def _local(rows: RowSource, setup: ModelSetup, mesh: Mesh) -> RowSource:
    """Return the rows of a data set that this rank reads; with context parallelism, only a part of each row."""
    flops = None
    if setup.spec.flops is not None:
        flops = functools.partial(setup.spec.flops, setup.config, training=setup.training)
    sharding = setup.plan.layout.batch_sharding
    return RankDataset(rows, mesh.axes, mesh.root.get_rank(), reports=mesh.reports, sharding=sharding, flops=flops)


def _frozen_components(config: RunConfig, setup: ModelSetup, mesh: Mesh, world: World) -> dict[str, FrozenModule]:
    """Return the frozen models of the task that this rank runs, such as a reference model, with their weights."""
    modules: dict[str, FrozenModule] = {}
    for name, frozen in setup.frozen.items():
        component, position = frozen.component, setup.plan.memory.frozen[name].position
        if frozen.plan is not None:
            module = parallelize(frozen.module, frozen.plan, mesh, world.device)
            fill_copy(module, config, setup, world.device)
        elif position in (None, mesh.position(PP)):
            loaded = frozen_module(component, setup.spec, setup.config, config.model.path, config.train.seed)
            module = place_frozen(loaded, component.residence, mesh, world.device)
        else:
            continue
        modules[name] = FrozenModule(module, world.device, component.residence)
    return modules


def _clip(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    clip_norm: float | None,
    optimizer: Optimizer,
    device: torch.device,
    loss_scale: LossScale | None,
) -> Callable[[], Tensor]:
    elsewhere = counted_elsewhere(module, plan, mesh)

    def clip() -> Tensor:
        norm = clip_gradients(
            optimizer, module.parameters(), device, clip_norm, others=mesh.group(PP), counted_elsewhere=elsewhere
        )
        if loss_scale is not None:
            loss_scale.update(norm)
        return norm

    return clip


def _reads_samples(config: RunConfig, objects: Objects) -> bool:
    """Return whether the run reads samples, which have to be encoded. A `StepSource` makes its own batches."""
    return not isinstance(objects.dataset, StepSource) or has_held_out(config) or objects.eval_dataset is not None


def build_processor(config: RunConfig, setup: ModelSetup, required: bool = True) -> Processor | None:
    """Return the processor of the model; None if it has none, or if it is not required and the recipe names none."""
    if setup.spec.processor is None:
        return None
    folder = _processor_source(config)
    if folder is None and not isinstance(setup.spec, GenerationSpec) and not setup.spec.foreign:
        if not required:
            return None
        raise TesseraError(
            "models of this family need a tokenizer, and the recipe names none",
            where="model.tokenizer",
            fix="set model.tokenizer (or model.path) to a folder with tokenizer.json",
            code="tokenizer.not-named",
        )
    options = {"train_on": tuple(config.data.train_on), **config.data.processor}
    processor = setup.spec.processor(setup.config, folder, **options)
    warn_of_another_template(processor, folder)
    return processor


def keep_side_files(config: RunConfig, setup: ModelSetup, processor: Processor | None, folder: Path) -> None:
    """Copy tokenizer, chat template and other small files of the model folder to the run folder, for later use."""
    weights, make = side_folder(config.model.path), setup.spec.processor
    if processor is None and weights is None:
        return
    read = None if make is None else functools.partial(make, setup.config)
    write_side_files(folder, processor, read=read, source=_processor_source(config), weights=weights)
    keep_base_config(weights, folder)
    seal_side_files(folder)


def _processor_source(config: RunConfig) -> Path | None:
    return config.model.tokenizer or side_folder(config.model.path) or config.model.path


def build_rows(
    config: RunConfig,
    setup: ModelSetup,
    split: Literal["train", "eval"],
    processor: Processor | None,
    dataset: Any = None,
    step: StepSize | None = None,
) -> RowSource:
    """Return the rows of the training or the held-out data.

    `dataset`: a data set object from the caller. `step`: samples per step, if `train.samples_per_step` is set.
    """
    work = None
    if setup.spec.work is not None:
        work = functools.partial(setup.spec.work, setup.config, training=setup.training)
    request = RowRequest(config.data, split, processor, config.train.seed, config.folder / "index", work, dataset, step)
    rows = KINDS.get(config.data.kind)(request)
    if not isinstance(rows, RowSource):
        raise TesseraError(
            f"{config.data.kind} returned a {type(rows).__name__}, which is no RowSource",
            where="data.kind",
            fix="return an object of a class derived from tessera.core.row_source.RowSource; for a torch Dataset or "
            "DataLoader, set data.kind=custom",
            code="data.no-row-source",
        )
    return rows


def _same_on_all_ranks(
    read: Callable[[], tuple[RowSource | StepSource, RowSource | None]],
) -> tuple[RowSource | StepSource, RowSource | None]:
    """Return the result of `read`. An error of one rank is raised on all ranks. Raise if ranks read different data."""
    box: list[tuple[RowSource | StepSource, RowSource | None]] = []

    def identify() -> tuple[str, list[str]]:
        box.append(read())
        return socket.gethostname(), [data.identity if isinstance(data, RowSource) else "" for data in box[0]]

    ranks = Ranks.current().on_all(identify)
    host, identities = ranks[0]
    for number, key in enumerate(("data.train", "data.eval")):
        expected = set(identities[number].split("/"))
        other = [rank for rank, (_, theirs) in enumerate(ranks) if not expected & set(theirs[number].split("/"))]
        if other:
            raise TesseraError(
                f"ranks have different data: {name_ranks(other)} (on {ranks[other[0]][0]}) read other samples than "
                f"rank 0 (on {host})",
                where=key,
                fix="give every rank the same files, or a folder that all of them share",
                code="data.differs-between-ranks",
            )
    return box[0]


def _step_size(config: RunConfig, mesh: Mesh) -> StepSize | None:
    if config.train.samples_per_step is None:
        return None
    together = config.train.micro_batch * mesh.size(DATA)
    return StepSize(config.train.samples_per_step, config.train.global_batch, together)


def _with_rows_per_step(config: RunConfig, plan: Plan, source: RowSource) -> RunConfig:
    """Return the recipe with `train.global_batch` set to the rows of a step, if `train.samples_per_step` is set."""
    samples, rows = config.train.samples_per_step, source.rows_per_step
    if samples is None:
        return config
    if rows is None:
        raise TesseraError(
            f"data of kind {config.data.kind} consists of packed rows, whose samples cannot be counted per step",
            where="train.samples_per_step",
            fix=f"count rows instead: train.global_batch={samples} if each row is one sample",
            code="recipe.samples-of-ready-rows",
        )
    if plan.layout.pipeline is not None and rows != config.train.global_batch:
        raise TesseraError(
            f"train.samples_per_step makes {rows} rows per step, but the pipeline is planned for "
            f"{config.train.global_batch}",
            where="train.global_batch",
            fix=f"train.global_batch={rows}",
            code="layout.rows-differ-from-pipeline",
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": rows})})


def run_length(config: RunConfig, source: RowSource | None) -> RunLength:
    """Return the number of steps of the run and of an epoch. `source`: None for a `StepSource`, which has no rows."""
    rows, train = ENDLESS if source is None else len(source), config.train
    in_epochs = [
        name
        for name, every in (("train.eval_every", train.eval_interval), ("checkpoint.every", config.checkpoint.interval))
        if every.unit == "epochs"
    ]
    in_epochs = [*(["train.epochs"] if train.steps is None else []), *in_epochs]
    if in_epochs and rows >= ENDLESS:
        raise TesseraError(
            "the length of the data is unknown, so epochs cannot be counted",
            where=in_epochs[0],
            fix="count in steps, or set data.stream=false"
            if config.data.stream
            else "count in steps, or give the data set a __len__",
            code="data.unknown-length",
        )
    rows_per_epoch = rows if rows < ENDLESS else None
    length = RunLength.of(train.steps, train.epochs, train.global_batch, rows_per_epoch, train.samples_per_step)
    return replace(length, packed=config.data.pack and config.data.kind.isidentifier() and config.data.kind != "custom")


def _log_length(length: RunLength) -> None:
    log.info("length        %s", length.describe())
    if (warning := length.warning()) is not None:
        log.warning("%s", warning)


def _ranks_here(world: World) -> int:
    """Return how many ranks of this run are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


def _loader_steps(
    config: RunConfig,
    length: RunLength,
    world: World,
    mesh: Mesh,
    source: RowSource,
    task: Task,
    engine: TrainingEngine,
) -> LoaderSteps:
    def open_loader(rows: RowSource, first: int) -> Loader:
        return Loader(
            rows,
            global_batch=length.rows_per_step,
            micro_batch=config.train.micro_batch,
            rank=mesh.position(DATA),
            ranks=mesh.size(DATA),
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            start_row=first,
            device=world.device,
            sample_timeout_s=config.data.sample_timeout_s,
            steps=length.steps - first // length.rows_per_step,
            ranks_here=_ranks_here(world),
            prepare=task.prepare,
            encode=functools.partial(engine.encode, task) if task.encode_steps > 1 else None,
            encode_steps=task.encode_steps,
        )

    return LoaderSteps(source, open_loader)
