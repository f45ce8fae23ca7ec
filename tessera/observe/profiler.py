"""Record the steps that `profile.steps` names with torch's profiler, and write its table and trace into `RUN/profile`.

Forward calls of blocks and of their direct children, and the phases of a step, are named ranges of the trace. Layers of
one ModuleList share a name, so they share a row of the table. Compiled blocks do not call hooks that are added after
compilation; torch adds ranges for compiled code to the trace itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from tessera.config.run_config import ProfileSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.modules import clean_name
from tessera.runtime.torch_internals import (
    dump_allocations,
    inside_backward,
    is_compiled,
    open_range,
    record_allocations,
)

FOLDER = "profile"
FORWARD, RECOMPUTE, PHASE = "forward of ", "recompute of ", "phase: "
_ROWS = 200  # maximum number of rows in table.txt
_LOGGED = 5  # number of the slowest ranges that are logged
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

log = logging.getLogger("tessera")


class StepProfiler(Callback):
    """Record the steps from `profile.steps[0]` to `profile.steps[1]`, including their waits for data."""

    def __init__(self, settings: ProfileSection, blocks: Sequence[str]) -> None:
        assert settings.steps is not None
        self.first, self.last = settings.steps
        self.settings = settings
        self.blocks = frozenset(blocks)
        self._recorder: profile | None = None
        self._ranges: Ranges | None = None
        self._begun_after = 0

    def on_start(self, trainer: TrainerHandle) -> None:
        beyond = [rank for rank in self.settings.ranks if rank >= trainer.world.size]
        if beyond:
            raise TesseraError(
                f"rank {beyond[0]} cannot be profiled: the run has {trainer.world.size} ranks",
                where="profile.ranks",
                allowed=[str(rank) for rank in range(min(trainer.world.size, 8))],
                fix="set profile.ranks=[0]",
                code="recipe.rank-not-in-run",
            )
        self._begin_if_due(trainer)

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if result.step == self.last and self._recorder is not None:
            self._finish(trainer)
        elif result.step == self.first - 1:
            self._begin(trainer)

    def on_rewind(self, trainer: TrainerHandle) -> None:
        """Begin the recording again if the run went back into the recorded steps."""
        self._stop(trainer)
        self._begin_if_due(trainer)

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        self._stop(trainer)

    def on_end(self, trainer: TrainerHandle) -> None:
        if self._recorder is not None and trainer.step > self._begun_after:
            self._finish(trainer)
        else:
            self._stop(trainer)

    def _begin_if_due(self, trainer: TrainerHandle) -> None:
        """Begin to record if the next step is one of the steps to record."""
        if self.first - 1 <= trainer.step < self.last:
            self._begin(trainer)

    def _begin(self, trainer: TrainerHandle) -> None:
        if trainer.world.rank not in self.settings.ranks:
            return
        device = trainer.world.device
        self._begun_after = trainer.step
        with trainer.paused("beginning to profile"):
            if self._has_snapshot(device):
                record_allocations(device, True)
            memory = self.settings.memory
            self._recorder = profile(activities=devices.profiler_activities(device), profile_memory=memory)
            self._recorder.start()
            self._ranges = Ranges(trainer.module, self.blocks)
        trainer.phase_listeners.append(self._ranges.begin_phase)

    def _stop(self, trainer: TrainerHandle) -> profile | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._ranges is None:
            return None
        trainer.phase_listeners.remove(self._ranges.begin_phase)
        self._ranges.close()
        recorder.stop()
        if self._has_snapshot(trainer.world.device):
            record_allocations(trainer.world.device, False)
        return recorder

    def _has_snapshot(self, device: torch.device) -> bool:
        return self.settings.memory and device.type != "cpu"

    def _finish(self, trainer: TrainerHandle) -> None:
        device, first = trainer.world.device, self._begun_after + 1
        with trainer.paused("writing a profile"):
            folder = trainer.config.folder / FOLDER
            if trainer.world.rank:
                folder /= f"rank-{trainer.world.rank}"
            folder.mkdir(parents=True, exist_ok=True)
            if self._has_snapshot(device):
                dump_allocations(device, folder / "memory.pickle")
            recorder = self._stop(trainer)
            assert recorder is not None
            recorder.export_chrome_trace(str(folder / "trace.json.gz"))
            log.info("profile of steps %d to %d (%s):", first, trainer.step, folder / "table.txt")
            for line in _write_table(recorder, folder / "table.txt", trainer.step - first + 1, device.type != "cpu"):
                log.info("  %s", line)


def _write_table(recorder: profile, path: Path, steps: int, accelerated: bool) -> list[str]:
    """Write torch's table of a recording. Return a line for each of the ranges that took longest."""
    order = "device_time_total" if accelerated else "cpu_time_total"
    averages: Any = recorder.key_averages()
    path.write_text(averages.table(sort_by=order, row_limit=_ROWS, max_name_column_width=80), encoding="utf-8")
    ranges = [row for row in averages if row.key.startswith((FORWARD, RECOMPUTE, PHASE))]
    times = {row.key: max(getattr(row, order), row.cpu_time_total) for row in ranges}
    longest = sorted(times, key=lambda name: -times[name])[:_LOGGED]
    return [f"{times[name] / steps / 1000:10.2f} ms a step  {name}" for name in longest]


class Ranges:
    """Add ranges to a profiler's recording: one for each call of a block or its children, and for each phase."""

    def __init__(self, module: nn.Module, blocks: frozenset[str]) -> None:
        self._hooks: list[Any] = []
        self._end_phase: Callable[[], None] | None = None
        compiled = [f"{name}." for name, part in module.named_modules() if is_compiled(part)]
        for name, part in module.named_modules():
            path = clean_name(f"{name}.").removesuffix(".")
            if (path in blocks or path.rpartition(".")[0] in blocks) and not f"{name}.".startswith(tuple(compiled)):
                self._follow(_NUMBER.sub("*", path), part)

    def begin_phase(self, phase: str) -> None:
        """End the range of the last phase and begin the range of a new phase."""
        if self._end_phase is not None:
            self._end_phase()
        self._end_phase = open_range(PHASE + phase)

    def close(self) -> None:
        if self._end_phase is not None:
            self._end_phase()
        for hook in self._hooks:
            hook.remove()

    def _follow(self, path: str, module: nn.Module) -> None:
        ends: list[Callable[[], None]] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            # A forward call inside of backward is recomputation.
            ends.append(open_range((RECOMPUTE if inside_backward() else FORWARD) + path))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if ends:
                ends.pop()()

        # `prepend`: begin the range before FSDP's hook, so that it contains the gathering of weights.
        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        # `always_call`: also after an exception. Activation recomputation ends its forward pass early by an exception.
        self._hooks.append(module.register_forward_hook(leave, always_call=True))
