"""Saving and resuming a run. A checkpoint exists wholly or not at all.

    RUN/checkpoints/
        step-00000100/    shard-00000.safetensors ..., tensors.json, state.json, config.yaml, manifest.json
        latest            a small text file that names the newest one, for people and scripts
        .staging-*        one being written; .trash-*: one being removed. Left over by a dead run, they are cleaned up

The folder belongs to one run at a time and, on several machines, lies on a file system they share.
"""

from __future__ import annotations

import errno
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.files import (
    Fault,
    free_bytes,
    human_bytes,
    no_fault,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.checkpoint.manifest import MANIFEST, Manifest, problems_in, read_manifest
from tessera.checkpoint.ranks import RankFailure, Ranks
from tessera.checkpoint.state import read_state, state_to_json
from tessera.checkpoint.storage import ShardWriter, load_tensors, read_table, save_tensors, total_bytes
from tessera.core.errors import TesseraError

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
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class CheckpointManager:
    """All methods are collective: every rank calls them, and every rank gets the same answer or the same error."""

    def __init__(
        self, folder: Path, keep: int, *, fault: Fault = no_fault, free: Callable[[Path], int] = free_bytes
    ) -> None:
        assert keep >= 1, "at least one checkpoint must be kept"
        self.folder = folder
        self.report: SaveReport | None = None  # of the last save
        self.newest: Path | None = None  # what was saved or resumed from last: its bytes are known to be good
        self._keep = keep
        self._fault = fault
        self._free = free

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str) -> Path:
        """Writes, publishes, then removes what is beyond `keep`. `state` and `config_text` are taken from rank 0.

        Where the room is not enough, older checkpoints go before the new one is written; the newest good one never.
        """
        ranks = Ranks.current()
        started = time.perf_counter()
        needed = total_bytes(tensors)
        ranks.once(lambda: self._make_room(needed))
        try:
            path, size = self._write(ranks, step, tensors, state, config_text)
        except RankFailure as error:
            # A quota can be full where the disk is not: then it shows only now.
            if not (_is_full(error) and ranks.once(lambda: self._make_room(needed, full=True))):
                raise self._explain(ranks, error, step, needed) or error from error
            try:
                path, size = self._write(ranks, step, tensors, state, config_text)
            except RankFailure as again:
                raise self._explain(ranks, again, step, needed) or again from again
        self.newest = path
        self.report = SaveReport(path, size, time.perf_counter() - started)
        if ranks.rank == 0:
            speed = human_bytes(self.report.bytes_per_second)
            _log.info("saved %s: %s in %.2f s (%s/s)", path.name, human_bytes(size), self.report.seconds, speed)
        return path

    def _write(
        self, ranks: Ranks, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config_text: str
    ) -> tuple[Path, int]:
        staging: Path | None = None
        try:
            staging = ranks.once(lambda: self._begin(step))
            writer = ShardWriter(staging, self._fault)
            save_tensors(tensors, writer)
            return ranks.once(lambda: self._publish(staging, step, writer, state, config_text))
        except BaseException:
            # By now no rank writes any more: failures are gathered from all of them before they are raised.
            if ranks.rank == 0 and staging is not None:
                remove_folder(staging)
            raise

    def latest(self) -> Path | None:
        """The newest checkpoint whose every byte is as written. Damaged ones are named in a warning and passed over."""
        found = self._newest_good(Ranks.current())
        return None if found is None else found[0]

    def newest_config(self) -> Path | None:
        """The recipe inside of the newest checkpoint that has a good one. Not collective, and cheap: no tensor is
        read."""
        for path, _ in self._candidates():
            try:
                records = [record for record in read_manifest(path).files if record.name == CONFIG]
            except TesseraError:
                continue
            if records and not problems_in(path, records):
                return path / CONFIG
        return None

    def load_newest(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fills `tensors` from the newest good checkpoint and returns its state; None when there is none. Removes
        nothing, unlike `resume`: the run may be another's, and at work."""
        ranks = Ranks.current()
        found = self._newest_good(ranks)
        return None if found is None else self._load(ranks, found[0], tensors)

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fills `tensors` in place and returns the state, after checking the files."""
        ranks = Ranks.current()
        problems = _verify(ranks, path)
        if problems:
            raise TesseraError("the checkpoint is damaged: " + "; ".join(problems), where=str(path))
        return self._load(ranks, path, tensors)

    def resume(
        self, tensors: Mapping[str, Tensor], may_lack: Mapping[str, Tensor] | None = None, before: int | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Fills `tensors` from the newest good checkpoint; None when there is none at all. `may_lack`: further ones,
        left as they are where the checkpoint has none of that name. `before`: of an earlier step than that."""
        ranks = Ranks.current()
        ranks.once(self._clean)
        found = self._newest_good(ranks, before)
        if found is None:
            return None
        path, step = found
        if may_lack:
            stored = read_table(path).state_dict_metadata
            tensors = {**tensors, **{name: tensor for name, tensor in may_lack.items() if name in stored}}
        state = self._load(ranks, path, tensors)
        self.newest = path
        if ranks.rank == 0:
            _log.info("resumed from %s", path)
        return step, state

    # ------------------------------------------------------------------------------------------ reading

    def _newest_good(self, ranks: Ranks, before: int | None = None) -> tuple[Path, int] | None:
        candidates = ranks.once(self._candidates)
        told: list[str] = []
        for path, _ in candidates:
            if before is not None and _step_of(path) >= before:
                continue
            problems = _verify(ranks, path)
            if not problems:
                return path, ranks.once(lambda path=path: read_manifest(path).step)  # type: ignore[misc]
            told.append(f"{path.name}: {'; '.join(problems)}")
            if ranks.rank == 0:
                _log.warning("checkpoint %s is damaged and passed over: %s", path, "; ".join(problems))
        if told:
            raise TesseraError(
                "there are checkpoints, but every one of them is damaged:\n    " + "\n    ".join(told),
                where=str(self.folder),
                fix="restore one from a copy, or move this folder away to start anew",
            )
        return None

    def _candidates(self) -> list[tuple[Path, int | None]]:
        """Newest first, with serial numbers. An unreadable manifest comes first, so as not to be passed in silence."""
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
        load_tensors(path, tensors)
        return ranks.once(lambda: read_state(path / STATE))

    # ------------------------------------------------------------------------------------------ writing (rank 0)

    def _begin(self, step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        staging = self.folder / f".staging-step-{step:08d}~{uuid.uuid4().hex[:8]}"
        self._fault("mkdir staging")
        staging.mkdir()
        return staging

    def _publish(
        self, staging: Path | None, step: int, writer: ShardWriter, state: Mapping[str, Any], config_text: str
    ) -> tuple[Path, int]:
        assert staging is not None
        existing = self._candidates()
        records = [
            *writer.records,
            write_file(staging / STATE, state_to_json(state), self._fault),
            write_file(staging / CONFIG, config_text.encode(), self._fault),
        ]
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
        target = self.folder / f"step-{step:08d}"
        attempt = 1
        while target.exists():
            attempt += 1
            target = self.folder / f"step-{step:08d}.{attempt}"
        return target

    def _prune(self, newest: Path, older: list[tuple[Path, int | None]]) -> None:
        """Keeps the newest; one of the same step as `newest`, or without a readable manifest, is not worth a place."""
        step = newest.name.split(".")[0]
        worth = [path for path, serial in older if serial is not None and path.name.split(".")[0] != step]
        kept = set(worth[: self._keep - 1])
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

    def _make_room(self, needed: int, full: bool = False) -> bool:
        """Remove old checkpoints, the oldest first, if that makes room for a new one; return whether any went. The
        newest whose bytes are good stays in any case. `full`: a write has failed, whatever the disk says is free."""
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
        for path, size in reversed(spare):
            if freed >= needed if full else self._free(self.folder) >= needed:
                break
            _log.warning("removing %s before its time: there is no room for the next checkpoint", path.name)
            freed += size if self._remove(path) else 0
        return freed > 0

    def _clean(self) -> None:
        """Removes what a dead run left half-written or half-removed."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith((".staging-", ".trash-")):
                if path.is_dir() and not path.is_symlink():
                    remove_folder(path)
                else:
                    path.unlink(missing_ok=True)

    def _explain(self, ranks: Ranks, failure: RankFailure, step: int, needed: int) -> TesseraError | None:
        """The user's view of a failed write; None when it was no write that failed."""
        causes = [(f.rank, f.error) for f in failure.failures if isinstance(f.error, OSError)]
        if not causes:
            return None
        told = "; ".join(f"rank {rank}: {cause.strerror or cause}" for rank, cause in causes)
        free = ranks.once(lambda: free_bytes(self.folder))
        return TesseraError(
            f"the checkpoint of step {step} could not be written ({told}). Earlier ones are untouched",
            where=str(self.folder),
            fix=f"it needs {human_bytes(needed)} ({needed} bytes); {human_bytes(free)} ({free} bytes) are free there: "
            "make room, raise the limit, or lower checkpoint.keep",
        )


def _is_full(failure: RankFailure) -> bool:
    errors = [told.error for told in failure.failures]
    return all(isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) for error in errors)


def _step_of(path: Path) -> int:
    named = _NAME.fullmatch(path.name)
    assert named is not None
    return int(named.group(1))


def _verify(ranks: Ranks, path: Path) -> list[str]:
    """What is wrong with a checkpoint; the files are shared out among the ranks, each is read once."""

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

    return [problem for found in ranks.each(check) for problem in found]
