"""From a recipe to a trainer: the ten steps of one run, in order, each a call into the room that owns it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.core.arguments import check_arguments
from tessera.core.dist import World, main_rank_first
from tessera.core.errors import TesseraError
from tessera.core.run_config import RunConfig
from tessera.core.types import Processor, RowSource
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader, decodes_media
from tessera.data.processes.launch import begin_early
from tessera.data.side_files import seal_side_files, side_folder, write_side_files
from tessera.optim.adamw import AdamW
from tessera.optim.clip import norm_and_factor
from tessera.optim.groups import build_optimizer
from tessera.parallel.apply import parallelize
from tessera.parallel.axes import DATA, PP
from tessera.parallel.engines import build_engine, counted_elsewhere
from tessera.parallel.local_rows import LocalRows
from tessera.parallel.mesh import Mesh, build_mesh
from tessera.parallel.plan import Plan
from tessera.tasks import TASKS
from tessera.train.callbacks import Callback
from tessera.train.describe import Described
from tessera.train.ema import Ema
from tessera.train.export import Export
from tessera.train.first_weights import first_weights
from tessera.train.guard.guard import Guard
from tessera.train.held_out import HeldOut
from tessera.train.meter import Meter, TensorBoard
from tessera.train.profile.window import Profile
from tessera.train.records import Ledger, Quarantine
from tessera.train.report import Report
from tessera.train.safety import build_checks, build_ema, build_guard
from tessera.train.signals import StopOnSignal
from tessera.train.trainer import Trainer
from tessera.train.watch import Watch

log = logging.getLogger("tessera")


def build_trainer(config: RunConfig, described: Described, world: World, extra: Sequence[Callback] = ()) -> Trainer:
    """`described` is used up: its module becomes this rank's part of the model. `config` is the recipe with every field
    of the model (see `with_model_resolved`)."""
    spec, plan = described.spec, described.plan
    make_task, options = TASKS.get(config.train.task or spec.task), config.train.task_options
    check_arguments(make_task, options, f"task {config.train.task or spec.task}", "train.task_options")
    task = make_task(**options)
    check: Callable[[nn.Module], None] | None = getattr(task, "check", None)
    if check is not None:
        check(described.module)
    if plan.compiled and hasattr(task, "compile"):
        task.compile()
    if config.data.workers not in (0, "auto"):
        begin_early()
    processor = build_processor(config, described)
    own_copy = Path(os.path.abspath(config.folder / "processor"))  # as the paths of a located recipe are
    # A resumed run reads its own copy: writing it again would pull it from under the ranks that are still reading.
    if world.is_main and config.model.tokenizer != own_copy:
        keep_side_files(config, described, processor, own_copy)
    mesh = build_mesh(plan.axes, world.device)
    has_eval = bool(config.data.eval or config.data.options.get("eval"))
    with main_rank_first(world):  # it builds the index, which may take long; the others find it
        source = _local(build_rows(config, described, "train", processor), described, mesh)
        held_out = _local(build_rows(config, described, "eval", processor), described, mesh) if has_eval else None

    if config.data.workers == "auto" and any(decodes_media(rows) for rows in (source, held_out) if rows is not None):
        begin_early()  # while the model is built
    module = parallelize(described.module, plan, mesh, world.device)
    trained = [piece.name for piece in plan.pieces if piece.trained]
    optimizer = build_optimizer(module, config.optim, world.device, trained, offloaded=plan.offload)
    if world.is_main:
        log.info("%s", plan.describe())
    engine = build_engine(module, plan, mesh, world.device)
    evaluated = None if held_out is None else HeldOut(config, mesh, held_out, _ranks_here(world))
    guard, ema = build_guard(config, plan, mesh, source), build_ema(config, module)
    checks = build_checks(config, plan, mesh, module, processor, world.device)
    return Trainer(
        config=config,
        world=world,
        module=module,
        engine=engine,
        first_weights=first_weights(module, config, described, world.device),
        task=task,
        optimizer=optimizer,
        finish_gradients=_finish(module, plan, mesh, config.optim.clip_norm, optimizer),
        loader=_loader_from(config, world, mesh, source, guard),
        checkpoints=CheckpointManager(config.folder / "checkpoints", config.checkpoint.keep),
        callbacks=[
            *_callbacks(config, described, processor, source, ema),
            *checks,
            *([evaluated] if evaluated is not None else []),
            *extra,
            *_profile(config, plan),
            *_watch(config, world, plan),
        ],
        stepper=guard,
        eval_weights=ema.in_place if ema is not None and ema.settings.evaluate else contextlib.nullcontext,
        eval_batches=evaluated.batches if evaluated is not None else None,
        data_identity=str(getattr(source, "identity", "")),
    )


def _local(rows: RowSource, described: Described, mesh: Mesh) -> RowSource:
    """What of the rows is this rank's."""
    flops = None
    if described.spec.flops is not None:
        flops = functools.partial(described.spec.flops, described.config, training=described.training)
    context = described.plan.context
    return LocalRows(rows, mesh.axes, mesh.root.get_rank(), reports=mesh.reports, context=context, flops=flops)


