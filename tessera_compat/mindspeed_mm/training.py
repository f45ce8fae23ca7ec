"""Offer `mindspeed_mm.training` and the training flow of Megatron 0.12.1 by name.

    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

runs the user's callbacks on the trainer of Tessera. A script may also call the functions of this module itself, in the
order in which `pretrain` calls them. They share the session of the run.
"""

from __future__ import annotations

import argparse
import atexit
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.config.run_config import RunConfig, load_config
from tessera.errors import TesseraError
from tessera.inference.weight_source import run_exists
from tessera.optim.optimizer import lr_factor
from tessera.runtime import log
from tessera.training.run import resume_config
from tessera.training.trainer import Trainer
from tessera_compat import state
from tessera_compat.environment import begin_job
from tessera_compat.mindspeed_mm.arguments import flag_report, parse_args
from tessera_compat.mindspeed_mm.callback_recipe import callback_recipe, check_save_folder, resumes
from tessera_compat.mindspeed_mm.continued import changed_settings, described_changes, refuse_change
from tessera_compat.mindspeed_mm.forward_step import ForwardStep, MicroBatch
from tessera_compat.mindspeed_mm.job_words import in_words_of_job
from tessera_compat.mindspeed_mm.session import SPLITS, Session


def pretrain(
    train_valid_test_dataset_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Train the user's model with the user's functions and the command line. Then evaluate valid and test data."""
    _check_model_type(model_type)
    session = _begin(extra_args_provider, args_defaults)
    try:
        with in_words_of_job(flag_report(session.args)), session:
            session.process_non_loss_data = process_non_loss_data_func
            session.task.forward_step = forward_step_func
            session.setup(model_provider)
            session.bind(session.datasets(train_valid_test_dataset_provider, session.sample_counts()))
            session.train()
            session.evaluate_at_end()
    finally:
        state.destroy()


def initialize_megatron(
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    **unused: Any,
) -> None:
    """Parse the command line, create the process group and start the run. `get_args` works afterwards."""
    if ignore_unknown_args:
        raise TesseraError(
            "ignore_unknown_args=True is not supported",
            where="initialize_megatron(ignore_unknown_args=True)",
            fix="add the flags to the parser with extra_args_provider",
            code="job.unknown-flags-callback",
        )
    if skip_mpu_initialization or unused:
        words = ", ".join(["skip_mpu_initialization"] * skip_mpu_initialization + list(unused))
        raise TesseraError(
            f"initialize_megatron does not support {words}", fix="remove it", code="job.unsupported-option"
        )
    session = _begin(extra_args_provider, args_defaults)
    atexit.register(session.abandon)


def _begin(extra_args_provider: Callable[..., Any] | None, args_defaults: Mapping[str, Any] | None) -> Session:
    if state.current().session is not None:
        raise TesseraError(
            "this process has already started a run",
            where="pretrain",
            fix="call pretrain once, or initialize_megatron and the functions after it",
            code="job.run-twice",
        )
    args = parse_args(extra_args_provider=extra_args_provider, args_defaults=args_defaults)
    check_save_folder(args)
    recipe = callback_recipe(args)
    job = begin_job(state.current().rank_callbacks)
    config = load_config(recipe, job.settings)
    state.set_args(args)
    going_on = resumes(args)
    if going_on and not run_exists(config.folder):
        log.logger().warning("%s has no checkpoint yet: the run begins with the weights of model_provider", args.save)
        going_on = False
    changes = _changes(args, config) if going_on else []
    try:
        session = Session(args, config, job.callbacks, resume=going_on, overwrite=args.save is None, changes=changes)
    except BaseException:
        state.destroy()
        raise
    state.current().session = session
    return session


def _changes(args: Any, config: RunConfig) -> list[str]:
    """Return the settings that flags change in a resumed run. Raise for settings that cannot change."""
    report, saved = flag_report(args), resume_config(config.folder)
    # Parameter groups depend on the model, which is not built yet. The session compares batch sizes itself.
    changes = [key for key in changed_settings(saved, config) if key not in ("optim.groups", "train.global_batch")]
    for key in changes:
        refuse_change(saved, key, report, Path(args.save))
    return described_changes(saved, config, changes, report)


def current_session() -> Session:
    """Return the session of this run."""
    session = state.current().session
    if session is None:
        raise TesseraError(
            "no run is started yet",
            where="training",
            fix="call initialize_megatron(...) first, or let pretrain(...) start the run",
            code="job.no-run",
        )
    assert isinstance(session, Session)
    return session


# ---------------------------------------------------------------------------------------------- model and optimizer


class ParamScheduler:
    """Show the learning rate to scripts. The trainer sets it as a function of the step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def num_steps(self) -> int:
        """Return the number of completed steps."""
        return self._trainer.step

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Return the learning rate of a parameter group at the next step."""
        schedule, steps = self._trainer.config.optim.schedule, self._trainer.length.steps
        return float(param_group["base_lr"]) * lr_factor(schedule, self.num_steps, steps)

    def step(self, increment: int) -> NoReturn:
        """Raise an error: scripts must not call this, because `train_step` sets the learning rate."""
        raise TesseraError(
            "opt_param_scheduler.step is not supported: train_step sets the learning rate",
            where="opt_param_scheduler.step",
            fix="remove the call",
            code="job.schedule-step",
        )


def setup_model_and_optimizer(
    model_provider_func: Callable[..., Any],
    model_type: Any,
    no_wd_decay_cond: Callable[[str, Tensor], bool] | None = None,
    scale_lr_cond: Callable[[str, Tensor], bool] | None = None,
    lr_mult: float = 1.0,
    checkpointing_context: Any = None,
) -> tuple[list[nn.Module], Optimizer, ParamScheduler]:
    """Build and shard the model and its optimizer. Resume the run if `--load` names its folder."""
    _check_model_type(model_type)
    trainer = current_session().setup(model_provider_func, no_wd_decay_cond, scale_lr_cond, lr_mult)
    return [trainer.module], trainer.optimizer, ParamScheduler(trainer)


def get_optimizer_param_scheduler(optimizer: Optimizer) -> ParamScheduler:
    """Return the learning rate schedule of the run."""
    return ParamScheduler(current_session().trainer)


def get_megatron_optimizer(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: `setup_model_and_optimizer` creates model and optimizer together."""
    raise TesseraError(
        "the optimizer cannot be created without the sharded model",
        where="get_megatron_optimizer",
        fix="model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)",
        code="job.optimizer-alone",
    )


def load_checkpoint(
    model: Sequence[nn.Module], optimizer: Optimizer, opt_param_scheduler: ParamScheduler, **options: Any
) -> tuple[int, int]:
    """Load the newest checkpoint of the run. Return its iteration, and 0 for the number of FLOPs."""
    if options:
        raise TesseraError(
            f"load_checkpoint does not support {', '.join(options)}",
            fix="remove it",
            code="job.unsupported-option",
        )
    trainer = current_session().trainer
    if not trainer.resume():
        raise TesseraError(
            "the run has no checkpoint yet", where=str(trainer.config.folder), code="job.checkpoint-missing"
        )
    return trainer.step, 0


def save_checkpoint(
    iteration: int,
    model: Sequence[nn.Module],
    optimizer: Optimizer,
    opt_param_scheduler: ParamScheduler,
    num_floating_point_operations_so_far: float = 0,
    **options: Any,
) -> None:
    """Save a checkpoint. `iteration` must be the current iteration."""
    trainer = current_session().trainer
    if options or iteration != trainer.step:
        unsupported = f"save_checkpoint does not support {', '.join(options)}"
        differs = f"save_checkpoint is called for iteration {iteration}, but the run is at iteration {trainer.step}"
        raise TesseraError(
            unsupported if options else differs,
            where="save_checkpoint",
            fix=f"save_checkpoint({trainer.step}, model, optimizer, opt_param_scheduler)",
            code="job.save-arguments",
        )
    if state.get_args().save is None:
        raise TesseraError(
            "--save, the folder for checkpoints, is missing",
            where="save_checkpoint",
            fix="add --save FOLDER",
            code="job.save-folder-missing",
        )
    trainer.save()


# ---------------------------------------------------------------------------------------------- data


class BatchIterator(Iterator[Any]):
    """Yield the batches of a data split on this rank, a batch for each micro-batch."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        _, ranks = session.rows[name].rank_position
        self._next = session.trainer.rows_drawn // ranks if name == "train" else 0

    def __next__(self) -> Any:
        rows = self.session.rows[self.name]
        position, ranks = rows.rank_position
        batch = rows.batch([self._next * ranks + position])
        self._next += 1
        assert isinstance(batch, MicroBatch)
        return batch.box[0]


def build_train_valid_test_datasets(
    build_train_valid_test_datasets_provider: Callable[..., Any], train_valid_test_num_samples: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Call the data provider with these numbers of samples."""
    return current_session().datasets(build_train_valid_test_datasets_provider, train_valid_test_num_samples)


def build_train_valid_test_data_loaders(
    build_train_valid_test_datasets_provider: Callable[..., Any],
) -> tuple[Any, Any, Any]:
    """Return the data loaders of train, valid and test data; None for missing data."""
    session = current_session()
    session.bind(session.datasets(build_train_valid_test_datasets_provider, session.sample_counts()))
    train, valid, test = (session.rows[name].data if session.rows[name].bound else None for name in SPLITS)
    return train, valid, test


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Callable[..., Any],
) -> tuple[BatchIterator | None, BatchIterator | None, BatchIterator | None]:
    """Return iterators over the batches of this rank; None for missing data."""
    session = current_session()
    build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider)
    train, valid, test = (BatchIterator(session, name) if session.rows[name].bound else None for name in SPLITS)
    return train, valid, test


