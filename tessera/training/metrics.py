"""Report a run: the step line and `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.runtime import device as devices
from tessera.runtime.distributed import gather_over_ranks
from tessera.runtime.files import JsonLines, last_step, truncate_after
from tessera.training.console import StepBar, mean_of, plain, step_fields, styled

log = logging.getLogger("tessera")


class Meter(Callback):
    """Collect the numbers of each step and report them once per `every` steps.

    Every rank takes part (counts are summed over ranks); the main rank writes.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._pending: list[StepResult] = []  # not yet in the file
        self._measured = 0  # steps since the speed was last reported
        self._counts: dict[str, int] = {}
        self._flops = 0.0
        self._work: list[float] = []  # of each step
        self._file: JsonLines | None = None
        self._bar: StepBar | None = None
        self._unread: list[StepResult] = []  # whose loss the bar has not shown yet
        self._since_line: list[dict[str, Any]] = []  # rows of the steps since the last line
        self._unwritten: list[dict[str, Any]] = []  # lines in the checkpoint that the file may lack
        self._since = 0.0
        self._waited = 0.0
        self._waiting = 0.0  # as of the last step

    def on_start(self, trainer: TrainerHandle) -> None:
        self._restart_clock(trainer)
        devices.reset_peak_memory(trainer.world.device)
        if trainer.world.is_main:
            self._file = self._open(trainer)
            self._bar = StepBar.on_terminal(trainer)
            if self._bar is not None:
                trainer.phase_listeners.append(self._show_phase)

    def _show_phase(self, phase: str) -> None:
        if self._bar is not None and phase not in _OF_A_STEP:
            self._bar.doing(phase)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self._pending, self._measured = [], 0
        self._unread, self._since_line = [], []
        self._counts, self._flops, self._work = {}, 0.0, []
        self._restart_clock(trainer)
        if self._file is not None:
            self._file.close()
            self._file = self._open(trainer)

    def _open(self, trainer: TrainerHandle) -> JsonLines:
        path = trainer.config.folder / "metrics.jsonl"
        # Later steps will happen again, so their old lines are removed.
        truncate_after(path, trainer.step)
        path.touch()  # also a run without a step has the file
        file = JsonLines(path)
        written = last_step(path, lambda row: row.get("kind") == "train")
        for row in self._unwritten:
            if written < row["step"] <= trainer.step:
                file.write(row)
        return file

    def state_dict(self) -> dict[str, Any]:
        return {"unwritten": _to_host(self._pending) if self._pending else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unwritten = state.get("unwritten", [])

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self._pending.append(result)
        self._measured += 1
        self._waiting = trainer.data_seconds
        for batch in result.microbatches:
            for name, value in batch.counts.items():
                self._counts[name] = self._counts.get(name, 0) + value
            self._flops += batch.flops
        self._work.append(_work_of(result.microbatches))
        if self._bar is not None:
            self._bar.step(result.step, self._ready_loss(result))
        if result.step % self.every == 0 or result.step == trainer.length.steps or result.step == 1:
            self._report(trainer)

    def _ready_loss(self, result: StepResult) -> float | None:
        """Return the newest loss that can be read without waiting for the device."""
        self._unread.append(result)
        newest = next((one for one in reversed(self._unread) if one.numbers.ready()), None)
        if newest is None:
            return None
        self._unread = [one for one in self._unread if one.step > newest.step]
        return newest.numbers()["loss"]

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        self._write_pending()  # rows stay in the order of steps, which lets a resume read the end of the file alone
        if self._file is not None:
            self._file.write({"kind": "eval", "step": trainer.step, **{f"eval_{k}": v for k, v in metrics.items()}})
            log.info("step %d  held-out %s", trainer.step, "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        """Write the last steps before the error, without numbers that are still on the device: they may never come."""
        with contextlib.suppress(Exception):  # the error that ends the run matters more
            self._write_pending(only_ready=True)
        self._close()

    def on_end(self, trainer: TrainerHandle) -> None:
        self._report(trainer)  # of a run that was stopped between two lines; every rank comes here
        self._close()

    def _write_pending(self, only_ready: bool = False) -> None:
        pending, self._pending = self._pending, []
        if self._file is None:
            return
        for result in pending:
            if only_ready and not result.numbers.ready():
                break
            row = _to_host([result])[0]
            self._since_line.append(row)
            self._file.write(row, flush=False)
        self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _restart_clock(self, trainer: TrainerHandle) -> None:
        self._since = _training_time(trainer)
        self._waited = self._waiting = trainer.data_seconds

    def _report(self, trainer: TrainerHandle) -> None:
        if not self._measured:
            return
        pending, self._pending = self._pending, []
        steps, self._measured = self._measured, 0
        values = _to_host(pending)  # waits for the last step's backward, not for its update
        elapsed = max(_training_time(trainer) - self._since, 1e-9)
        waited = self._waiting - self._waited
        names = sorted(self._counts)
        local = torch.tensor([self._flops, *(self._counts[n] for n in names), *self._work], dtype=torch.float64)
        by_rank = gather_over_ranks(local)
        sums = by_rank[:, : 1 + len(names)].sum(dim=0).tolist()
        balance = balance_of(by_rank[:, 1 + len(names) :])
        self._counts, self._flops, self._work = {}, 0.0, []
        self._restart_clock(trainer)
        if self._file is None or not values:
            return
        memory = devices.memory(trainer.world.device)
        speed: dict[str, Any] = {f"{n}_per_s": total / elapsed for n, total in zip(names, sums[1:], strict=True)}
        speed |= {
            "data_wait": min(1.0, waited / elapsed),
            "memory_gib": memory.used / 2**30,
            "peak_memory_gib": memory.peak / 2**30,
            "step_seconds": elapsed / steps,
        }
        if balance is not None:
            speed["balance"] = balance
        peak = devices.peak_flops(trainer.world.device)
        if sums[0]:
            speed["tflops"] = sums[0] / elapsed / trainer.world.size / 1e12
        if sums[0] and peak:
            speed["mfu"] = sums[0] / elapsed / trainer.world.size / peak
        for row in values[:-1]:
            self._file.write(row, flush=False)
        self._file.write(values[-1] | speed)
        metrics = [name for name in values[-1] if name not in _OF_EVERY_STEP]
        rows, self._since_line = [*self._since_line, *values], []
        means = mean_of(rows, ["loss", *metrics])
        fields = step_fields(values[-1] | speed | means, trainer.length.steps, metrics)
        log.info("%s", plain(fields), extra={"styled": styled(fields)})


_OF_EVERY_STEP = ("kind", "step", "epoch", "loss", "grad_norm", "lr", "skipped", "loss_scale")


# Phases of every step. The bar names any other phase.
_OF_A_STEP = (
    "loading data",
    "agreeing to go on",
    "running the model",
    "clipping gradients",
    "updating weights",
    "reporting",
)


def balance_of(work: Tensor) -> float | None:
    """Return the largest work of a rank over the mean, averaged over steps; `work` is [ranks, steps].

    A step takes longer by this factor than with equal work. Return None with fewer than two ranks that report work.
    """
    work = work[work.sum(dim=1) > 0]
    if len(work) < 2:
        return None
    mean = work.mean(dim=0)
    return float((work.amax(dim=0) / mean)[mean > 0].mean())


def _work_of(microbatches: Sequence[Batch]) -> float:
    """Return FLOPs where the family states them, tokens otherwise."""
    flops = sum(batch.flops for batch in microbatches)
    return flops or float(sum(batch.counts.get("tokens", 0) for batch in microbatches))


def _training_time(trainer: TrainerHandle) -> float:
    """Return a clock that stops while the run evaluates or saves: those do not count as training speed."""
    return time.perf_counter() - trainer.paused_seconds


def _to_host(results: list[StepResult]) -> list[dict[str, Any]]:
    rows = []
    for result in results:
        row: dict[str, Any] = {"kind": "train", "step": result.step}
        if result.epoch is not None:
            row["epoch"] = round(result.epoch, 6)
        row |= {**result.numbers(), "lr": result.lr}
        rows.append(row if result.applied else {**row, "skipped": True})
    return rows
