"""The callback: records the steps it was asked for, and writes what it found into `RUN/profile`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile

from tessera.core import device as devices
from tessera.core.errors import TesseraError
from tessera.core.run_config import ProfileSection
from tessera.train.callbacks import Callback, StepResult
from tessera.train.profile import events, memory, table
from tessera.train.profile.account import settle
from tessera.train.profile.advice import Case, advise
from tessera.train.profile.owners import own
from tessera.train.profile.page import memory_page
from tessera.train.profile.ranges import Marks

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

log = logging.getLogger("tessera")

FOLDER = "profile"


class Profile(Callback):
    """From the end of the step before the window to the end of its last: a wait for data belongs to its step."""

    def __init__(self, settings: ProfileSection, blocks: Sequence[str]) -> None:
        assert settings.steps is not None
        self.first, self.last = settings.steps
        self.settings = settings
        self.blocks = list(blocks)
        self._recorder: profile | None = None
        self._marks: Marks | None = None
        self._begun_after = 0
        self._held: dict[str, int] = {}

    def on_start(self, trainer: Trainer) -> None:
        beyond = [rank for rank in self.settings.ranks if rank >= trainer.world.size]
        if beyond:
            raise TesseraError(
                f"rank {beyond[0]} cannot be profiled: the run has {trainer.world.size}",
                where="profile.ranks",
                allowed=[str(rank) for rank in range(min(trainer.world.size, 8))],
                fix="set profile.ranks=[0]",
            )
        self._begin_if_due(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.last and self._recorder is not None:
            self._finish(trainer)
        elif result.step == self.first - 1:
            self._begin(trainer)

    def on_rewind(self, trainer: Trainer) -> None:
        """The steps of the window will come again."""
        self._stop(trainer)
        self._begin_if_due(trainer)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._stop(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._recorder is None:
            return
        if trainer.step > self._begun_after:
            self._finish(trainer)
        else:
            self._stop(trainer)

    # ------------------------------------------------------------------------------------------ recording

    def _begin_if_due(self, trainer: Trainer) -> None:
        """Training starts or goes back, perhaps into the middle of the window."""
        if self.first - 1 <= trainer.step < self.last:
            self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        if trainer.world.rank not in self.settings.ranks:
            return
        device = trainer.world.device
        self._begun_after = trainer.step
        self._held = memory.held_now(trainer.module, trainer.optimizer, device)
        with trainer.paused("beginning to profile"):
            self._recorder = profile(
                activities=devices.profiler_activities(device),
                record_shapes=True,
                profile_memory=self.settings.memory,
            )
            self._recorder.start()
            self._marks = Marks(trainer.module, self.blocks)
            _wait_for(device)
        self._marks.phase("reporting")
        trainer.followers.append(self._marks.phase)

    def _stop(self, trainer: Trainer) -> profile | None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._marks is None:
            return None
        trainer.followers.remove(self._marks.phase)
        self._marks.close()
        recorder.stop()
        return recorder

    def _finish(self, trainer: Trainer) -> None:
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

    def _write(self, trainer: Trainer, recorder: profile, folder: Path, steps: int) -> list[str]:
        device = trainer.world.device
        accelerated = device.type != "cpu"
        recording = events.read(recorder, device, self.settings.memory)
        owned = own(recording.host)
        account = settle(recording, owned, steps, accelerated)
        first = self._begun_after + 1
        sentences = advise(Case(account, trainer.config, first, devices.peak_flops(device)))
        timeline = memory.replay(recording, owned, self._held, accelerated) if self.settings.memory else None
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
        (folder / "table.txt").write_text(table.as_text(account, sentences, timeline, title), encoding="utf-8")
        told = table.as_json(account, sentences, timeline, about)
        (folder / "table.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        if timeline is not None:
            memory.write_csv(timeline, folder / "memory.csv")
            (folder / "memory.html").write_text(memory_page(timeline, title, sentences), encoding="utf-8")
        return sentences


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