# ---------------------------------------------------------------------------------------------- steps


def train(
    forward_step_func: ForwardStep,
    model: Sequence[nn.Module],
    optimizer: Optimizer,
    opt_param_scheduler: ParamScheduler,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    config: Any = None,
    call_backs: Any = None,
) -> tuple[int, int]:
    """Train until the last iteration. Return its number, and 0 for the number of FLOPs."""
    session = current_session()
    _check_ours(session, model, optimizer)
    if call_backs:
        raise TesseraError(
            "the argument call_backs of train is not supported",
            where="train",
            fix="remove it",
            code="job.unsupported-option",
        )
    session.task.forward_step = forward_step_func
    session.process_non_loss_data = process_non_loss_data_func
    for name, data in (("train", train_data_iterator), ("valid", valid_data_iterator)):
        if data is not None and not isinstance(data, BatchIterator):
            session.rows[name].bind(data)
    session.train()
    return session.trainer.step, 0


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Sequence[nn.Module],
    optimizer: Optimizer,
    opt_param_scheduler: ParamScheduler,
    config: Any = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, None]:
    """Run an iteration on the next micro-batches of the iterator.

    Return the mean losses, whether the update was skipped, whether to save, whether to stop, an exit code, the norm of
    the gradients, and None for the number of zero gradients, as Megatron 0.12.1 does."""
    session = current_session()
    _check_ours(session, model, optimizer)
    session.task.forward_step = forward_step_func
    result = session.train_step([next(data_iterator) for _ in range(session.micro_batches)])
    stop = session.trainer.stop_reason is not None
    if result is None:
        return {}, 1, stop, stop, 0, None, None
    return session.log.latest, int(not result.applied), stop, stop, 0, result.numbers()["grad_norm"], None


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Sequence[nn.Module],
    iteration: int,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    config: Any = None,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable[..., Any] | None = None,
) -> None:
    """Evaluate `--eval-iters` global batches of the iterator, and print the results."""
    session = current_session()
    _check_ours(session, model, None)
    if non_loss_data_func is not None:
        raise TesseraError(
            "non_loss_data_func is not supported",
            where="evaluate_and_print_results",
            fix="pass process_non_loss_data_func: it gets the results of loss_func(output, non_loss_data=True)",
            code="job.unsupported-option",
        )
    session.task.forward_step = forward_step_func
    collected: list[Any] | None = None if process_non_loss_data_func is None else []
    count = session.args.eval_iters * session.micro_batches
    losses = session.evaluate_batches((MicroBatch.of(next(data_iterator)) for _ in range(count)), collected)
    if process_non_loss_data_func is not None and session.world.rank == session.world.size - 1:
        process_non_loss_data_func(collected, iteration, None)
    session.print_evaluation(prefix, losses)


