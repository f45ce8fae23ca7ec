"""List the callbacks of a run in order, and make the callbacks that a recipe names by import path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tessera.checkpoint.manager import CheckpointManager
from tessera.config.registry import Maker, check_arguments, import_object
from tessera.config.run_config import CallbackSection, RunConfig, TrainSection
from tessera.core.callback import Callback
from tessera.core.row_source import RowSource
from tessera.core.spec import Processor
from tessera.diffusion.family import family_of
from tessera.diffusion.sampling.over_ranks import ModelOverRanks
from tessera.diffusion.sampling.previews import Previews
from tessera.errors import TesseraError
from tessera.inference.found_model import parts_folder
from tessera.lora.select import is_factor
from tessera.observe.anomaly.guard import Guard
from tessera.observe.profiler import StepProfiler
from tessera.observe.report.callbacks import Report, SessionHistory
from tessera.observe.watchdog.watchdog import Watchdog
from tessera.parallel.mesh import Mesh
from tessera.runtime.distributed import World
from tessera.runtime.gradients import LossScale
from tessera.training.benchmark_eval import BenchmarkEval
from tessera.training.best import best_callbacks
from tessera.training.checks import Coverage, KeepLossScale
from tessera.training.ema import Ema
from tessera.training.export import Export
from tessera.training.held_out import GenerationEval, HeldOut, generating_model
from tessera.training.metrics import Meter
from tessera.training.records import Ledger, Quarantine
from tessera.training.setup import ModelSetup
from tessera.training.signals import StopOnSignal
from tessera.training.trackers import Trackers

_CALLBACK = Maker("callback", bases=(Callback,))


@dataclass(frozen=True)
class CallbackParts:
    """Hold the parts of a run that its callbacks need."""

    config: RunConfig
    setup: ModelSetup
    processor: Processor | None
    world: World
    mesh: Mesh
    module: nn.Module
    checkpoints: CheckpointManager
    rows: RowSource | None  # training rows; None: batches come from a `StepSource`
    guard: Guard
    ema: Ema | None
    loss_scale: LossScale | None
    held_out: HeldOut | None


def run_callbacks(parts: CallbackParts, extra: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run in the order in which they are called; after an error the order is reversed.

    The guard is not in the list: it applies the update of a step, and the trainer calls it before all others.
    """
    config, watched = parts.config, parts.config.parallel.watch and parts.world.size > 1
    blocks, history = parts.setup.plan.layout.modules.blocks, SessionHistory()
    callbacks: list[Callback | None] = [
        history,  # records when the run starts, resumes and ends; writes the report of a run that failed
        StopOnSignal(),  # handles signals, also while the other callbacks start
        Meter(config.log.every),  # writes `metrics.jsonl`, which later callbacks read
        Trackers(config.log) if config.log.trackers else None,  # sends `metrics.jsonl` to experiment trackers
        Ledger(),  # records the samples of each step
        _quarantine(parts),  # records unusable samples; ends a run that has too many
        parts.ema,  # averages the weights; later callbacks evaluate and export the average
        _export(parts) if config.checkpoint.export else None,  # writes the trained model at the end
        Report(history),  # writes `report.html` at the end
        _coverage(parts),  # checks that every trained tensor receives a gradient
        _generation(parts) if config.train.generate_every else None,  # generates answers or previews during training
        _benchmarks(parts) if config.evaluation.tasks else None,  # scores the model on benchmarks during training
        KeepLossScale(parts.loss_scale) if parts.loss_scale is not None else None,  # saves the loss scale of float16
        parts.held_out,  # reads held-out data; ends its worker processes with the run
        # `checkpoint.keep_best`, `train.early_stop`
        *best_callbacks(config, parts.held_out is not None or bool(config.evaluation.tasks), parts.checkpoints),
        *named_callbacks(config.train),  # `train.callbacks`
        *extra,  # callbacks of the caller of `tessera.train`
        StepProfiler(config.profile, blocks) if config.profile.steps is not None else None,
        Watchdog(blocks, config.parallel)
        if watched
        else None,  # last in the list: watches the other ranks until all callbacks have ended
    ]
    return [callback for callback in callbacks if callback is not None]


def _quarantine(parts: CallbackParts) -> Quarantine:
    share, rows = parts.config.data.max_bad_share, parts.rows
    if rows is None:
        return Quarantine(max_bad_share=share, guarded=lambda: parts.guard.left_out)
    return Quarantine(rows.bad_samples, rows.bad_count, share, guarded=lambda: parts.guard.left_out)


def _export(parts: CallbackParts) -> Export:
    setup, ema = parts.setup, parts.ema
    average = ema.in_place if ema is not None and ema.settings.export else None
    trained = [shard.name for shard in setup.plan.param_shards if shard.trained and not is_factor(shard.name)]
    return Export(setup.spec, setup.config, parts.processor, setup.adapters, average, trained if setup.adapters else [])


def _coverage(parts: CallbackParts) -> Coverage | None:
    policy = parts.config.guard.coverage
    if policy == "auto":
        policy = "warn" if parts.setup.spec.foreign else "stop"
    names = [shard.name for shard in parts.setup.plan.param_shards if shard.trained]
    return None if policy == "off" else Coverage(names, policy)


def _generation(parts: CallbackParts) -> Callback:
    config, spec, plan, device = parts.config, parts.setup.spec, parts.setup.plan, parts.world.device
    family = family_of(spec, parts.setup.config)
    if family is not None:
        over_ranks = ModelOverRanks(parts.module, family, plan, parts.mesh, device)
        return Previews(config, parts_folder(config), over_ranks)
    model = generating_model(spec, parts.module, plan, parts.mesh, device)
    return GenerationEval(config, parts.processor, model)


def _benchmarks(parts: CallbackParts) -> BenchmarkEval:
    setup = parts.setup
    model = generating_model(setup.spec, parts.module, setup.plan, parts.mesh, parts.world.device)
    return BenchmarkEval(parts.config, setup, parts.processor, model)


def named_callbacks(section: TrainSection) -> list[Callback]:
    """Return the callbacks that `train.callbacks` names, in order."""
    callbacks: list[Callback] = []
    for number, entry in enumerate(section.callbacks):
        named = entry if isinstance(entry, CallbackSection) else CallbackSection(name=entry)
        where = f"train.callbacks.{number}"
        make = import_object(named.name, where)
        _CALLBACK.check(make, named.name, where)
        check_arguments(make, named.options, named.name, f"{where}.options")
        callback = make(**named.options)
        if not isinstance(callback, Callback):
            raise TesseraError(
                f"{named.name} returned a {type(callback).__name__}, which is no Callback",
                where=where,
                fix="derive the class from tessera.core.callback.Callback",
                code="recipe.no-callback",
            )
        callbacks.append(callback)
    return callbacks
