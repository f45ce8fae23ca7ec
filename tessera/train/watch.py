"""Ends all ranks with one clear line when one of them died, stopped, stalled or fell out of step.

A collective that waits for a lost rank cannot be interrupted, and the main thread is inside it. So each rank has two
threads of its own: one talks (a beat out, verdicts in, over a connection of its own to the store where the ranks met),
one thinks (looks at what came in, and at whether anything comes at all). The main rank judges everyone; everyone
judges the main rank and the processes of its own machine. Whoever reaches a verdict first tells it through the store;
then each rank writes it to its log and leaves with `EXIT_CODE`. The hot path pays for one string per block.

A beat says what its rank is doing (`train.activity`), and nobody is ended for being slow: a rank that reads data,
compiles, computes or is outside of a step is at work, and those that wait for it wait. What is left to `stall_s` is a
rank that does none of this and does not wait in a collective either.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tessera.core import device as devices
from tessera.core import log as logs
from tessera.core.dist import OutOfStep, RankFailure, barrier, is_peer_error
from tessera.core.errors import first_line
from tessera.core.names import clean
from tessera.core.process import Process
from tessera.core.run_config import ParallelSection
from tessera.train.activity import (
    COMPILING,
    COMPUTING,
    ON_DEVICE,
    OUTSIDE,
    READING,
    UNEXPLAINED,
    Effort,
    collective_of,
    compiles,
)
from tessera.train.callbacks import Callback
from tessera.train.side_channel import SideChannel
from tessera.train.verdict import STEP_WORK, Beat, Patience, Verdict, failed, judge, lost

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

EXIT_CODE = RankFailure.exit_code
FAILURE_FILE = Path("logs") / "failure.json"
_BEAT_S = 0.5
_GRACE_S = 5.0  # an error that all ranks raise together should be told by each in its own words
_SLOW_WORDS = ("reporting",)  # parts of a step that call users' code, which may take its time


class Watch(Callback):
    def __init__(self, blocks: Sequence[str], settings: ParallelSection) -> None:
        self.blocks = list(blocks)
        self.patience = Patience(settings.silence_s, settings.stall_s, settings.timeout_s)
        self.interval = min(_BEAT_S, settings.silence_s / 5, settings.stall_s / 5)
        self.module = ""  # written by the main thread's hooks, read by the thinking thread
        self._hooks: list[Any] = []
        self._channel: SideChannel | None = None
        self._thinker: threading.Thread | None = None
        self._stop = threading.Event()
        self._verdict: Verdict | None = None
        self._settled = threading.Event()  # the verdict is known: the process is about to end
        self._own_error = threading.Event()
        self._ending = threading.Lock()  # never released: the main thread and the thinking one may come at once

    # ------------------------------------------------------------------------------------------ moments of the run

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.size == 1:
            return
        self._trainer = trainer
        self._host = socket.gethostname()
        self._main_thread = threading.get_ident()
        self._first_step = trainer.step
        self._position: tuple[int, str, str, bool, str] | None = None
        self._moved_at = time.monotonic()
        self._process = Process.this()
        self._own_share = Effort(self.patience.stall_s / 2)
        self._shares: dict[int, Effort] = {}  # of silent ranks of this machine
        self._vouched: tuple[int, ...] = ()
        self._looking = threading.Lock()  # both threads look, and the main one where it fails
        self._count = 0
        self._channel = SideChannel(trainer.world, self.interval, self._look)
        # By the names their author gave them; a stage of a pipeline has some of the blocks.
        parts = {clean(name): part for name, part in trainer.module.named_modules()}
        for path in self.blocks:
            if path in parts:
                self._follow(path, parts[path])
        self._thinker = threading.Thread(target=self._think, name="tessera-watch", daemon=True)
        self._thinker.start()

    def on_end(self, trainer: Trainer) -> None:
        if self._channel is not None:
            try:
                barrier()  # a rank that went ahead would look lost to the others
            except RuntimeError as error:
                self.on_error(trainer, error)
                raise
            self._close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        if self._channel is None:
            return
        if isinstance(error, OutOfStep):
            self._end(Verdict("disagree", tuple(error.ranks), error.what))
        if is_peer_error(error):
            # A partner is gone. Who, the watch finds out sooner than the reader of a stack would.
            logs.to_file(logging.WARNING, f"a collective broke: {first_line(error)}")
            self._settled.wait(self.patience.silence_s + 2 * self.interval + 1)
            self._end(self._verdict or failed(self._look(), error))
        self._own_error.set()
        self._channel.publish(failed(self._look(), error))
        self._channel.let_others_read()
        self._close()

    def _close(self) -> None:
        self._stop.set()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        assert self._thinker is not None
        assert self._channel is not None
        self._thinker.join(5)
        self._channel.close()
        self._channel = None

    # ------------------------------------------------------------------------------------------ where this rank is

    def _follow(self, path: str, module: nn.Module) -> None:
        """Only assignments of fixed strings: nothing that waits for a device, nothing that a compiler must guard."""
        forward, backward = f"forward of {path}", f"backward of {path}"

        def enter(module: nn.Module, inputs: Any) -> None:
            self.module = forward

        def enter_backward(gradient: torch.Tensor) -> None:
            self.module = backward

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not torch.compiler.is_compiling() and isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(enter_backward)  # type: ignore[no-untyped-call]

        # First of the hooks: what gathers the weights is one too, and the place to wait for a lost rank.
        before = module.register_forward_pre_hook(enter, prepend=True)
        self._hooks += [before, module.register_forward_hook(leave)]

    def _look(self) -> Beat:
        with self._looking:
            trainer, now = self._trainer, time.monotonic()
            self._own_share.note(now, self._process.effort_s() or time.process_time())
            collective = collective_of(self._main_thread)
            activity = self._phase()
            # Who goes from compiling or waiting to something else has moved, though it may be in the same block.
            position = (trainer.step, trainer.doing, self.module, bool(collective), activity)
            if position != self._position:
                self._position, self._moved_at = position, now
            still_s = now - self._moved_at
            self._count += 1
            return Beat(
                rank=trainer.world.rank,
                count=self._count,
                step=position[0],
                doing=position[1],
                module=position[2],
                still_s=still_s,
                collective=collective,
                host=self._host,
                activity=activity or self._effort(still_s),
                vouches=self._vouched,
            )

    def _phase(self) -> str:
        """What the run is at, where that explains by itself that a rank stands still."""
        trainer = self._trainer
        if compiles():
            return COMPILING
        if trainer.doing == "loading data":
            return READING
        first = trainer.step == self._first_step  # it fills caches and makes connections
        return OUTSIDE if first or trainer.doing not in STEP_WORK or trainer.doing in _SLOW_WORDS else UNEXPLAINED

    def _effort(self, still_s: float) -> str:
        device = self._trainer.world.device
        # A question to a device may disturb what is being recorded there: only asked when it matters.
        if device.type != "cpu" and still_s > self.patience.stall_s / 2 and devices.has_unfinished_work(device):
            return ON_DEVICE  # the host may well spin meanwhile
        return COMPUTING if self._own_share.busy else UNEXPLAINED

    # ------------------------------------------------------------------------------------------ the thinking thread

    def _think(self) -> None:
        assert self._channel is not None
        channel, before = self._channel, time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            if now - before > 3 * self.interval + 1:  # this process was itself stopped: old news says nothing
                channel.forgive()
            before = now
            verdict = channel.verdict or self._decide(channel)
            if verdict is not None:
                self._verdict = verdict
                self._settled.set()
                if verdict.kind == "failed" and self._own_error.wait(_GRACE_S):
                    return
                self._end(verdict)

    def _decide(self, channel: SideChannel) -> Verdict | None:
        for rank, process in channel.neighbours.items():
            if rank != channel.rank and not process.alive():
                return lost(channel.beats[rank], "died", self._look())
        silence = channel.silence()
        if silence > self.patience.silence_s:
            keeper = "stopped answering" if channel.kept_by_main_rank else "or the launcher on its machine is gone"
            return lost(channel.beats[0], f"{keeper} ({silence:.0f} s)", self._look())
        quiet = channel.silence_of_ranks()
        self._vouch(channel, quiet)
        vouched = {*self._vouched, *(rank for beat in channel.beats.values() for rank in beat.vouches)}
        # How far the others have come is the main rank's business; the rest watch the main rank alone.
        judged = channel.beats if channel.rank == 0 else {0: channel.beats[0]}
        return judge(
            judged, quiet, self.patience, self._look(), vouched & {r for r in quiet if quiet[r] > self.interval}
        )

    def _vouch(self, channel: SideChannel, quiet: Mapping[int, float]) -> None:
        """Looks at the processes of this machine's silent ranks: one that uses the processor is neither dead nor
        stopped, only kept from speaking, as by a decoder that holds Python's lock."""
        now = time.monotonic()
        silent = [rank for rank in channel.neighbours if rank != channel.rank and quiet[rank] > 2 * self.interval]
        self._shares = {rank: self._shares.get(rank) or Effort(self.patience.silence_s / 3) for rank in silent}
        for rank, share in self._shares.items():
            share.note(now, channel.neighbours[rank].effort_s())
        self._vouched = tuple(rank for rank, share in self._shares.items() if share.busy)

    def _end(self, verdict: Verdict) -> None:
        """The last act of the process, from whichever thread: say it, end what cannot end itself, go."""
        assert self._channel is not None
        self._ending.acquire()
        verdict = self._channel.publish(verdict)
        speaks = self._channel.rank == self._channel.lowest_survivor(verdict.ranks)
        logs.to_file(logging.ERROR, verdict.text)
        if speaks:
            self._record(verdict)
            print(f"error: {verdict.text}", file=sys.stderr, flush=True)
        if verdict.kind == "lost":
            for rank in verdict.ranks:
                if rank in self._channel.neighbours and rank != self._channel.rank:
                    self._channel.neighbours[rank].kill()
        self._channel.let_others_read()
        logs.close()
        sys.stdout.flush()
        os._exit(EXIT_CODE)

    def _record(self, verdict: Verdict) -> None:
        path = self._trainer.config.folder / FAILURE_FILE
        fresh = path.with_name(f"{path.name}.{self._trainer.world.rank}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps({**json.loads(verdict.dump()), "time": time.time()}), encoding="utf-8")
            os.replace(fresh, path)
        except OSError as error:  # the folder may be what failed
            logs.to_file(logging.WARNING, f"{path} could not be written: {error.strerror}")
