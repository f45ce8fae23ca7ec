"""Train or resume a run with one call."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tessera.config.reader import dump_yaml, read_mapping
from tessera.config.run_config import ModelSection, RunConfig, load_config
from tessera.config.run_paths import find_file, located, moved, no_run
from tessera.config.saved_recipe import in_keys_of_today
from tessera.config.trust import Trust, check_trusted, named_code, remember
from tessera.core.callback import Callback
from tessera.core.task import Task
from tessera.errors import TesseraError, first_line
from tessera.hub.config import with_local_folders
from tessera.inference.load import load
from tessera.inference.weight_source import CONFIG, RUN_FILE, run_exists, saved_config
from tessera.mindspore.limits import check_installed
from tessera.models.files.side_files import SEAL, damaged_side_files
from tessera.observe.report.plot import Plot, table_of
from tessera.runtime import distributed as dist
from tessera.runtime import log
from tessera.runtime.collective import Ranks
from tessera.runtime.files import last_step, read_json_mapping, read_metrics
from tessera.runtime.launcher import is_scheduler, read_msrun
from tessera.training.build import build_trainer
from tessera.training.callbacks import named_callbacks
from tessera.training.early_checks import check_evaluated
from tessera.training.given_rows import KINDS, GivenRows, as_records
from tessera.training.init_weights import check_first_weights
from tessera.training.run_folder import PublishRun, RunFolder, check_fresh, given_objects, read_from_old_run, writable
from tessera.training.setup import ModelSetup, Objects, build_meta_model, check_rows, with_model_resolved
from tessera.training.trackers import check_trackers


@dataclass(frozen=True)
class Run:
    """Describe the result of `train` or `resume`."""

    folder: Path
    checkpoint: Path | None
    stopped: str | None = None  # why the run was stopped before its last step; a resume continues it
    ended_early: str | None = None  # why the run completed before its last step, such as early stopping
    # The model that was passed to `train` as an object.
    module: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def model(self) -> nn.Module:
        """Return the trained model, as `tessera.load(run.folder)` does. If a model object was passed to `train`,
        return a copy of it with the trained weights: the object itself is not changed."""
        if self.module is None:
            return load(self.folder)[0]
        return load(self.folder, model=copy.deepcopy(self.module))[0].module

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`: one for each step, and one for each evaluation."""
        return read_metrics(self.folder / "metrics.jsonl")

    def plot(self) -> Plot:
        """Return the charts of the report, which a notebook shows."""
        return Plot(self.folder)

    def __repr__(self) -> str:
        saved = "no checkpoint" if self.checkpoint is None else self.checkpoint.name
        end = f"; stopped: {self.stopped}" if self.stopped else ""
        return f"Run({self.folder}: {last_step(self.folder / 'metrics.jsonl')} steps, {saved}{end})"

    def _repr_html_(self) -> str:
        return table_of(self.folder)


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    model: nn.Module | None = None,
    task: Task | None = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> Run:
    """Start a run. Raise if the run folder contains a run, unless `overwrite` is set.

    `dataset` and `eval_dataset` replace `data.train` and `data.eval`. Each is a list of rows, such as
    `{"messages": [...]}` with images as paths or PIL images, or a table of pandas, polars or pyarrow. The rows are
    stored in the run folder, so `resume` does not need them again.

    These arguments take objects in place of import paths in the recipe: `model` (the run starts from its weights, and
    does not change them; `run.model` has the trained weights), `task`, `dataset` and `eval_dataset` (a torch Dataset or
    DataLoader), and `optimizer` (a function of parameter groups, such as an optimizer class). `dataset` may also be a
    `StepSource`, which makes its own batches. Pass the same objects to `resume`.
    """
    objects, rows = _objects(model, task, dataset, eval_dataset, optimizer)
    settings = dict(overrides or {})
    if rows.splits:
        settings |= rows.settings(load_config(recipe, settings).folder)
    config = load_config(recipe, {**settings, **objects.settings()})
    _start_framework(config)
    if rows.splits and config.data.kind not in KINDS:
        raise TesseraError(
            f"rows in memory cannot have data.kind={config.data.kind}",
            where="dataset=...",
            allowed=[f"data.kind={kind}" for kind in KINDS],
            fix="name the data in the recipe, or give a torch Dataset",
            code="data.kind-not-in-memory",
        )
    if eval_dataset is None:
        check_evaluated(config)
    check_fresh(config.folder, overwrite)  # fail early; checked again when the folder is locked
    config = with_local_folders(config)
    return _run(config, resume=False, overwrite=overwrite, callbacks=callbacks, objects=objects, rows=rows)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust: Trust = False,
    callbacks: Sequence[Callback] = (),
    model: nn.Module | None = None,
    task: Task | None = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> Run:
    """Continue a run from its newest good checkpoint, with the configuration that its folder contains.

    `trust`: whether to import code that the configuration in the folder names: True for all of it, or a set of import
    paths. Only needed for runs of another user. Objects (see `train`) must be passed again, except for rows in memory,
    which the run folder contains."""
    objects, rows = _objects(model, task, dataset, eval_dataset, optimizer)
    rows.check_resumed(Path(run))
    config = resume_config(run, overrides, trust)
    _start_framework(config)
    # Check only new values: recipes saved by earlier versions may set `train.eval_every` without held-out data.
    if eval_dataset is None and "train.eval_every" in (overrides or {}):
        check_evaluated(config)
    objects.check_resumed(given_objects(Path(run)))
    file = find_file(Path(run), CONFIG)
    saved, notes = in_keys_of_today(read_mapping(file)) if file.is_file() else ({}, [])
    optimizer_before = (saved.get("optim") or {}).get("name", config.optim.name)
    if optimizer_before != config.optim.name:
        notes.append(
            f"optim.name was {optimizer_before} and is {config.optim.name} now: only the state that both "
            "optimizers have is restored from the checkpoint"
        )
    return _run(config, resume=True, overwrite=False, callbacks=callbacks, objects=objects, notes=notes)


