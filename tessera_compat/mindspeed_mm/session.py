"""Hold one run of `pretrain`: what Megatron keeps in global variables, built on the trainer of Tessera.

The order is Megatron's: process group, model and optimizer, checkpoint, data, steps. Every training function that a
script may call itself (see `training`) works on the session of this run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tessera.config.reader import build
from tessera.config.run_config import GroupSection, LoraSection, RunConfig
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.core.task import LossTotals
from tessera.errors import TesseraError, nearest
from tessera.runtime.files import JsonLines
from tessera.training.build import build_trainer
from tessera.training.run import join, open_run
from tessera.training.setup import Objects, build_meta_model, resolve_precision
from tessera.training.trainer import Trainer
from tessera_compat import state
from tessera_compat.megatron import parallel_state
from tessera_compat.mindspeed_mm.classes import TransformersModel
from tessera_compat.mindspeed_mm.continued import print_changes
from tessera_compat.mindspeed_mm.forward_step import ForwardStepTask, MicroBatch, described, mean_reports
from tessera_compat.mindspeed_mm.log_line import IterationLog, SaveLog, consumed_samples, print_on_last_rank
from tessera_compat.mindspeed_mm.provided_rows import PROVIDER, ProvidedRows, loader_of

SPLITS = ("train", "valid", "test")
Condition = Callable[[str, torch.Tensor], bool]


def call_provider(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a provider function of the user with Megatron's arguments, or without arguments if it takes none."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if signature.parameters:
            arguments = ", ".join([*(type(one).__name__ for one in args), *kwargs])
            raise TesseraError(
                f"{name} cannot be called with ({arguments}): {error}",
                where=name,
                fix="define it with the parameters of Megatron, or without parameters",
                code="job.callback-parameters",
            ) from None
        return function()
    return function(*args, **kwargs)


class Session:
    """Manage a run. `close`, or the end of a `with` block, leaves the process group and closes the run folder."""

    def __init__(
        self,
        args: Any,
        config: RunConfig,
        callbacks: Sequence[Callback],
        *,
        resume: bool,
        overwrite: bool = False,
        changes: Sequence[str] = (),  # settings that flags change in a resumed run, to be printed
    ) -> None:
        self.args = args
        self.config = config
        self._callbacks = callbacks
        self.cp = int(args.context_parallel_size)
        self.task = ForwardStepTask(per_token=bool(args.calculate_per_token_loss), cp=self.cp)
        self._resume, self._overwrite, self._changes = resume, overwrite, list(changes)
        self._sizes = _BatchSizes(args)
        self._trainer: Trainer | None = None
        self._started = False
        self.log = IterationLog(args)
        self.process_non_loss_data: Callable[..., Any] | None = None
        self._stack = ExitStack()
        self.world = self._stack.enter_context(join(self.config))
        args.rank, args.world_size = self.world.rank, self.world.size
        args.local_rank, args.data_parallel_size = self.world.local_rank, self.world.size // self.cp
        if state.current().parallel is None:  # user functions may request process groups from `mpu`
            parallel_state.initialize_model_parallel(context_parallel_size=self.cp)
        self.micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        self.rows = {
            name: ProvidedRows(name, seed=args.seed, samples=args.micro_batch_size, cp=self.cp) for name in SPLITS
        }

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def abandon(self) -> None:
        """Close the run folder without waiting for other ranks. It runs at process exit if `close` was not called."""
        self._stack.__exit__(SystemExit, SystemExit(), None)

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise TesseraError(
                "the model is not set up yet",
                where="setup_model_and_optimizer",
                fix="call setup_model_and_optimizer(model_provider, model_type) first",
                code="job.model-not-set-up",
            )
        return self._trainer

    # ------------------------------------------------------------------------------------------ model

    def setup(
        self,
        model_provider: Callable[..., Any],
        no_weight_decay: Condition | None = None,
        scale_lr: Condition | None = None,
        lr_mult: float = 1.0,
    ) -> Trainer:
        """Build the model with the user's provider, shard it, and load `--load` if it is set."""
        torch.manual_seed(self.args.seed)
        model = call_provider(model_provider, "model_provider", pre_process=True, post_process=True)
        if not isinstance(model, nn.Module):
            raise TesseraError(
                f"model_provider must return an nn.Module, but returned {described(model)}",
                where="model_provider",
                allowed=["an nn.Module"],
                fix="return the full, unsharded model; Tessera shards it",
                code="job.provided-model",
            )
        optim = {"groups": _groups(model, self.config, self.args, no_weight_decay, scale_lr, lr_mult)}
        self.config = self.config.model_copy(
            update={
                "optim": self.config.optim.model_copy(update=optim),
                "model": self.config.model.model_copy(update={"lora": _adapters(model, self.args)}),
            }
        )
        train = self.rows["train"]
        objects = Objects(model=model, task=self.task, dataset=train)
        setup = build_meta_model(self.config, self.world.size, objects)
        opened = open_run(self.config, setup, self.world, objects, resume=self._resume, overwrite=self._overwrite)
        self.config, environment_callbacks = self._stack.enter_context(opened)
        named = [self.log, SaveLog(self.args), _EvaluateInterval(self), self._sizes]
        callbacks: list[Callback] = [*named, *self._callbacks, *environment_callbacks]
        self._trainer = trainer = build_trainer(self.config, setup, self.world, callbacks, objects)
        if isinstance(model, TransformersModel):
            model.offer_parameter_type(getattr(torch, resolve_precision(self.config).compute))
        for rows in (self.rows["valid"], self.rows["test"]):
            rows.check_ranks(*train.rank_position)
        if self._resume and trainer.resume():
            self._sizes.go_on(trainer)
            if self.world.is_main:
                print_changes(self._changes + self._sizes.changes)
        else:
            trainer.begin()
        self.args.iteration = self.args.curr_iteration = trainer.step
        self.args.consumed_train_samples = consumed_samples(trainer, self.args)
        return trainer

    # ------------------------------------------------------------------------------------------ data

    def sample_counts(self) -> tuple[int, int, int]:
        """Return the number of samples of each split that the run will use. The data provider gets them."""
        steps, args = self.config.train.steps, self.args
        assert steps is not None, "jobs count iterations"
        evaluations = steps // args.eval_interval + 1 if args.eval_interval else 1
        iterations = (steps, evaluations * args.eval_iters, args.eval_iters)
        train, valid, test = (number * args.global_batch_size for number in iterations)
        return train, valid, test

    def datasets(self, provider: Callable[..., Any], counts: Sequence[int]) -> tuple[Any, Any, Any]:
        """Call the data provider. Return train, valid and test data; the last two may be None."""
        datasets = call_provider(provider, PROVIDER, list(counts))
        if not isinstance(datasets, (tuple, list)) or len(datasets) != 3 or datasets[0] is None:
            raise TesseraError(
                f"{PROVIDER} returned {described(datasets)}",
                where=PROVIDER,
                allowed=["(train, valid, test): a DataLoader, a Dataset, an iterator, or None for valid and test"],
                fix="return three values: train, valid and test data",
                code="job.provided-data",
            )
        train, valid, test = datasets
        return train, valid, test

    def bind(self, datasets: Sequence[Any]) -> None:
        """Set the train, validation and test data of this run."""
        for name, dataset in zip(SPLITS, datasets, strict=True):
            if dataset is not None:
                self.rows[name].bind(loader_of(dataset, self.args))
        self.args.do_train = True
        self.args.do_valid, self.args.do_test = self.rows["valid"].bound, self.rows["test"].bound

    # ------------------------------------------------------------------------------------------ steps

    def train(self) -> None:
        """Train until the last iteration, and save."""
        self.trainer.run()

    def train_step(self, batches: Sequence[Any]) -> StepResult | None:
        """Run a step on these micro-batches, for a script with its own training loop."""
        if not self._started:
            self._started = True
            self._stack.push(self._end_steps)
            self.trainer.start()
        position, ranks = self.rows["train"].rank_position
        first, samples = self.trainer.rows_drawn + position, self.args.micro_batch_size
        microbatches = [MicroBatch.of(value, first + at * ranks, samples) for at, value in enumerate(batches)]
        return self.trainer.train_step(microbatches)

    def _end_steps(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the trainer's steps when the session of a script with its own training loop ends."""
        if error is None or (isinstance(error, SystemExit) and self.world.size == 1):
            self.trainer.end()
        elif not isinstance(error, SystemExit):  # sys.exit is no failure of this rank
            self.trainer.fail(error)

    def evaluate(self, name: str, collected: list[Any] | None = None) -> dict[str, float]:
        """Return the mean losses of a split over `--eval-iters` global batches.

        `collected`: receives the output of the loss function for `non_loss_data=True`.
        """
        return self.evaluate_batches(
            self.rows[name].evaluation(self.args.eval_iters * self.micro_batches), collected=collected
        )

    def evaluate_batches(self, batches: Any, collected: list[Any] | None = None) -> dict[str, float]:
        """Return the mean losses over these micro-batches."""
        trainer, totals = self.trainer, None
        self.task.reports.clear()
        self.task.collected = collected
        try:
            with trainer.paused("evaluating"), trainer.eval_weights():
                for batch in batches:
                    batch_totals: LossTotals = trainer.engine.evaluate(self.task, batch, True)
                    totals = batch_totals if totals is None else totals + batch_totals
        finally:
            self.task.collected = None
        if totals is None:
            raise TesseraError(
                "an evaluation needs at least one micro-batch",
                where="--eval-iters",
                fix="set --eval-iters to 1 or more",
                code="job.nothing-to-evaluate",
            )
        means = {key: float(value) for key, value in mean_reports(self.task.reports).items()}
        self.task.reports.clear()
        return means or {"loss": float(totals.loss())}

    def print_evaluation(self, prefix: str, losses: Mapping[str, float]) -> None:
        """Print the results of an evaluation as Megatron does."""
        parts = [f" validation loss at {prefix}"]
        for name, value in losses.items():
            parts += [f"{name} value: {value:.6E}", f"{name} PPL: {math.exp(min(20.0, value)):.6E}"]
        line = " | ".join(parts) + " | "
        for text in ("-" * len(line), line, "-" * len(line)):
            print_on_last_rank(self.world, text)

    def evaluate_at_end(self) -> dict[str, dict[str, float]]:
        """Evaluate validation and test data after the last iteration, and write the results to the run's metrics."""
        results: dict[str, dict[str, float]] = {}
        if self.trainer.stop_reason is not None or not self.args.eval_iters:
            return results
        for name, words in (("valid", "validation"), ("test", "test")):
            if not self.rows[name].bound:
                continue
            results[name] = self.evaluate_and_process(name)
            self.print_evaluation(f"iteration {self.trainer.step} on {words} set", results[name])
        if results and self.world.is_main:
            file = JsonLines(self.config.folder / "metrics.jsonl")
            for name, losses in results.items():
                named_losses = {
                    f"{'eval' if name == 'valid' else 'test'}_{key}": value for key, value in losses.items()
                }
                file.write({"kind": "eval", "step": self.trainer.step, **named_losses})
            file.close()
        return results

    def evaluate_and_process(self, name: str) -> dict[str, float]:
        """Evaluate a split, and pass the non-loss data to `process_non_loss_data_func` of the user."""
        process = self.process_non_loss_data
        collected: list[Any] | None = None if process is None else []
        losses = self.evaluate(name, collected)
        if process is not None and self.world.rank == self.world.size - 1:
            process(collected, self.trainer.step, None)
        return losses


class _BatchSizes(Callback):
    """Store the batch sizes in checkpoints, so that a run with other sizes resumes at the same sample.

    The trainer counts each micro-batch of a rank as one row. Ranks of a context-parallel group read the same samples.
    """

    def __init__(self, args: Any) -> None:
        names = ("global_batch_size", "micro_batch_size", "context_parallel_size")
        self._now = {name: int(getattr(args, name)) for name in names}
        self._before = self._now
        self._together = self._now["micro_batch_size"] * int(
            args.data_parallel_size
        )  # samples in one micro-batch of all data-parallel ranks

    def state_dict(self) -> dict[str, Any]:
        return dict(self._now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = {**self._now, **state}

    @property
    def changes(self) -> list[str]:
        """Return the batch sizes that differ from the checkpoint."""
        names = [name for name in self._now if self._now[name] != self._before[name]]
        return [f"--{name.replace('_', '-')}: {self._before[name]} -> {self._now[name]}" for name in names]

    def go_on(self, trainer: Trainer) -> None:
        """Resume the data at the first sample that the run has not consumed."""
        before, now = self._before, self._now
        samples = trainer.rows_drawn * before["micro_batch_size"] // before["context_parallel_size"]
        if samples % self._together:
            raise TesseraError(
                f"the run has used {samples} samples, which are no multiple of {self._together}: --micro-batch-size "
                f"{now['micro_batch_size']} times the data-parallel ranks",
                where="--micro-batch-size",
                fix=f"--micro-batch-size {before['micro_batch_size']}, with which the run was trained",
                code="job.micro-batch-changed",
            )
        trainer.go_to_row(samples * now["context_parallel_size"] // now["micro_batch_size"])


class _EvaluateInterval(Callback):
    """Evaluate the validation data every `--eval-interval` iterations, except after the last iteration."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        session, args = self.session, self.session.args
        due = args.eval_interval and args.eval_iters and result.step % args.eval_interval == 0
        if not due or result.step == trainer.length.steps or not session.rows["valid"].bound:
            return
        losses = session.evaluate_and_process("valid")
        session.print_evaluation(f"iteration {result.step}", losses)
        trainer.report_eval(losses)


def _groups(
    model: nn.Module,
    config: RunConfig,
    args: Any,
    no_weight_decay: Condition | None,
    scale_lr: Condition | None,
    lr_mult: float,
) -> list[GroupSection]:
    """Return the parameter groups of the user's conditions for weight decay and learning rate, and of the flags
    `--lr-scale-modules` and `--weight-decay-exclude-modules`.

    A condition of the user replaces the rule that vectors have no weight decay."""
    groups: list[GroupSection] = []
    conditions = no_weight_decay is not None or scale_lr is not None
    for name, parameter in model.named_parameters() if conditions else ():
        if not parameter.requires_grad:
            continue
        still = parameter.dim() <= 1 if no_weight_decay is None else bool(no_weight_decay(name, parameter))
        faster = scale_lr is not None and bool(scale_lr(name, parameter))
        groups.append(
            GroupSection(
                pattern=name,
                lr=config.optim.lr * lr_mult if faster else config.optim.lr,
                weight_decay=0.0 if still else config.optim.weight_decay,
            )
        )
    scaled = modules_named(model, args.lr_scale_modules, "--lr-scale-modules")
    groups += [GroupSection(pattern=path, lr=config.optim.lr * args.lr_mult) for path in scaled]
    names = [
        name for name in args.weight_decay_exclude_modules if name not in ("bias", "norm")
    ]  # `bias` and `norm` need no group: 1-d parameters have no weight decay by default
    excluded = modules_named(model, names, "--weight-decay-exclude-modules")
    return groups + [GroupSection(pattern=path, weight_decay=0.0) for path in excluded]


def _adapters(model: nn.Module, args: Any) -> LoraSection | None:
    """Return adapters for all linear layers whose path ends in a name of `--lora-target-modules`."""
    if not args.lora_target_modules:
        return None
    parts = [part for part in args.lora_apply_modules if part != "all"]
    inside = modules_named(model, parts, "--lora-apply-modules")
    linear = {path for path, part in model.named_modules() if isinstance(part, nn.Linear)}
    targets = [
        path
        for path in modules_named(model, args.lora_target_modules, "--lora-target-modules")
        if path in linear and (not parts or any(path == one or path.startswith(f"{one}.") for one in inside))
    ]
    if not targets:
        raise TesseraError(
            "the names match no linear layer",
            where="--lora-target-modules",
            allowed=sorted(linear),
            code="job.adapter-layer",
        )
    section: dict[str, Any] = {"rank": args.lora_r, "alpha": args.lora_alpha, "dropout": args.lora_dropout}
    if args.load_base_model and args.load:
        section["path"] = args.load
    return build(LoraSection, {**section, "targets": targets}, "command line")


def modules_named(model: nn.Module, names: Sequence[str], where: str) -> list[str]:
    """Return the paths of modules with these names: full paths, or their last parts."""
    paths = [path for path, _ in model.named_modules() if path]
    modules: list[str] = []
    for name in names:
        matching = [path for path in paths if path == name or path.endswith(f".{name}")]
        if not matching:
            last = sorted({path.rpartition(".")[2] for path in paths})
            raise TesseraError(
                f"no module has the name {name!r}",
                where=where,
                allowed=last,
                nearest=nearest(name, last),
                code="job.unknown-module",
            )
        modules += matching
    return list(dict.fromkeys(modules))
