"""Print the log lines that launch scripts parse, and create the checkpoint names that they look for.

    [2026-01-31 12:00:00] iteration 1/ 10 | consumed samples: 8 | elapsed time per iteration (ms): 123.4 | ...

Scripts split it at ":" (the time is the fifth field) and at "|", or search for `elapsed time per iteration (ms):`,
`tokens per sample:` and `saving checkpoint at iteration`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.runtime import device as devices
from tessera.runtime.distributed import World, sum_over_ranks
from tessera_compat.mindspeed_mm.forward_step import ForwardStepTask, MicroBatch, mean_reports
from tessera_compat.shards.files import LATEST


class IterationLog(Callback):
    """Print a line every `--log-interval` iterations, on the last rank as Megatron does.

    With a `ForwardStepTask` the line shows the losses that the user's loss function reports, otherwise the loss and the
    metrics of the task.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.latest: dict[str, Tensor] = {}  # reports of the user's loss function in the latest iteration
        self._losses: dict[str, list[Tensor]] = {}  # name -> values of the iterations since the last line
        self._last: StepResult | None = None
        self._iterations = self._skipped = self._tokens = 0
        self._since = 0.0

    def on_start(self, trainer: TrainerHandle) -> None:
        self._count(trainer)
        self._since = _training_time(trainer)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self._begin_interval(trainer)

    def on_step_begin(self, trainer: TrainerHandle) -> None:
        if isinstance(trainer.task, ForwardStepTask):
            trainer.task.reports.clear()

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self._count(trainer)
        self._last = result
        self._iterations += 1
        self._skipped += not result.applied
        task = trainer.task
        # A step that the guard has repeated has reports of both runs. Those of the first run come first.
        reports = task.reports[: len(result.microbatches)] if isinstance(task, ForwardStepTask) else []
        self.latest = mean_reports(reports)
        if result.applied:
            for name, value in self.latest.items():
                self._losses.setdefault(name, []).append(value)
        for batch in result.microbatches:
            self._tokens += batch.counts.get("tokens", 0)
            if isinstance(batch, MicroBatch):
                batch.release()
        if result.step % self.args.log_interval == 0:
            self._print(trainer)

    def _count(self, trainer: TrainerHandle) -> None:
        """Set `iteration` and `consumed_train_samples`, including the steps before a resume."""
        self.args.iteration = self.args.curr_iteration = trainer.step
        self.args.consumed_train_samples = consumed_samples(trainer, self.args)

    def _print(self, trainer: TrainerHandle) -> None:
        result = self._last
        assert result is not None
        numbers = result.numbers()
        seconds = (_training_time(trainer) - self._since) / self._iterations
        losses, nans = self._means(numbers)
        if self.args.log_tps and "tokens per sample" not in losses and not isinstance(trainer.task, ForwardStepTask):
            samples = self._iterations * self.args.global_batch_size
            wide = devices.sum_dtype(trainer.world.device)
            tokens = sum_over_ranks(torch.tensor(float(self._tokens), dtype=wide, device=trainer.world.device))
            losses["tokens per sample"] = float(tokens) / samples
        parts = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {result.step:8d}/{trainer.length.steps:8d}",
            f"consumed samples: {self.args.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
            f"learning rate: {result.lr:.6E}",
            f"global batch size: {self.args.global_batch_size:5d}",
            *(f"{name}: {value:.6E}" for name, value in losses.items()),
            f"loss scale: {_loss_scale(trainer):.1f}",
            f"grad norm: {numbers['grad_norm']:.3f}",
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {nans:3d}",
        ]
        print_on_last_rank(trainer.world, " | ".join(parts) + " |")
        self._begin_interval(trainer)

    def _means(self, numbers: Mapping[str, float]) -> tuple[dict[str, float], int]:
        """Return the mean of each loss over iterations with finite values, and the number of iterations without."""
        if not self._losses:
            names = [name for name in numbers if name != "grad_norm"]
            return {name: numbers[name] for name in names}, int(not math.isfinite(numbers["loss"]))
        losses = {name: torch.stack(values) for name, values in self._losses.items()}
        finite = {name: values[values.isfinite()] for name, values in losses.items()}
        means = {name: float(values.mean()) if len(values) else math.nan for name, values in finite.items()}
        return means, max(len(losses[name]) - len(finite[name]) for name in losses)

    def _begin_interval(self, trainer: TrainerHandle) -> None:
        self._losses, self._last = {}, None
        self._iterations = self._skipped = self._tokens = 0
        self._since = _training_time(trainer)


class SaveLog(Callback):
    """Print a line for each checkpoint, and create links with Megatron's names.

    `iter_0000100` is a link to the checkpoint of that step, and `latest_checkpointed_iteration.txt` contains the number
    of the newest one. Checkpoints have Tessera's format, which `mm-convert`, `--load` and `tessera` read.
    """

    def __init__(self, args: Any) -> None:
        self.args = args

    def on_save(self, trainer: TrainerHandle, path: Path) -> None:
        if not trainer.world.is_main:
            return
        step, folder = int(path.name.split("-")[1].partition(".")[0]), trainer.config.folder
        print(f"saving checkpoint at iteration {step:7d} to {folder} in safetensors format", flush=True)
        for link in folder.glob("iter_*"):
            if link.is_symlink() and not link.exists():  # the checkpoint behind the link was deleted
                link.unlink()
        fresh = folder / f"{LATEST}.part"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(path, folder), target_is_directory=True)
        fresh.replace(folder / f"iter_{step:07d}")
        fresh.write_text(str(step), encoding="utf-8")
        fresh.replace(folder / LATEST)
        print(f"  successfully saved checkpoint from iteration {step:7d} to {path}", flush=True)


def consumed_samples(trainer: TrainerHandle, args: Any) -> int:
    """Return the number of consumed samples as Megatron counts them, even if the batch size has changed in between."""
    return int(trainer.rows_drawn * args.global_batch_size // trainer.length.rows_per_step)


def print_on_last_rank(world: World, line: str) -> None:
    """Print a line on the last rank."""
    if world.rank == world.size - 1:
        print(line, flush=True)


def _training_time(trainer: TrainerHandle) -> float:
    """Return the training time in seconds, without evaluations and saves."""
    return time.perf_counter() - trainer.paused_seconds


def _loss_scale(trainer: TrainerHandle) -> float:
    scale = trainer.engine.loss_scale
    return 1.0 if scale is None else float(scale.state[0])