def _start_framework(config: RunConfig) -> None:
    """Check the framework of the recipe. In a process that msrun started, set the rank, or run msrun's scheduler."""
    if config.framework == "torch" and "MS_ROLE" in os.environ and "RANK" not in os.environ:
        raise TesseraError(
            "msrun started this process, but the recipe trains with torch, for which msrun sets no ranks",
            where="framework=torch",
            fix="start the ranks with tessera train --nproc N or torchrun, or train with framework=mindspore",
            code="framework.started-by-msrun",
        )
    if config.framework == "mindspore":
        check_installed()
        read_msrun(os.environ)
        if is_scheduler(os.environ):
            from tessera.mindspore.build import serve_scheduler  # imported here, because it imports MindSpore

            serve_scheduler()


def _objects(
    model: nn.Module | None, task: Task | None, dataset: Any, eval_dataset: Any, optimizer: Any
) -> tuple[Objects, GivenRows]:
    """Return the objects of the caller, and separately the rows in memory, which are stored in the run folder."""
    dataset, eval_dataset = as_records(dataset), as_records(eval_dataset, "eval_dataset")
    rows = GivenRows.of(dataset, eval_dataset)
    datasets = {"train": dataset, "eval": eval_dataset} | dict.fromkeys(rows.splits)
    return Objects(model, task, datasets["train"], datasets["eval"], optimizer), rows


def resume_config(run: str | Path, overrides: Mapping[str, Any] | None = None, trust: Trust = False) -> RunConfig:
    """Return the configuration to resume a run with. The run folder may have been moved."""
    folder = Path(run)
    if folder.name in ("", ".."):
        folder = folder.resolve()
    saved = saved_config(folder)
    if saved is None:
        raise no_run(folder, "config.yaml")
    if fixed := [key for key in ("name", "out") if key in (overrides or {})]:
        raise TesseraError(
            "a resume cannot change the folder of a run",
            where=fixed[0],
            fix=f"leave the key out, or move the folder first: mv {folder} ELSEWHERE",
            code="run.out-at-resume",
        )
    saved["name"] = "run"  # the folder may have a name that recipes do not allow
    code = named_code(load_config(saved))
    # Code that `overrides` name needs no check: the user of this process wrote them.
    check_trusted(find_file(folder, CONFIG).parent, code, trust)
    config = load_config(saved, overrides)
    if (was := _folder_before(folder)) is not None and was != folder.absolute():
        config = moved(config, was, folder.absolute())
    config = with_local_folders(config, resumed=True)
    model = _with_own_copy(config.model, folder)
    # The folder may have been moved since the recipe was saved.
    return config.model_copy(update={"out": folder.parent, "name": folder.name, "model": model})


def _with_own_copy(model: ModelSection, folder: Path) -> ModelSection:
    """Return the model section with `tokenizer` set to the run folder's copy of tokenizer and template files.

    If files of the copy have changed, keep the original folder; raise if that folder is missing.
    """
    copy = find_file(folder, "processor")
    if not copy.is_dir():
        return model
    first = model.tokenizer or model.path
    if not (copy / SEAL).exists() and not run_exists(folder) and first is not None and first.exists():
        return model  # the copy is incomplete because the run ended before its first step
    damaged = damaged_side_files(copy)
    if not damaged:
        return model.model_copy(update={"tokenizer": folder / "processor"})
    if first is not None and first.exists():
        log.logger().warning("%s of %s changed since the run began: %s is read again", ", ".join(damaged), copy, first)
        return model
    raise TesseraError(
        f"{', '.join(damaged)} changed since the run began: samples would be tokenized differently",
        where=str(copy),
        fix=f"restore the files; if you changed them on purpose, remove {copy / SEAL}",
        code="run.processor-files-changed",
    )


