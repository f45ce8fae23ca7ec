"""Save and resume a run. A checkpoint exists wholly or not at all.

    RUN/checkpoints/
        step-00000100/    shard-00000.safetensors ..., tensors.json, state.json, config.yaml, manifest.json
        latest            a small text file that names the newest one, for people and scripts
        .staging-*        one being written; .trash-*: one being removed. Left over by a dead run, they are cleaned up

The folder belongs to one run at a time and, on several machines, lies on a file system they share.
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.collective import CollectiveError, Ranks
from tessera.checkpoint.files import (
    MANIFEST,
    Fault,
    FileRecord,
    Manifest,
    free_bytes,
    no_fault,
    problems_in,
    read_manifest,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.checkpoint.frozen import STATE_KEY, FrozenSource, FrozenWeights
from tessera.checkpoint.state import read_state, state_to_json
from tessera.checkpoint.storage import SaveLayout, TensorSave, load_tensors, plan_save, read_table, total_bytes
from tessera.errors import TesseraError, few_names
from tessera.runtime import device as devices
from tessera.runtime.progress import human_bytes

STATE = "state.json"
CONFIG = "config.yaml"
LATEST = "latest"
# A step can be saved again after training went back behind it: the new one is then named step-00000100.2.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_log = logging.getLogger("tessera")


@dataclass(frozen=True)
class SaveReport:
    path: Path
    bytes: int
    seconds: float  # until it was published
    paused_seconds: float  # that the caller waited

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _Request:
    """Describe one save: what is written, and when it began."""

    step: int
    tensors: TensorSave
    needed: int  # bytes of the whole checkpoint
    files: Mapping[str, bytes]  # on rank 0: small files by name
    started: float


class CheckpointManager:
    """Save and resume one run. Methods are collective: every rank calls them, and gets the same result or error."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        frozen_source: FrozenSource | None = None,
        fault: Fault = no_fault,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Make a manager. `frozen_source`: where frozen weights are that a checkpoint does not store."""
        assert keep >= 1, "at least one checkpoint must be kept"
        self.folder = folder
        self.report: SaveReport | None = None  # of the last save
        self.protected_step = -1  # its checkpoint is kept however old it is
        self.newest: Path | None = None  # what was saved or resumed from last: its bytes are known to be good
        self._frozen_source = frozen_source
        self._frozen: FrozenWeights | None = None  # what the checkpoints of this run do not store
        self._layout: SaveLayout | None = None  # of the saves of this run
        self._keep = keep
        self._fault = fault
        self._free = free
        self._thread: threading.Thread | None = None
        self._outcome: list[SaveReport | Exception] = []  # of the thread
        self._thread_ranks: Ranks | None = None

    # ------------------------------------------------------------------------------------------ saving

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Decide which rank writes what, before the first save: training would wait for it there."""
        self._layout = plan_save(Ranks.current(), self._stored(tensors))

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str) -> Path:
        """Write and publish a checkpoint, then remove what is beyond `keep`. `state` and `config_text`: of rank 0.

        Where the disk space is not enough, older checkpoints are removed before the new one is written; the newest good
        one never.
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
        """Copy the tensors and return; a thread writes and publishes them.

        There is one save at a time: `finish_background` ends it. Where there is no memory for the copies, the
        checkpoint is written at once.
        """
        assert self._thread is None, "one save at a time"
        ranks = Ranks.current()
        request = self._request(ranks, step, tensors, state, config_text)
        host = torch.device("cpu")
        if not all(ranks.on_all(lambda: request.tensors.host_bytes() < devices.free_memory(host) // 2)):
            if ranks.rank == 0:
                _log.warning("no host memory for a save in the background: training waits for this one")
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

        # A daemon: a process that ends by an error does not wait for other ranks here.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def in_background(self) -> bool:
        """Return whether a save was begun that `finish_background` has not ended."""
        return self._thread is not None or bool(self._outcome)

    @property
    def is_writing(self) -> bool:
        """Return whether this rank still writes in the background. Not collective."""
        return self._thread is not None and self._thread.is_alive()

    def finish_background(self, timeout_s: float | None = None) -> Path | None:
        """Wait for the save in the background; return its path, or raise its error.

        Return None if there is none, or if it takes longer than the timeout.
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
        self,
        ranks: Ranks,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        config_text: str,
    ) -> _Request:
        started = time.perf_counter()
        tensors = self._stored(tensors)
        if self._frozen is not None:
            state = {**state, STATE_KEY: self._frozen.dump()}
        files: dict[str, bytes] = {}
        # Written down now: what is trained on meanwhile changes the state.
        ranks.on_rank0(lambda: files.update({STATE: state_to_json(state), CONFIG: config_text.encode()}))
        layout = self._layout
        if not all(ranks.on_all(lambda: layout is not None and layout.fits(tensors))):
            layout = plan_save(ranks, tensors)
        assert layout is not None
        self._layout = layout
        return _Request(step, layout.save_of(tensors), total_bytes(tensors), files, started)

    def _stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint of this run holds."""
        if self._frozen is None:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name not in self._frozen.names}

    def _complete(self, ranks: Ranks, request: _Request, paused: float | None) -> SaveReport:
        """Write a checkpoint, if need be a second time after older ones were removed."""
        ranks.on_rank0(lambda: self._free_space(request.needed))
        for first_attempt in (True, False):
            try:
                path, size = self._write(ranks, request)
                break
            except CollectiveError as error:
                # A quota can be full where the disk is not: then it shows only now.
                may_help = first_attempt and _is_full(error)
                if may_help and ranks.on_rank0(lambda: self._free_space(request.needed, full=True)):
                    continue
                advice = "earlier ones are untouched; make room, raise the limit, or lower checkpoint.keep"
                what = f"the checkpoint of step {request.step}"
                raise error.about_writing(ranks, what, self.folder, request.needed, advice) or error from error
        seconds = time.perf_counter() - request.started
        report = SaveReport(path, size, seconds, seconds if paused is None else paused)
        if ranks.rank == 0:
            waited = "" if paused is None else f"; training waited {paused:.2f} s"
            speed = human_bytes(report.bytes_per_second)
            _log.info("saved %s: %s in %.2f s (%s/s%s)", path.name, human_bytes(size), seconds, speed, waited)
        return report

    def _write(self, ranks: Ranks, request: _Request) -> tuple[Path, int]:
        staging: Path | None = None
        try:
            staging = ranks.on_rank0(lambda: self._begin(request.step))
            written = ranks.on_all(lambda: request.tensors.write(staging, self._fault))
            records = [record for of_rank in written for record in of_rank]
            return ranks.on_rank0(lambda: self._publish(staging, request, records))
        except BaseException:
            # By now no rank writes any more: failures are gathered from all of them before they are raised.
            if ranks.rank == 0 and staging is not None:
                remove_folder(staging)
            raise

    def leave_out_frozen(self) -> None:
        """Hash the files that frozen weights were filled from: checkpoints of this run will not store these weights.

        A run that begins calls this when its weights are filled; a resumed run goes on as its checkpoint says.
        """
        if self._frozen_source is not None:
            self._frozen = FrozenWeights.of_source(Ranks.current(), self._frozen_source)

    def protect(self, step: int) -> None:
        """Keep the checkpoint of a step, which is written, however old it is; remove the one that was kept so before if
        it is not among the newest."""
        self.protected_step = step
        stored = self._candidates() if Ranks.current().rank == 0 else []
        newest = next((path for path, serial in stored if serial is not None), None)
        if newest is not None:
            self._prune(newest, [entry for entry in stored if entry[0] != newest])

    # ------------------------------------------------------------------------------------------ resuming

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose every byte is as written. A warning names damaged ones."""
        found = self._newest_good(Ranks.current())
        return None if found is None else found[0]

    def newest_config(self) -> Path | None:
        """Return the recipe of the newest checkpoint that has a good one. Not collective; no tensor is read."""
        for path, _ in self._candidates():
            try:
                records = [record for record in read_manifest(path).files if record.name == CONFIG]
            except TesseraError:
                continue
            if records and not problems_in(path, records):
                return path / CONFIG
        return None

    def load_newest(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fill `tensors` from the newest good checkpoint and return its state; None when there is none.

        Unlike `resume` it removes nothing: the run may belong to someone else and be active.
        """
        ranks = Ranks.current()
        found = self._newest_good(ranks)
        return None if found is None else self._load(ranks, found[0], tensors)

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place and return the state, after checking the files."""
        ranks = Ranks.current()
        problems = _verify(ranks, path)
        if problems:
            raise TesseraError("the checkpoint is damaged: " + "; ".join(problems), where=str(path))
        return self._load(ranks, path, tensors)

    def resume(
        self, tensors: Mapping[str, Tensor], may_lack: Mapping[str, Tensor] | None = None, before: int | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Fill `tensors` from the newest good checkpoint; return its step and state, or None when there is none.

        `may_lack`: further tensors, unchanged where the checkpoint does not have them. `before`: only checkpoints of
        an earlier step.
        """
        ranks = Ranks.current()
        ranks.on_rank0(self._clean)
        found = self._newest_good(ranks, before)
        if found is None:
            return None
        path, step = found
        if ranks.on_rank0(lambda: read_state(path / STATE)).get("weights_only"):
            raise TesseraError(
                f"{path.name} holds weights alone, without the optimizer: the run cannot be resumed from it",
                where=str(path),
                fix=f"begin another run with these weights: model.path={path} name=ANOTHER; a run that is "
                "to go on needs checkpoint.weights_only=false",
            )
        stored = {*read_table(path).state_dict_metadata}
        asked = ranks.on_all(lambda: {name.split(".")[0] for name in (*tensors, *(may_lack or ()))})
        unknown = {name.split(".")[0] for name in stored} - set[str]().union(*asked)
        if unknown and ranks.rank == 0:
            _log.warning("%s has tensors %s, which this run does not use", path.name, few_names(sorted(unknown)))
        optional = {name: tensor for name, tensor in (may_lack or {}).items() if name in stored}
        state = self._load(ranks, path, {**tensors, **optional})
        frozen = FrozenWeights.of_state(state, path)
        if frozen is not None and self._frozen_source is not None:
            frozen = frozen.still_frozen(self._frozen_source.names)
        self._frozen, self.newest = frozen, path
        if ranks.rank == 0:
            _log.info("resumed from %s", path)
        return step, state

    # ------------------------------------------------------------------------------------------ reading

    def _newest_good(self, ranks: Ranks, before: int | None = None) -> tuple[Path, int] | None:
        candidates = ranks.on_rank0(self._candidates)
        damaged: list[str] = []
        for path, _ in candidates:
            if before is not None and _step_of(path) >= before:
                continue
            problems = _verify(ranks, path)
            if not problems:
                return path, ranks.on_rank0(lambda path=path: read_manifest(path).step)  # type: ignore[misc]
            damaged.append(f"{path.name}: {'; '.join(problems)}")
            if ranks.rank == 0:
                _log.warning("checkpoint %s is damaged and passed over: %s", path, "; ".join(problems))
        if damaged:
            raise TesseraError(
                "there are checkpoints, but every one of them is damaged:\n    " + "\n    ".join(damaged),
                where=str(self.folder),
                fix="restore one from a copy, or move this folder away to start anew",
            )
        return None

    def _candidates(self) -> list[tuple[Path, int | None]]:
        """Return the checkpoints with serial numbers, newest first; before them, to be reported, unreadable ones."""
        if not self.folder.is_dir():
            return []
        found: list[tuple[Path, int | None]] = []
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) and path.is_dir():
                try:
                    found.append((path, read_manifest(path).serial))
                except TesseraError:
                    found.append((path, None))
        return sorted(found, key=lambda entry: (entry[1] is None, entry[1] or 0, entry[0].name), reverse=True)

    def _load(self, ranks: Ranks, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        state = ranks.on_rank0(lambda: read_state(path / STATE))
        frozen = FrozenWeights.of_state(state, path)
        not_stored = {} if frozen is None else {n: t for n, t in tensors.items() if n in frozen.names}
        if frozen is not None and any(ranks.on_all(lambda: bool(not_stored))):
            assert self._frozen_source is not None, "whoever loads a model says where frozen weights are"
            frozen.fill(ranks, self._frozen_source, not_stored, path)
        load_tensors(path, {name: tensor for name, tensor in tensors.items() if name not in not_stored})
        return state

    # ------------------------------------------------------------------------------------------ writing (rank 0)

    def _begin(self, step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        staging = self.folder / f".staging-step-{step:08d}~{uuid.uuid4().hex[:8]}"
        self._fault("mkdir staging")
        staging.mkdir()
        return staging

    def _publish(self, staging: Path, request: _Request, shards: list[FileRecord]) -> tuple[Path, int]:
        existing, step = self._candidates(), request.step
        records = [*shards, request.tensors.write_table(staging, self._fault)]
        records += [write_file(staging / name, content, self._fault) for name, content in request.files.items()]
        serial = 1 + max((serial or 0 for _, serial in existing), default=0)
        manifest = Manifest(step, serial, tuple(records))
        write_file(staging / MANIFEST, manifest.to_json(), self._fault)
        sync_folder(staging, self._fault)
        target = self._free_name(step)
        # The pointer is written before anything is published: a full disk shows here at the latest.
        pointer = self.folder / f".staging-latest~{uuid.uuid4().hex[:8]}"
        try:
            write_file(pointer, f"{target.name}\n".encode(), self._fault)
            rename(staging, target, self._fault)
            rename(pointer, self.folder / LATEST, self._fault)
        except BaseException:
            pointer.unlink(missing_ok=True)
            raise
        self._prune(target, existing)
        return target, sum(record.size for record in records)

    def _free_name(self, step: int) -> Path:
        numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
        paths = (self.folder / f"step-{step:08d}{number}" for number in numbers)
        return next(path for path in paths if not path.exists())

    def _prune(self, newest: Path, older: list[tuple[Path, int | None]]) -> None:
        """Remove all but the newest and the protected one. One of the same step as `newest`, or without a readable
        manifest, is not kept."""
        step = newest.name.split(".")[0]
        worth = [path for path, serial in older if serial is not None and path.name.split(".")[0] != step]
        kept = {*worth[: self._keep - 1], *(path for path in worth if _step_of(path) == self.protected_step)}
        for path, _ in older:
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> bool:
        trash = self.folder / f".trash-{path.name}~{uuid.uuid4().hex[:8]}"
        try:
            rename(path, trash, self._fault)
        except OSError as error:
            _log.warning("could not remove the old checkpoint %s: %s", path, error)
            return False
        self._fault(f"remove {path.name}")
        remove_folder(trash)
        return True

    def _free_space(self, needed: int, full: bool = False) -> bool:
        """Remove old checkpoints, the oldest first, if that frees enough space for a new one.

        Return whether any was removed. The newest whose bytes are good is kept in any case. `full`: a write has failed,
        however much space the disk reports.
        """
        if not self.folder.is_dir():
            return False
        self._clean()
        free = self._free(self.folder)
        if not full and free >= needed:
            return False
        spare: list[tuple[Path, int]] = []
        found_good = False
        for path, _ in self._candidates():
            try:
                files = read_manifest(path).files
            except TesseraError:
                continue
            if found_good:
                spare.append((path, sum(record.size for record in files)))
            else:
                found_good = not problems_in(path, files)
        if not full and free + sum(size for _, size in spare) < needed:
            return False  # it would not help
        freed = 0
        spare.reverse()
        for path, size in sorted(spare, key=lambda entry: _step_of(entry[0]) == self.protected_step):
            if freed >= needed if full else self._free(self.folder) >= needed:
                break
            _log.warning("removing %s before its time: there is no space for the next checkpoint", path.name)
            freed += size if self._remove(path) else 0
        return freed > 0

    def _clean(self) -> None:
        """Remove what a dead run left half-written or half-removed."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith((".staging-", ".trash-")):
                if path.is_dir() and not path.is_symlink():
                    remove_folder(path)
                else:
                    path.unlink(missing_ok=True)


def _is_full(failure: CollectiveError) -> bool:
    errors = [one.error for one in failure.failures]
    return all(isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors)


def _step_of(path: Path) -> int:
    named = _NAME.fullmatch(path.name)
    assert named is not None
    return int(named.group(1))


def _verify(ranks: Ranks, path: Path) -> list[str]:
    """Return what is wrong with a checkpoint. Its files are divided among the ranks, so that each is read once."""

    def check() -> list[str]:
        try:
            manifest = read_manifest(path)
        except TesseraError as error:
            return [error.what] if ranks.rank == 0 else []
        named = _NAME.fullmatch(path.name)
        problems = problems_in(path, manifest.files[ranks.rank :: ranks.world])
        if named and int(named.group(1)) != manifest.step and ranks.rank == 0:
            problems.append(f"its manifest is that of step {manifest.step}")
        return problems

    return [problem for found in ranks.on_all(check) for problem in found]


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the accelerator that holds some of the tensors, otherwise the host."""
    found = (tensor.device for tensor in tensors.values() if tensor.device.type != "cpu")
    return next(found, torch.device("cpu"))
