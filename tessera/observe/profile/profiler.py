"""Record the steps that `profile.steps` names, and write tables, a trace and a memory snapshot into `RUN/profile`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import profile

from tessera.config.run_config import ProfileSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError
from tessera.observe.profile.marks import Marks
from tessera.observe.profile.table import TimeTable, make_table
from tessera.runtime import device as devices
from tessera.runtime.torch_internals import dump_allocations, record_allocations

FOLDER = "profile"
_LOGGED = 5  # rows of the table

log = logging.getLogger("tessera")


class StepProfiler(Callback):
    """Record from the end of the step before the window to the end of its last: waiting for data counts."""

    def __init__(self, settings: ProfileSection, blocks: Sequence[str]) -> None:
        assert settings.steps is not None
        self.first, self.last = settings.steps
        self.settings = settings
        self.blocks = list(blocks)
        self._recorder: profile | None = None
        self._marks: Marks | None = None
        self._begun_after = 0

    def on_start(self, trainer: TrainerHandle) -> None:
        beyond = [rank for rank in self.settings.ranks if rank >= trainer.world.size]
        if beyond:
            raise TesseraError(
                f"rank {beyond[0]} cannot be profiled: the run has {trainer.world.size}",
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
        """Record the steps of the window again."""
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
        """Begin where training starts or resumes inside the window."""
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
            self._recorder = profile(
                activities=devices.profiler_activities(device),
                record_shapes=True,
                profile_memory=self.settings.memory,
                with_flops=True,
            )
            self._recorder.start()
            self._marks = Marks(trainer.module, self.blocks)
            _wait_for(device)
        self._marks.phase("reporting")
        trainer.phase_listeners.append(self._marks.phase)

    def _stop(self, trainer: TrainerHandle) -> profile | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._marks is None:
            return None
        trainer.phase_listeners.remove(self._marks.phase)
        self._marks.close()
        recorder.stop()
        if self._has_snapshot(trainer.world.device):
            record_allocations(trainer.world.device, False)
        return recorder

    def _has_snapshot(self, device: torch.device) -> bool:
        return self.settings.memory and device.type != "cpu"

    def _finish(self, trainer: TrainerHandle) -> None:
        device, first, steps = trainer.world.device, self._begun_after + 1, trainer.step - self._begun_after
        _wait_for(device)  # the last phase ends when the device has done its work
        with trainer.paused("writing a profile"):
            began = time.perf_counter()
            folder = trainer.config.folder / FOLDER
            if trainer.world.rank:
                folder /= f"rank-{trainer.world.rank}"
            folder.mkdir(parents=True, exist_ok=True)
            if self._has_snapshot(device):
                dump_allocations(device, folder / "memory.pickle")
            recorder = self._stop(trainer)
            assert recorder is not None
            recorder.export_chrome_trace(str(folder / "trace.json.gz"))
            table = make_table(recorder, steps, device.type != "cpu")
            self._write(trainer, folder, table, first)
            log.info("profile of steps %d to %d (%s):", first, trainer.step, folder / "table.txt")
            for row in table.as_json()["modules"][:_LOGGED]:
                log.info("  %6.1f%%  %s %s", 100 * row["share"], row["name"], row["direction"])
            log.info("  written in %.1f s", time.perf_counter() - began)

    def _write(self, trainer: TrainerHandle, folder: Path, table: TimeTable, first: int) -> None:
        name, world = trainer.config.name, trainer.world
        title = f"{name}: steps {first} to {trainer.step} on {devices.name(world.device)}"
        title += f", rank {world.rank} of {world.size}" if world.size > 1 else ""
        about = {
            "run": name,
            "steps": [first, trainer.step],
            "device": devices.name(world.device),
            "rank": world.rank,
            "ranks": world.size,
        }
        (folder / "table.txt").write_text(table.as_text(title), encoding="utf-8")
        (folder / "table.json").write_text(json.dumps({**about, **table.as_json()}, indent=1), encoding="utf-8")


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