def _folder_before(folder: Path) -> Path | None:
    """Return the path that the run folder had when its configuration was written."""
    try:
        return Path(read_json_mapping(find_file(folder, RUN_FILE))["folder"])
    except (TesseraError, KeyError, TypeError):
        return None


def fingerprint(config: RunConfig) -> str:
    """Return a short hash of the configuration, to check that all ranks have the same."""
    return _short_hash(dump_yaml(config))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def join(config: RunConfig) -> AbstractContextManager[dist.World]:
    """Join the process group of a recipe. Raise if ranks differ in versions, configuration or run folder."""
    return dist.world(
        config.on_host().train.device,
        config.parallel.timeout_s,
        join_timeout_s=config.parallel.join_timeout_s,
        config=" ".join(f"{name}={_short_hash(str(value))}" for name, value in config.model_dump(mode="json").items()),
        folder=config.folder,
    )


@contextmanager
def open_run(
    config: RunConfig,
    setup: ModelSetup,
    world: dist.World,
    objects: Objects,
    *,
    resume: bool,
    overwrite: bool,
    rows: GivenRows | None = None,
) -> Iterator[tuple[RunConfig, list[Callback]]]:
    """Open the folder of a run on all ranks, and close it at the end of the `with` block.

    Yield the recipe as it is saved in the folder, and callbacks that the trainer needs for the folder. `rows`: rows in
    memory of a new run, which are written into the folder."""
    folder = RunFolder(config.folder)  # only the main rank calls the methods of `folder`
    written = [] if rows is None else rows.files(config.folder)
    try:
        Ranks.current().on_rank0(
            lambda: folder.open(
                overwrite=overwrite, resume=resume, inputs=read_from_old_run(config, written) if overwrite else ()
            )
        )
        config = located(with_model_resolved(config, setup), Path.cwd())
        with writable(config.folder):
            log.setup(world.rank, config.folder / "logs")
            Ranks.current().on_rank0(lambda: folder.begin(config, resume=resume, objects=objects.names))
            if rows is not None and rows.splits and not resume:
                Ranks.current().on_rank0(lambda: rows.write(config.folder))
            # Trust the run on every machine, so that each can resume it without `trust`.
            if int(os.environ.get("LOCAL_RANK", 0)) == 0:
                remember(config.folder, named_code(config))
            yield config, [PublishRun(folder)] if world.is_main else []
        dist.barrier()  # a rank that exits early would look lost to the watchdogs of other ranks
    except RuntimeError as error:
        if not dist.is_peer_error(error):
            raise
        # The watchdog does not run yet or any more, so it is unknown which rank was lost.
        raise dist.RankFailure(
            f"another rank has ended: {first_line(error)}",
            fix="read the messages of the other ranks",
            code="run.rank-lost",
        ) from error
    finally:
        folder.close()
        log.close()


def _run(
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    callbacks: Sequence[Callback],
    objects: Objects,
    notes: Sequence[str] = (),
    rows: GivenRows | None = None,
) -> Run:
    """Build and run a trainer. `notes`: lines to log. `rows`: see `open_run`."""
    # Build the model on the meta device first: mistakes in the recipe fail before the ranks connect.
    setup = build_meta_model(config, dist.expected_world_size(), objects)
    check_rows(config, setup.plan)
    check_trackers(config.log)
    named_callbacks(config.train)
    if not resume:
        check_first_weights(config, setup)
    with (
        join(config) as world,
        open_run(config, setup, world, objects, resume=resume, overwrite=overwrite, rows=rows) as (config, of_folder),
    ):
        for note in notes:
            log.logger().info(note)
        trainer = build_trainer(config, setup, world, [*callbacks, *of_folder], objects)
        if not (resume and trainer.resume()):
            if resume:
                log.logger().warning("%s has no checkpoint yet: starting from the beginning", config.folder)
            trainer.begin()
        elif trainer.step >= trainer.length.steps:
            more = 2 * trainer.step
            done = "all of its %d steps are done, and config.yaml stays as it is; train.steps=%d goes on"
            log.logger().info(done, trainer.length.steps, more)
        trainer.run()
    return Run(config.folder, trainer.checkpoints.newest, trainer.stop_reason, trainer.ended_early, objects.model)
