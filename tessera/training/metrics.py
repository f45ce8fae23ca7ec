"""Write `metrics.jsonl` and the step lines of a run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.runtime import device as devices
from tessera.runtime.distributed import gather_over_ranks
from tessera.runtime.files import JsonLines, last_step, step_of, truncate_after
from tessera.training.console import mean_of, plain, step_fields, styled

log = logging.getLogger("tessera")


class Meter(Callback):
    """Write the metrics of each step to `metrics.jsonl`, and a log line with the speed.

    Log lines are written for the first step, every `every` steps, and for the last step.

    Numbers of tokens and samples are summed over all ranks. The main rank writes.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._file: JsonLines | None = None  # open only on the main rank, while the run trains
        self._unwritten: list[dict[str, Any]] = []  # rows of the loaded checkpoint, which the file may not contain yet
        self._reset()

    def _reset(self) -> None:
        self._pending: list[StepResult] = []  # results of steps that are not yet in the file
        self._since_line: list[dict[str, Any]] = []  # rows of the steps since the last log line
        self._measured = 0  # number of steps since the last log line
        self._counts: dict[str, int] = {}
        self._flops = 0.0
        self._work: list[float] = []  # FLOPs or tokens of each step
        self._since = 0.0
        self._waited = 0.0
        self._waiting = 0.0  # total seconds of waiting for data, at the end of the last step

    def on_start(self, trainer: TrainerHandle) -> None:
        self._restart_clock(trainer)
        devices.reset_peak_memory(trainer.world.device)
        if trainer.world.is_main:
            self._open(trainer)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        self._reset()
        self._restart_clock(trainer)
        if self._file is not None:
            self._file.close()
            self._open(trainer)

    def _open(self, trainer: TrainerHandle) -> None:
        path = trainer.config.folder / "metrics.jsonl"
        truncate_after(path, trainer.step)  # remove rows of later steps, which will be trained again
        path.touch()  # a run without steps has the file, too
        self._file = JsonLines(path)
        written = last_step(path, lambda row: row.get("kind") == "train")
        for row in self._unwritten:
            if written < row["step"] <= trainer.step:
                self._file.write(row)

    def state_dict(self) -> dict[str, Any]:
        return {"unwritten": [row_of(result) for result in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unwritten = [row for row in state.get("unwritten", []) if step_of(row) is not None]

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        self._pending.append(result)
        self._measured += 1
        self._waiting = trainer.data_seconds
        for batch in result.microbatches:
            for name, value in batch.counts.items():
                self._counts[name] = self._counts.get(name, 0) + value
            self._flops += batch.flops
        self._work.append(_work_of(result.microbatches))
        if result.step % self.every == 0 or result.step == trainer.length.steps or result.step == 1:
            self._report(trainer)

    def on_eval(self, trainer: TrainerHandle, metrics: dict[str, float]) -> None:
        self._write_pending()  # rows of earlier steps come first: a resume reads only the end of the file
        if self._file is not None:
            self._file.write({"kind": "eval", "step": trainer.step, **{f"eval_{k}": v for k, v in metrics.items()}})
            log.info("step %d  held-out %s", trainer.step, "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        """Write the rows of the last steps, except results still on the device: after an error reading could block."""
        with contextlib.suppress(Exception):  # an error here must not hide the error that ended the run
            ready = itertools.takewhile(lambda result: result.numbers.ready(), self._pending)
            self._pending = list(ready)
            self._write_pending()
        self._close()

    def on_end(self, trainer: TrainerHandle) -> None:
        self._report(trainer)  # write a log line for the steps since the last one
        self._close()

    def _write_pending(self, speed: Mapping[str, Any] | None = None) -> None:
        """Write the rows of steps that are not yet in the file. The last row also gets the values of `speed`."""
        rows = [row_of(result) for result in self._pending]
        self._pending = []
        if rows and speed:
            rows[-1] |= speed
        if self._file is not None:
            for row in rows:
                self._file.write(row, flush=False)
            self._file.flush()
            self._since_line += rows

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _restart_clock(self, trainer: TrainerHandle) -> None:
        self._since = _training_time(trainer)
        self._waited = self._waiting = trainer.data_seconds

    def _report(self, trainer: TrainerHandle) -> None:
        if not self._measured:
            return
        if self._pending:
            self._pending[-1].numbers()  # wait for the last backward on the device, before the time is measured
        elapsed = max(_training_time(trainer) - self._since, 1e-9)
        names = sorted(self._counts)
        local = torch.tensor([self._flops, *(self._counts[n] for n in names), *self._work], dtype=torch.float64)
        by_rank = gather_over_ranks(local)
        flops, *sums = by_rank[:, : 1 + len(names)].sum(dim=0).tolist()
        balance = balance_of(by_rank[:, 1 + len(names) :])
        memory = devices.memory(trainer.world.device)
        speed: dict[str, Any] = {f"{n}_per_s": total / elapsed for n, total in zip(names, sums, strict=True)}
        speed |= {
            "data_wait": min(1.0, (self._waiting - self._waited) / elapsed),
            "memory_gib": memory.used / 2**30,
            "peak_memory_gib": memory.peak / 2**30,
            "step_seconds": elapsed / self._measured,
        }
        if balance is not None:
            speed["balance"] = balance
        if flops:
            speed["tflops"] = flops / elapsed / trainer.world.size / 1e12
            if peak := devices.peak_flops(trainer.world.device):
                speed["mfu"] = 1e12 * speed["tflops"] / peak
        has_rows = bool(self._pending)
        self._write_pending(speed)
        rows = self._since_line
        self._reset()
        self._restart_clock(trainer)
        if self._file is None or not has_rows:
            return
        metrics = [name for name in rows[-1] if name not in _OF_EVERY_STEP and name not in speed]
        fields = step_fields(rows[-1] | mean_of(rows, ["loss", *metrics]), trainer.length.steps, metrics)
        log.info("%s", plain(fields), extra={"styled": styled(fields)})


_OF_EVERY_STEP = ("kind", "step", "epoch", "loss", "grad_norm", "lr", "skipped", "loss_scale")


def balance_of(work: Tensor) -> float | None:
    """Return the ratio of the busiest rank's work to the mean, averaged over steps. `work`: [ranks, steps].

    A step takes longer by this factor than with equal work. Return None if fewer than two ranks report work.
    """
    work = work[work.sum(dim=1) > 0]
    if len(work) < 2:
        return None
    mean = work.mean(dim=0)
    return float((work.amax(dim=0) / mean)[mean > 0].mean())


def _work_of(microbatches: Sequence[Batch]) -> float:
    """Return the FLOPs of some micro-batches, or their number of tokens if the family does not estimate FLOPs."""
    flops = sum(batch.flops for batch in microbatches)
    return flops or float(sum(batch.counts.get("tokens", 0) for batch in microbatches))


def _training_time(trainer: TrainerHandle) -> float:
    """Return the seconds of a clock that is paused while the run evaluates or saves."""
    return time.perf_counter() - trainer.paused_seconds


def row_of(result: StepResult) -> dict[str, Any]:
    """Return the row of a step in `metrics.jsonl`."""
    row: dict[str, Any] = {"kind": "train", "step": result.step}
    if result.epoch is not None:
        row["epoch"] = round(result.epoch, 6)
    row |= {**result.numbers(), "lr": result.lr}
    return row if result.applied else {**row, "skipped": True}
