"""The folders of a run's checkpoints: list, publish and remove them. One process, that of rank 0, writes here.

    RUN/checkpoints/
        step-00000100/    shard-00000.safetensors ..., tensors.json, state.json, config.yaml, manifest.json
        latest            a small text file that names the newest one, for people and scripts
        .staging-*        one being written; .trash-*: one being removed. After a kill, the next start removes them

The folder belongs to one run at a time. On several machines it is on a file system that they share.
"""

from __future__ import annotations

import itertools
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from tessera.checkpoint.files import (
    MANIFEST,
    Fault,
    FileRecord,
    Manifest,
    problems_in,
    read_manifest,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.checkpoint.stored import CONFIG
from tessera.errors import TesseraError

LATEST = "latest"
# A step can be saved again after training went back behind it: the new one is then named step-00000100.2.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_log = logging.getLogger("tessera")


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None if the name is another one."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match.group(1))


class StepFolders:
    """Manage the folders of a run's checkpoints. Nothing here is collective."""

    def __init__(self, folder: Path, keep: int, fault: Fault, free: Callable[[Path], int]) -> None:
        """Make the manager of `folder`. `keep`: how many checkpoints stay; `free`: returns free bytes of a disk."""
        assert keep >= 1, "at least one checkpoint must be kept"
        self.folder = folder
        self.protected_step = -1  # its checkpoint stays however old it is
        self._keep, self._fault, self._free = keep, fault, free

    def newest_first(self) -> list[tuple[Path, int | None]]:
        """Return the checkpoints with their serial numbers; those without a readable manifest come first."""
        if not self.folder.is_dir():
            return []
        checkpoints: list[tuple[Path, int | None]] = []
        for path in self.folder.iterdir():
            if step_of(path) is not None and path.is_dir():
                try:
                    checkpoints.append((path, read_manifest(path).serial))
                except TesseraError:
                    checkpoints.append((path, None))
        return sorted(checkpoints, key=lambda entry: (entry[1] is None, entry[1] or 0, entry[0].name), reverse=True)

    def newest_config(self) -> Path | None:
        """Return the recipe of the newest checkpoint that has a good one. No tensor is read."""
        for path, _ in self.newest_first():
            try:
                records = [record for record in read_manifest(path).files if record.name == CONFIG]
            except TesseraError:
                continue
            if records and not problems_in(path, records):
                return path / CONFIG
        return None

    # ------------------------------------------------------------------------------------------ writing

    def begin(self, step: int) -> Path:
        """Return a new staging folder for the checkpoint of a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        staging = self.folder / f".staging-step-{step:08d}~{uuid.uuid4().hex[:8]}"
        self._fault("mkdir staging")
        staging.mkdir()
        return staging

    def publish(
        self, staging: Path, step: int, shards: list[FileRecord], files: Mapping[str, bytes]
    ) -> tuple[Path, int]:
        """Write the small files and the manifest, rename the folder, and remove older checkpoints.

        Return its path and its size. `shards`: records of files that are written already.
        """
        existing = self.newest_first()
        records = [*shards, *(write_file(staging / name, content, self._fault) for name, content in files.items())]
        serial = 1 + max((serial or 0 for _, serial in existing), default=0)
        write_file(staging / MANIFEST, Manifest(step, serial, tuple(records)).to_json(), self._fault)
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

    # ------------------------------------------------------------------------------------------ removing

    def protect(self, step: int) -> None:
        """Keep the checkpoint of a step however old it is, and no longer the one that was protected before."""
        self.protected_step = step
        stored = self.newest_first()
        newest = next((path for path, serial in stored if serial is not None), None)
        if newest is not None:
            self._prune(newest, [entry for entry in stored if entry[0] != newest])

    def _prune(self, newest: Path, older: list[tuple[Path, int | None]]) -> None:
        """Remove all but the newest `keep` and the protected one.

        Older checkpoints of the same step as `newest`, and those without a readable manifest, are removed, too.
        """
        step = newest.name.split(".")[0]
        worth = [path for path, serial in older if serial is not None and path.name.split(".")[0] != step]
        stay = {*worth[: self._keep - 1], *(path for path in worth if step_of(path) == self.protected_step)}
        for path, _ in older:
            if path not in stay:
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

    def free_space(self, needed: int, full: bool = False) -> bool:
        """Remove old checkpoints, the oldest first, if that frees enough space for a new one.

        Return whether any was removed. The newest one with good bytes stays in any case. `full`: a write has failed,
        whatever free space the disk reports.
        """
        if not self.folder.is_dir():
            return False
        self.clean()
        free = self._free(self.folder)
        if not full and free >= needed:
            return False
        spare: list[tuple[Path, int]] = []
        has_good = False
        for path, _ in self.newest_first():
            try:
                files = read_manifest(path).files
            except TesseraError:
                continue
            if has_good:
                spare.append((path, sum(record.size for record in files)))
            else:
                has_good = not problems_in(path, files)
        if not full and free + sum(size for _, size in spare) < needed:
            return False  # it would not help
        freed = 0
        spare.reverse()
        for path, size in sorted(spare, key=lambda entry: step_of(entry[0]) == self.protected_step):
            if freed >= needed if full else self._free(self.folder) >= needed:
                break
            _log.warning("removing %s before its time: there is no space for the next checkpoint", path.name)
            freed += size if self._remove(path) else 0
        return freed > 0

    def clean(self) -> None:
        """Remove folders that a killed process left half-written or half-removed."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith((".staging-", ".trash-")):
                remove_folder(path)
