"""End all ranks with one clear line when one of them died, failed, stopped, stalled or fell out of step.

A collective that waits for a lost rank cannot be interrupted, and the main thread is inside it. So each rank has two
more threads: one exchanges heartbeats and verdicts over its own connection to the rendezvous store, the other one
diagnoses them. The main rank diagnoses all ranks; every rank diagnoses the main rank and the processes of its own
machine. The first verdict is published in the store; then each rank writes it to its log and exits with `EXIT_CODE`.
The training thread pays for one string assignment per block.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store

from tessera.config.run_config import ParallelSection
from tessera.core.callback import Callback, TrainerHandle
from tessera.errors import first_line
from tessera.observe.watchdog.diagnosis import (
    COMPILING,
    COMPUTING,
    ON_DEVICE,
    OUTSIDE,
    READING,
    STEP_PHASES,
    UNEXPLAINED,
    CpuUsage,
    Heartbeat,
    Verdict,
    collective_of,
    diagnose,
    failed,
    is_compiling,
    lost,
)
from tessera.runtime import device as devices
from tessera.runtime import log as logs
from tessera.runtime.distributed import OutOfStep, RankFailure, World, barrier, is_peer_error
from tessera.runtime.files import replacing
from tessera.runtime.launcher import end_without_launcher
from tessera.runtime.modules import clean_name
from tessera.runtime.process import Process
from tessera.runtime.torch_internals import default_store

EXIT_CODE = RankFailure.exit_code
FAILURE_FILE = Path("logs") / "failure.json"
_HEARTBEAT_S = 0.5
_GRACE_S = 5.0  # after a rank has failed, seconds in which this rank may raise and report its own error
_USER_PHASES = ("reporting",)  # phases that run callbacks of users, which may take long
_PUBLISH_S = 2.0  # timeout for writing the cause of the failure to the store, which may be lost


class Watchdog(Callback):
    """Watch the other ranks from threads, and end all ranks when one is lost, stalled or out of step."""

    def __init__(self, blocks: Sequence[str], settings: ParallelSection) -> None:
        self.blocks = list(blocks)
        self.timeouts = settings  # `silence_s`, `stall_s` and `timeout_s`
        self.interval = min(_HEARTBEAT_S, settings.silence_s / 5, settings.stall_s / 5)
        self.module = ""  # current block, such as "forward of layers.3"; written by hooks in the main thread
        self._hooks: list[Any] = []
        self._channel: HeartbeatChannel | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._verdict: Verdict | None = None
        self._settled = threading.Event()  # set when `_verdict` is known and the process is about to end
        self._own_error = threading.Event()
        self._ending = threading.Lock()  # taken by the first thread that ends the process, and never released

    # ------------------------------------------------------------------------------------------ callback

    def on_start(self, trainer: TrainerHandle) -> None:
        if trainer.world.size == 1:
            return
        self._trainer = trainer
        self._host = socket.gethostname()
        self._main_thread = threading.get_ident()
        self._first_step = trainer.step
        self._position: tuple[int, str, str, bool, str] | None = None
        self._moved_at = time.monotonic()
        self._process = Process.this()
        self._own_usage = CpuUsage(self.timeouts.stall_s / 2)
        self._usage_of_silent: dict[int, CpuUsage] = {}  # CPU usage of silent ranks of this machine
        self._busy_silent: tuple[int, ...] = ()
        self._heartbeat_lock = threading.Lock()  # several threads make heartbeats
        self._count = 0
        self._channel = HeartbeatChannel(trainer.world, self.interval, self._heartbeat)
        # Modules by name, without wrapper prefixes. A pipeline stage has only some of the blocks.
        parts = {clean_name(name): part for name, part in trainer.module.named_modules()}
        for path in self.blocks:
            if path in parts:
                self._follow(path, parts[path])
        self._thread = threading.Thread(target=self._watch, name="tessera-watchdog", daemon=True)
        self._thread.start()

    def on_end(self, trainer: TrainerHandle) -> None:
        if self._channel is not None:
            try:
                barrier()  # a rank that left earlier would look lost to the others
            except RuntimeError as error:
                self.on_error(trainer, error)
                raise
            self._close()

    def on_error(self, trainer: TrainerHandle, error: BaseException) -> None:
        if self._channel is None:
            return
        if isinstance(error, OutOfStep):
            self._end(Verdict("disagree", tuple(error.ranks), error.what))
        if is_peer_error(error):
            # The error of the collective does not name the lost rank: wait for the verdict of the watching thread.
            logs.to_file(logging.WARNING, f"a collective failed: {first_line(error)}")
            self._settled.wait(self.timeouts.silence_s + 2 * self.interval + 1)
            self._end(self._verdict or failed(self._heartbeat(), error))
        self._own_error.set()
        self._channel.publish(failed(self._heartbeat(), error))
        self._channel.let_others_read()
        self._close()

    def _close(self) -> None:
        self._stop.set()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        assert self._thread is not None
        assert self._channel is not None
        self._thread.join(5)
        self._channel.close()
        self._channel = None

    # ------------------------------------------------------------------------------------------ this rank's state

    def _follow(self, path: str, module: nn.Module) -> None:
        """Add hooks that set `self.module` when a block runs forward or backward.

        The hooks assign constant strings: they never wait for a device, and add no guards to compiled code.
        """
        forward, backward = f"forward of {path}", f"backward of {path}"

        def enter(module: nn.Module, inputs: Any) -> None:
            self.module = forward

        def enter_backward(gradient: torch.Tensor) -> None:
            self.module = backward

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not torch.compiler.is_compiling() and isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(enter_backward)  # type: ignore[no-untyped-call]

        # `prepend`: run before FSDP's hook, which gathers weights and blocks if a rank is lost.
        before = module.register_forward_pre_hook(enter, prepend=True)
        self._hooks += [before, module.register_forward_hook(leave)]

    def _heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the current position and activity of this rank."""
        with self._heartbeat_lock:
            trainer, now = self._trainer, time.monotonic()
            self._own_usage.note(now, self._process.effort_s() or time.process_time())
            collective = collective_of(self._main_thread)
            activity = self._activity_of_phase()
            # A new activity counts as progress, even if step, phase and module are the same.
            position = (trainer.step, trainer.phase, self.module, bool(collective), activity)
            if position != self._position:
                self._position, self._moved_at = position, now
            still_s = now - self._moved_at
            self._count += 1
            return Heartbeat(
                rank=trainer.world.rank,
                count=self._count,
                step=position[0],
                phase=position[1],
                module=position[2],
                still_s=still_s,
                collective=collective,
                host=self._host,
                activity=activity or self._activity_of_process(still_s),
                busy_silent=self._busy_silent,
            )

    def _activity_of_phase(self) -> str:
        """Return the activity that follows from the phase of the trainer; empty if none does."""
        trainer = self._trainer
        if is_compiling():
            return COMPILING
        if trainer.phase == "loading data":
            return READING
        first = trainer.step == self._first_step  # the first step may take long: it fills caches and connects ranks
        return OUTSIDE if first or trainer.phase not in STEP_PHASES or trainer.phase in _USER_PHASES else UNEXPLAINED

    def _activity_of_process(self, still_s: float) -> str:
        device = self._trainer.world.device
        # Ask the device only after half of `stall_s`: the query may disturb a CUDA graph capture.
        if device.type != "cpu" and still_s > self.timeouts.stall_s / 2 and devices.has_unfinished_work(device):
            return ON_DEVICE  # the process may use the CPU while it waits for the device
        return COMPUTING if self._own_usage.busy else UNEXPLAINED

    # ------------------------------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        assert self._channel is not None
        channel, before = self._channel, time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            # This process was suspended: it may have missed heartbeats of others.
            if now - before > 3 * self.interval + 1:
                channel.reset_silence()
            before = now
            verdict = channel.verdict or self._decide(channel)
            if verdict is not None:
                self._verdict = verdict
                self._settled.set()
                if verdict.kind == "failed" and self._own_error.wait(_GRACE_S):
                    return
                self._end(verdict)

    def _decide(self, channel: HeartbeatChannel) -> Verdict | None:
        for rank, process in channel.neighbours.items():
            if rank != channel.rank and not process.alive():
                return lost(channel.heartbeats[rank], "died", self._heartbeat())
        silence = channel.silence()
        if silence > self.timeouts.silence_s:
            what = "stopped answering" if channel.store_is_on_main_rank else "or the launcher on its machine is gone"
            return lost(channel.heartbeats[0], f"{what} ({silence:.0f} s)", self._heartbeat())
        silent_s = channel.silence_of_ranks()
        self._check_silent_neighbours(channel, silent_s)
        busy = {*self._busy_silent, *(rank for other in channel.heartbeats.values() for rank in other.busy_silent)}
        busy &= {rank for rank in silent_s if silent_s[rank] > self.interval}
        # The main rank diagnoses all ranks. Every other rank diagnoses only the main rank.
        diagnosed = channel.heartbeats if channel.rank == 0 else {0: channel.heartbeats[0]}
        return diagnose(diagnosed, silent_s, self.timeouts, self._heartbeat(), busy)

    def _check_silent_neighbours(self, channel: HeartbeatChannel, silent_s: Mapping[int, float]) -> None:
        """Find the silent ranks of this machine whose process uses the CPU.

        They are neither dead nor stopped: a call that holds the GIL, such as a decoder, blocks their heartbeat thread.
        """
        now = time.monotonic()
        silent = [rank for rank in channel.neighbours if rank != channel.rank and silent_s[rank] > 2 * self.interval]
        usages = self._usage_of_silent
        self._usage_of_silent = {rank: usages.get(rank) or CpuUsage(self.timeouts.silence_s / 3) for rank in silent}
        for rank, usage in self._usage_of_silent.items():
            usage.note(now, channel.neighbours[rank].effort_s())
        self._busy_silent = tuple(rank for rank, usage in self._usage_of_silent.items() if usage.busy)

    def _end(self, verdict: Verdict) -> None:
        """Report the verdict, kill the lost processes of this machine, and exit. Any thread may call it."""
        assert self._channel is not None
        self._ending.acquire()
        end_without_launcher()
        verdict = self._channel.publish(verdict)
        logs.to_file(logging.ERROR, verdict.text)
        if self._channel.rank == self._channel.lowest_survivor(verdict.ranks):
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as fresh:
                fresh.write_text(json.dumps({**json.loads(verdict.dump()), "time": time.time()}), encoding="utf-8")
        except OSError as error:  # the file system of the run folder may have failed
            logs.to_file(logging.WARNING, f"{path} could not be written: {error.strerror}")


