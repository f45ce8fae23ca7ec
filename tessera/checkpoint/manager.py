"""Save and resume a run. A checkpoint is published completely or not at all.

`StepFolders` manages the folder on rank 0. The manager coordinates all ranks.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import MANIFEST, Fault, free_bytes, no_fault, remove_folder
from tessera.checkpoint.frozen import STATE_KEY, FrozenSource, FrozenWeights
from tessera.checkpoint.publish import space_report
from tessera.checkpoint.state import MODEL, state_to_json
from tessera.checkpoint.step_folders import StepFolders, step_of
from tessera.checkpoint.storage import TABLE, SaveLayout, TensorSave, plan_save, total_bytes
from tessera.checkpoint.stored import CONFIG, STATE, StoredCheckpoint, open_checkpoint
from tessera.errors import TesseraError, few_names
from tessera.runtime import device as devices
from tessera.runtime.collective import CollectiveError, Ranks
from tessera.runtime.progress import human_bytes

_log = logging.getLogger("tessera")


@dataclass(frozen=True)
class SaveReport:
    """Report the path, the size and the duration of a save."""

    path: Path
    bytes: int
    seconds: float  # from the call of `save` until the checkpoint was published
    paused_seconds: float  # how long training waited for the save


@dataclass(frozen=True)
class _Request:
    """Hold what one save writes."""

    step: int
    tensors: TensorSave
    needed: int  # bytes of the checkpoint, summed over all ranks
    files: Mapping[str, bytes]  # file name -> content of files other than tensors, on rank 0
    started: float


class CheckpointManager:
    """Save and resume one run. Methods are collective unless noted: every rank calls them and gets the same result."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        frozen_source: FrozenSource | None = None,
        fault: Fault = no_fault,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Make a manager. `frozen_source`: locates frozen weights that checkpoints do not store."""
        self.folder = folder
        self.report: SaveReport | None = None  # report of the last save
        self.newest: Path | None = None  # last checkpoint that was saved, or read by `load_newest` or `resume`
        self.folders = StepFolders(folder, keep, fault, free)
        self._frozen_source = frozen_source
        self._frozen: FrozenWeights | None = None  # weights that checkpoints of this run do not store
        self._layout: SaveLayout | None = None  # which chunks this rank writes
        self._fault = fault
        self._thread: threading.Thread | None = None
        self._outcome: list[SaveReport | Exception] = []  # result of the background thread, once it has ended
        self._thread_ranks: Ranks | None = None

    # ------------------------------------------------------------------------------------------ saving

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Plan which rank writes which chunks, so that the first save does not wait for the planning."""
        self._layout = plan_save(Ranks.current(), self._stored(tensors))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str) -> Path:
        """Write and publish a checkpoint, then remove all but the newest `keep` and the protected one.

        `state` and `config_text` are taken from rank 0. If the disk is too full, older checkpoints are removed before
        the write, the protected one last, but never the newest undamaged one.
        """
        assert self._thread is None, "finish_background comes first"
        ranks = Ranks.current()
        request = self._request(ranks, step, tensors, state, config_text)
        report = self._complete(ranks, request, None)
        self.report, self.newest = report, report.path
        return report.path

    def save_in_background(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str
    ) -> None:
        """Copy the tensors and return; a thread writes and publishes the checkpoint.

        Call `finish_background` before the next save. If host memory is too small for copies, write before returning.
        """
        assert self._thread is None, "one save at a time"
        ranks = Ranks.current()
        request = self._request(ranks, step, tensors, state, config_text)
        host = torch.device("cpu")
        if not all(ranks.on_all(lambda: request.tensors.host_bytes() < devices.free_memory(host) // 2)):
            if ranks.rank == 0:
                _log.warning("not enough host memory for a save in the background: training waits for this save")
            try:
                self._outcome = [self._complete(ranks, request, None)]
            except Exception as error:
                self._outcome = [error]
            return
        ranks.on_all(request.tensors.copy_chunks)
        paused = time.perf_counter() - request.started
        if self._thread_ranks is None:
            self._thread_ranks = ranks.for_thread()
        thread_ranks, device = self._thread_ranks, _device_of(tensors)
        copied = devices.queued(device)

        def work() -> None:
            try:
                with devices.own_stream(device, after=copied):
                    self._outcome = [self._complete(thread_ranks, request, paused)]
            except Exception as error:  # `finish_background` raises it
                self._outcome = [error]

        # A daemon thread: a failing process can exit while the thread still waits for other ranks' parts of the save.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def in_background(self) -> bool:
        """Return whether a background save has started and `finish_background` was not called since."""
        return self._thread is not None or bool(self._outcome)

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is still writing a background save. Not collective."""
        return self._thread is not None and self._thread.is_alive()

    def finish_background(self, timeout_s: float | None = None) -> Path | None:
        """Wait for the background save; return its path, or raise its error.

        Return None if there is no background save, or if it takes longer than the timeout.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return None
            self._thread = None
        if not self._outcome:
            return None
        outcome = self._outcome.pop()
        if isinstance(outcome, Exception):
            raise outcome
        self.report, self.newest = outcome, outcome.path
        return outcome.path

    def _request(
        self, ranks: Ranks, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str
    ) -> _Request:
        started = time.perf_counter()
        tensors = self._stored(tensors)
        if self._frozen is not None:
            state = {**state, STATE_KEY: self._frozen.dump()}
        files: dict[str, bytes] = {}
        layout = self._layout
        if not all(ranks.on_all(lambda: layout is not None and layout.fits(tensors))):
            layout = plan_save(ranks, tensors)
        assert layout is not None
        self._layout = layout
        # Serialize the state now: training changes it while a thread writes.
        table = {TABLE: layout.table or b""}
        ranks.on_rank0(lambda: files.update({**table, STATE: state_to_json(state), CONFIG: config_text.encode()}))
        return _Request(step, layout.save_of(tensors), total_bytes(tensors), files, started)

    def _stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors that checkpoints of this run store."""
        if self._frozen is None:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name not in self._frozen.names}

    def _complete(self, ranks: Ranks, request: _Request, paused: float | None) -> SaveReport:
        """Write a checkpoint. If the disk is full, remove older checkpoints and try a second time."""
        ranks.on_rank0(lambda: self.folders.free_space(request.needed))
        for first_attempt in (True, False):
            try:
                path, size = self._write(ranks, request)
                break
            except CollectiveError as error:
                # If a quota is used up, writes fail although the disk reports free space.
                may_help = first_attempt and _is_full(error)
                if may_help and ranks.on_rank0(lambda: self.folders.free_space(request.needed, full=True)):
                    continue
                raise self._unwritten(ranks, error, request) or error from error
        seconds = time.perf_counter() - request.started
        report = SaveReport(path, size, seconds, seconds if paused is None else paused)
        if ranks.rank == 0:
            waited = "" if paused is None else f"; training waited {paused:.2f} s"
            speed = human_bytes(size / max(seconds, 1e-9))
            _log.info("saved %s: %s in %.2f s (%s/s%s)", path.name, human_bytes(size), seconds, speed, waited)
        return report

    def _unwritten(self, ranks: Ranks, failure: CollectiveError, request: _Request) -> TesseraError | None:
        """Return the error about a checkpoint that could not be written; None if no write failed."""
        causes = [(part.rank, part.error) for part in failure.failures if isinstance(part.error, OSError)]
        if not causes:
            return None
        reasons = "; ".join(f"rank {rank}: {cause.strerror or cause}" for rank, cause in causes)
        return TesseraError(
            f"the checkpoint of step {request.step} could not be written ({reasons})",
            where=str(self.folder),
            fix=ranks.on_rank0(lambda: space_report(self.folder, request.needed)),
            code="output.write-failed",
        )

    def _write(self, ranks: Ranks, request: _Request) -> tuple[Path, int]:
        staging: Path | None = None
        try:
            staging = ranks.on_rank0(lambda: self.folders.begin(request.step))
            written = ranks.on_all(lambda: request.tensors.write(staging, self._fault))
            records = [record for of_rank in written for record in of_rank]
            return ranks.on_rank0(lambda: self.folders.publish(staging, request.step, records, request.files))
        except BaseException:
            # Errors are raised only after all ranks have reported, so no rank is still writing to the folder.
            if ranks.rank == 0 and staging is not None:
                remove_folder(staging)
            raise

    def leave_out_frozen(self) -> None:
        """Leave frozen weights out of the checkpoints of this run, and hash the files that contain them.

        A new run calls this after its weights are loaded. A resumed run leaves out what its checkpoint left out.
        """
        if self._frozen_source is not None:
            self._frozen = FrozenWeights.of_source(Ranks.current(), self._frozen_source)

    def protect(self, step: int) -> None:
        """Keep the checkpoint of this step, which exists already, beyond the newest `keep`, unless the disk is full.

        The checkpoint that was protected before is removed if it is not among the newest `keep`.
        """
        self.folders.protected_step = step
        if Ranks.current().rank == 0:
            self.folders.protect(step)

    # ------------------------------------------------------------------------------------------ resuming

    def load_newest(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fill `tensors` from the newest undamaged checkpoint and return its state; None if there is no checkpoint.

        Unlike `resume` it removes no files: the run may be active.
        """
        stored = self._fill_newest(Ranks.current(), lambda stored: tensors)
        if stored is None:
            return None
        self.newest = stored.path
        return stored.state

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint at `path` and return its state. Raise if it is damaged."""
        ranks = Ranks.current()
        stored, problems = open_checkpoint(ranks, path, step_of(path))
        if stored is not None:
            problems = self._fill(ranks, stored, tensors)
        if stored is None or problems:
            raise TesseraError(
                "the checkpoint is damaged: " + "; ".join(problems), where=str(path), code="checkpoint.damaged"
            )
        return stored.state

    def resume(
        self, tensors: Mapping[str, Tensor], may_lack: Mapping[str, Tensor] | None = None, before: int | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Fill `tensors` from the newest undamaged checkpoint. Return its step and state; None if the run has none.

        `may_lack`: tensors that are filled only if the checkpoint has them. `before`: use only earlier checkpoints.
        """
        ranks, optional = Ranks.current(), may_lack or {}
        ranks.on_rank0(self.folders.clean)
        kinds = set[str]().union(*ranks.on_all(lambda: {name.split(".")[0] for name in (*tensors, *optional)}))

        def choose(stored: StoredCheckpoint) -> Mapping[str, Tensor]:
            if stored.state.get("weights_only"):
                raise TesseraError(
                    f"{stored.path.name} contains weights and no optimizer state: the run cannot be resumed from it",
                    where=str(stored.path),
                    fix=f"start a new run from these weights: model.path={stored.path} name=ANOTHER; to make runs "
                    "resumable, set checkpoint.weights_only=false",
                    code="checkpoint.weights-only",
                )
            unknown = {name.split(".")[0] for name in stored.names} - kinds
            if unknown and ranks.rank == 0:
                names = few_names(sorted(unknown))
                _log.warning("%s contains tensors of kinds that this run does not use: %s", stored.path.name, names)
            return {**tensors, **{name: tensor for name, tensor in optional.items() if name in stored.names}}

        stored = self._fill_newest(ranks, choose, before)
        if stored is None:
            return None
        frozen = FrozenWeights.of_state(stored.state, stored.path)
        if frozen is not None and self._frozen_source is not None:
            frozen = frozen.still_frozen(self._frozen_source.names)
        self._frozen, self.newest = frozen, stored.path
        if ranks.rank == 0:
            _log.info("resumed from %s", stored.path)
        return stored.manifest.step, stored.state

    def _fill_newest(
        self, ranks: Ranks, choose: Callable[[StoredCheckpoint], Mapping[str, Tensor]], before: int | None = None
    ) -> StoredCheckpoint | None:
        """Fill tensors from the newest undamaged checkpoint and return it; None if there is no checkpoint.

        Damage is found while a checkpoint is read. Then all tensors are filled again from the next older one. `choose`
        returns the tensors to fill from a checkpoint.
        """
        damaged: list[str] = []
        for path, _ in ranks.on_rank0(self.folders.newest_first):
            step = step_of(path)
            if before is not None and step is not None and step >= before:
                continue
            stored, problems = open_checkpoint(ranks, path, step)
            if stored is not None:
                problems = self._fill(ranks, stored, choose(stored))
                if not problems:
                    return stored
            damaged.append(f"{path.name}: {'; '.join(problems)}")
            if ranks.rank == 0:
                _log.warning("checkpoint %s is damaged and skipped: %s", path, "; ".join(problems))
        if damaged:
            raise TesseraError(
                "all checkpoints of this run are damaged:\n    " + "\n    ".join(damaged),
                where=str(self.folder),
                fix="restore a checkpoint from a backup, or move this folder away to start a new run",
                code="checkpoint.all-damaged",
            )
        return None

    def _fill(self, ranks: Ranks, stored: StoredCheckpoint, tensors: Mapping[str, Tensor]) -> list[str]:
        """Fill tensors from a checkpoint, and frozen tensors from their folder; return descriptions of damage."""
        frozen = FrozenWeights.of_state(stored.state, stored.path)
        elsewhere = {} if frozen is None else {n: tensor for n, tensor in tensors.items() if n in frozen.names}
        problems = stored.fill(ranks, {name: tensor for name, tensor in tensors.items() if name not in elsewhere})
        if frozen is not None and not problems and any(ranks.on_all(lambda: bool(elsewhere))):
            assert self._frozen_source is not None, "a caller that loads a model names the folder of frozen weights"
            folder = frozen.checked_folder(ranks, self._frozen_source.folder, stored.path)
            self._frozen_source.read(folder, {name.removeprefix(MODEL): t for name, t in elsewhere.items()})
        return problems


def load_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], frozen_source: FrozenSource | None = None
) -> tuple[Path, dict[str, Any]]:
    """Fill tensors from a checkpoint, or from the newest undamaged checkpoint of a run; return its path and state.

    All files are verified. Every rank calls this.
    """
    if (path / MANIFEST).is_file():
        return path, CheckpointManager(path.parent, keep=1, frozen_source=frozen_source).load(path, tensors)
    manager = CheckpointManager(path / "checkpoints", keep=1, frozen_source=frozen_source)
    state = manager.load_newest(tensors)
    if state is None or manager.newest is None:
        raise TesseraError(
            "this run has no checkpoint",
            where=str(path),
            fix="wait for the first checkpoint, or name a run that has one",
            code="checkpoint.none-yet",
        )
    return manager.newest, state


def _is_full(failure: CollectiveError) -> bool:
    errors = [part.error for part in failure.failures]
    return all(isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors)


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first tensor that is on an accelerator; the CPU if none is."""
    accelerators = (tensor.device for tensor in tensors.values() if tensor.device.type != "cpu")
    return next(accelerators, torch.device("cpu"))