# ---------------------------------------------------------------------------------------------- arguments and patches


def mm_extra_args_provider(parser: Any) -> Any:
    """Return the parser unchanged: it already has the flags of MindSpeed-MM."""
    return parser


def extra_args_provider_decorator(extra_args_provider: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the provider of a script's flags unchanged: flags of MindSpeed-MM are built in."""
    return mm_extra_args_provider if extra_args_provider is None else extra_args_provider


def get_mindspeed_args() -> Any:
    """Return the parsed arguments; an empty namespace before `pretrain` parses them."""
    return argparse.Namespace() if state.current().args is None else state.current().args


class PatchesManager:
    """Check the section `patch` of model.json. Tessera patches no code."""

    @staticmethod
    def apply_patches_from_config() -> None:
        """Raise for patches of model.json that would change the training."""
        patches = state.get_args().mm.model.get("patch") or {}
        refused = sorted(set(patches) - _PATCHES_WITHOUT_EFFECT)
        if refused:
            raise TesseraError(
                f"model.json has unsupported patches: {', '.join(refused)}",
                where="model.json: patch",
                allowed=_PATCHES_WITHOUT_EFFECT,
                fix="remove them from the section patch",
                code="job.model-patches",
            )


# These patches make Megatron faster or let it read other files. They do not change results.
_PATCHES_WITHOUT_EFFECT = {"clip_grad_async", "get_dist_model_load_from_pt", "bridge_patch", "infer_fa", "scale_grad"}


def _check_model_type(model_type: Any) -> None:
    if isinstance(model_type, enum.Enum) and model_type.name != "encoder_or_decoder":
        raise TesseraError(
            f"{model_type} is not supported: pretrain has no separate pipeline for an encoder",
            where="model_type",
            allowed=["ModelType.encoder_or_decoder"],
            code="job.model-type",
        )


def _check_ours(session: Session, model: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
    """Raise if the caller passes another model or optimizer than the run has."""
    modules = list(model) if isinstance(model, (list, tuple)) else [model]
    trainer = session.trainer
    if modules != [trainer.module] or (optimizer is not None and optimizer is not trainer.optimizer):
        raise TesseraError(
            "the passed model or optimizer does not belong to the run",
            where="train",
            fix="pass the results of setup_model_and_optimizer",
            code="job.foreign-model",
        )