class HeartbeatChannel:
    """Exchange heartbeats and one verdict through the rendezvous store. All ranks must create it together.

    A call of the store blocks while its server is stopped. So one thread calls the store, and other threads read the
    heartbeats that it received last. `make_heartbeat` returns the heartbeat of this rank.
    """

    def __init__(self, world: World, interval: float, make_heartbeat: Callable[[], Heartbeat]) -> None:
        self.rank, self.size, self.interval, self.make_heartbeat = world.rank, world.size, interval, make_heartbeat
        self.store_is_on_main_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.verdict: Verdict | None = None
        self._store = _own_connection()
        self._store.set(f"process/{self.rank}", json.dumps(Process.this().dump()))
        self._store.set(f"heartbeat/{self.rank}", make_heartbeat().dump())
        barrier()  # wait until all ranks have written their keys: reading a missing key would block
        self.neighbours = self._find_neighbours()
        self.heartbeats: dict[int, Heartbeat] = {}
        self._changed_at: dict[int, float] = {}
        self._answered_at = time.monotonic()
        # The main rank reads all ranks. The others read the main rank, rank 1 and the ranks of their machine.
        self._read = range(self.size) if self.rank == 0 else sorted({0, 1, *self.neighbours})
        self._exchange()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="tessera-heartbeat", daemon=True)
        self._thread.start()

    def _find_neighbours(self) -> dict[int, Process]:
        """Return rank -> process for the visible ranks of this machine, which torchrun numbers consecutively."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        ranks = range(max(0, first), min(self.size, first + local))
        texts = self._store.multi_get([f"process/{rank}" for rank in ranks])
        processes = {rank: Process.load(json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        return {rank: process for rank, process in processes.items() if process.visible()}

    def _talk(self) -> None:
        while not self._stop.wait(self.interval):
            with contextlib.suppress(RuntimeError):  # a failed call of the store counts as silence
                self._exchange()

    def _exchange(self) -> None:
        self._store.set(f"heartbeat/{self.rank}", self.make_heartbeat().dump())
        texts = self._store.multi_get([f"heartbeat/{rank}" for rank in self._read])
        if self._store.check(["verdict"]):
            self.verdict = Verdict.load(self._store.get("verdict").decode())
        now = time.monotonic()
        for rank, text in zip(self._read, texts, strict=True):
            heartbeat = Heartbeat.load(text.decode())
            if rank not in self.heartbeats or heartbeat.count != self.heartbeats[rank].count:
                self.heartbeats[rank] = heartbeat
                self._changed_at[rank] = now
        self._answered_at = now

    def silence(self) -> float:
        """Return the seconds since the store last answered."""
        return time.monotonic() - self._answered_at

    def silence_of_ranks(self) -> dict[int, float]:
        """Return the seconds from each rank's last new heartbeat to the last answer of the store.

        Time in which the store does not answer is not counted.
        """
        answered = self._answered_at
        return {rank: max(0.0, answered - at) for rank, at in self._changed_at.items()}

    def reset_silence(self) -> None:
        now = time.monotonic()
        self._answered_at = now
        self._changed_at = dict.fromkeys(self._changed_at, now)

    def lowest_survivor(self, blamed: Sequence[int]) -> int:
        """Return the lowest rank of this machine that is not blamed: it prints the verdict."""
        ranks = sorted({self.rank, *self.neighbours})
        return next((rank for rank in ranks if rank not in blamed), ranks[0])

    def publish(self, verdict: Verdict) -> Verdict:
        """Publish a verdict in the store unless another rank has; return the verdict that was published first."""
        box = [self.verdict or verdict]

        def settle() -> None:
            with contextlib.suppress(RuntimeError):
                if self._store.add("settled", 1) == 1:
                    self._store.set("verdict", verdict.dump())
                else:
                    box[0] = Verdict.load(self._store.get("verdict").decode())

        if self.verdict is None:
            thread = threading.Thread(target=settle, daemon=True)
            thread.start()
            thread.join(_PUBLISH_S)
        return box[0]

    def let_others_read(self) -> None:
        """Wait for two heartbeats if this process serves the store, so that the other ranks can read the verdict."""
        if self.rank == 0 and self.store_is_on_main_rank:
            time.sleep(2 * self.interval + 0.2)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self.interval + 1)


def _own_connection() -> Store:
    """Return a second connection to the store of the default group, with a new prefix for its keys."""
    generator = torch.Generator()
    generator.seed()  # a separate generator, to leave the random numbers of training unchanged
    nonce = torch.randint(2**62, (1,), dtype=torch.int64, generator=generator)
    dist.broadcast(nonce, src=0)
    connection: Store = default_store().clone()  # type: ignore[attr-defined]
    return PrefixStore(f"watchdog/{int(nonce)}", connection)
