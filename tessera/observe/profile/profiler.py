"""Record the steps that `profile.steps` names, and write tables, memory and a trace into `RUN/profile`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from tessera.config.run_config import ProfileSection
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError
from tessera.observe.profile import memory, recording, summary
from tessera.observe.profile.account import find_owners, make_account
from tessera.runtime import device as devices

log = logging.getLogger("tessera")

FOLDER = "profile"


class StepProfiler(Callback):
    """Record from the end of the step before the window to the end of its last: waiting for data counts."""

    def __init__(self, settings: ProfileSection, blocks: Sequence[str]) -> None:
        assert settings.steps is not None
        self.first, self.last = settings.steps
        self.settings = settings
        self.blocks = list(blocks)
        self._recorder: profile | None = None
        self._marks: recording.Marks | None = None
        self._begun_after = 0
        self._bytes_before: dict[str, int] = {}

    def on_start(self, trainer: TrainerHandle) -> None:
        beyond = [rank for rank in self.settings.ranks if rank >= trainer.world.size]
        if beyond:
            raise TesseraError(
                f"rank {beyond[0]} cannot be profiled: the run has {trainer.world.size}",
                where="profile.ranks",
                allowed=[str(rank) for rank in range(min(trainer.world.size, 8))],
                fix="set profile.ranks=[0]",
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
        if self._recorder is None:
            return
        if trainer.step > self._begun_after:
            self._finish(trainer)
        else:
            self._stop(trainer)

    # ------------------------------------------------------------------------------------------ recording

    def _begin_if_due(self, trainer: TrainerHandle) -> None:
        """Begin where training starts or resumes inside the window."""
        if self.first - 1 <= trainer.step < self.last:
            self._begin(trainer)

    def _begin(self, trainer: TrainerHandle) -> None:
        if trainer.world.rank not in self.settings.ranks:
            return
        device = trainer.world.device
        self._begun_after = trainer.step
        self._bytes_before = memory.bytes_by_purpose(trainer.module, trainer.optimizer, device)
        with trainer.paused("beginning to profile"):
            self._recorder = profile(
                activities=devices.profiler_activities(device),
                record_shapes=True,
                profile_memory=self.settings.memory,
            )
            self._recorder.start()
            self._marks = recording.Marks(trainer.module, self.blocks)
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
        return recorder

    def _finish(self, trainer: TrainerHandle) -> None:
        steps = trainer.step - self._begun_after
        _wait_for(trainer.world.device)  # the last phase ends when the device has done what it was given
        with trainer.paused("writing a profile"):
            began = time.perf_counter()
            recorder = self._stop(trainer)
            assert recorder is not None
            folder = trainer.config.folder / FOLDER
            if trainer.world.rank:
                folder /= f"rank-{trainer.world.rank}"
            folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(folder / "trace.json.gz"))
            sentences = self._write(trainer, recorder, folder, steps)
            log.info("profile of steps %d to %d:", self._begun_after + 1, trainer.step)
            for sentence in sentences:
                log.info("  %s", sentence)
            log.info("  the table is in %s (written in %.1f s)", folder / "table.txt", time.perf_counter() - began)

    def _write(self, trainer: TrainerHandle, recorder: profile, folder: Path, steps: int) -> list[str]:
        device = trainer.world.device
        accelerated = device.type != "cpu"
        recorded = recording.read(recorder, device, self.settings.memory)
        owned = find_owners(recorded.host)
        account = make_account(recorded, owned, steps, accelerated)
        first = self._begun_after + 1
        sentences = summary.advise(summary.Case(account, trainer.config, first, devices.peak_flops(device)))
        timeline = memory.replay(recorded, owned, self._bytes_before, accelerated) if self.settings.memory else None
        title = f"{trainer.config.name}: steps {first} to {trainer.step} on {devices.name(device)}"
        if trainer.world.size > 1:
            title += f", rank {trainer.world.rank} of {trainer.world.size}"
        about: dict[str, Any] = {
            "run": trainer.config.name,
            "steps": [first, trainer.step],
            "device": devices.name(device),
            "rank": trainer.world.rank,
            "ranks": trainer.world.size,
        }
        (folder / "table.txt").write_text(summary.as_text(account, sentences, timeline, title), encoding="utf-8")
        found = summary.as_json(account, sentences, timeline, about)
        (folder / "table.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        if timeline is not None:
            memory.write_csv(timeline, folder / "memory.csv")
            (folder / "memory.html").write_text(memory.memory_page(timeline, title, sentences), encoding="utf-8")
        return sentences


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