def _finish(
    module: nn.Module, plan: Plan, mesh: Mesh, clip_norm: float | None, optimizer: AdamW
) -> Callable[[Tensor], Tensor]:
    others, elsewhere = mesh.group(PP), counted_elsewhere(module, plan, mesh)

    def finish(count: Tensor) -> Tensor:
        norm, optimizer.scale = norm_and_factor(
            module.parameters(), count, clip_norm, others=others, counted_elsewhere=elsewhere
        )
        return norm

    return finish


def build_processor(config: RunConfig, described: Described) -> Processor | None:
    if described.spec.processor is None:
        return None
    folder = _processor_source(config)
    if folder is None and described.spec.needs_processor_files:
        raise TesseraError(
            "this family needs a tokenizer",
            where="model.tokenizer",
            fix="set model.tokenizer (or model.path) to a folder with tokenizer.json",
        )
    options = {"train_on": tuple(config.data.train_on), **config.data.processor}
    return described.spec.processor(described.config, folder, **options)


def keep_side_files(config: RunConfig, described: Described, processor: Processor | None, folder: Path) -> None:
    """The run's own copy of what lies beside the weights: it is resumed and exported from that, on any machine."""
    weights, make = side_folder(config.model.path), described.spec.processor
    if processor is None and weights is None:
        return
    read = None if make is None else functools.partial(make, described.config)
    write_side_files(folder, processor, read=read, own=_processor_source(config), weights=weights)
    seal_side_files(folder)


def _processor_source(config: RunConfig) -> Path | None:
    return config.model.tokenizer or side_folder(config.model.path) or config.model.path


def build_rows(
    config: RunConfig, described: Described, split: Literal["train", "eval"], processor: Processor | None
) -> RowSource:
    work = None
    if described.spec.work is not None:
        work = functools.partial(described.spec.work, described.config, training=described.training)
    request = RowRequest(config.data, split, processor, config.train.seed, config.folder / "index", work)
    return KINDS.get(config.data.kind)(request)


def _ranks_here(world: World) -> int:
    """Of this run, on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


def _loader_from(
    config: RunConfig, world: World, mesh: Mesh, source: RowSource, guard: Guard
) -> Callable[[int], Loader]:
    def start(row: int) -> Loader:
        return Loader(
            guard.rows(source),
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            rank=mesh.position(DATA),
            ranks=mesh.size(DATA),
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            start_row=row,
            device=world.device,
            sample_timeout_s=config.data.sample_timeout_s,
            steps=config.train.steps - row // config.train.global_batch,
            ranks_here=_ranks_here(world),
        )

    return start


def _callbacks(
    config: RunConfig, described: Described, processor: Processor | None, source: RowSource, ema: Ema | None
) -> list[Callback]:
    callbacks: list[Callback] = [StopOnSignal(), Meter(config.log.every)]
    if config.log.tensorboard:
        callbacks.append(TensorBoard())
    callbacks += [Ledger(), Quarantine(source.bad_samples, getattr(source, "bad_count", 0))]
    if ema is not None:
        callbacks.append(ema)
    if config.checkpoint.export:
        average = ema.in_place if ema is not None and ema.settings.export else None
        callbacks.append(Export(described.spec, described.config, processor, described.adapters, average))
    callbacks.append(Report())
    return callbacks


def _profile(config: RunConfig, plan: Plan) -> list[Callback]:
    return [Profile(config.profile, plan.blocks)] if config.profile.steps is not None else []


def _watch(config: RunConfig, world: World, plan: Plan) -> list[Callback]:
    """Last of all, so that it still watches while the others end."""
    return [Watch(plan.blocks, config.parallel)] if config.parallel.watch and world.size > 1 else []
