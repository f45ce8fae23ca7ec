"""List, publish and remove the checkpoint folders of a run. Only the process of rank 0 writes to them.

    RUN/checkpoints/
        step-00000100/    shard-00000.safetensors ..., tensors.json, state.json, config.yaml, manifest.json
        latest            a text file with the name of the newest checkpoint, for people and scripts
        .staging-*        a checkpoint that is being written. After a kill, the next start removes it
        .trash-*          a checkpoint that is being removed. After a kill, the next start removes it

The folder belongs to one run. If the run uses several machines, it is on a shared file system.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from tessera.checkpoint.files import (
    MANIFEST,
    Fault,
    FileRecord,
    Manifest,
    NewerFormatError,
    problems_in,
    read_manifest,
    remove_folder,
    rename,
    sync_folder,
    write_file,
)
from tessera.errors import TesseraError

LATEST = "latest"
# Folder name of a checkpoint. If training went back and saves step 100 again, the folder is step-00000100.2.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_log = logging.getLogger("tessera")


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's folder name; None for other names."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match.group(1))


def _manifest_of(path: Path) -> Manifest | NewerFormatError | None:
    """Return the manifest of a checkpoint, the error if a newer Tessera wrote it, or None if it is unreadable."""
    try:
        return read_manifest(path)
    except NewerFormatError as error:
        return error
    except TesseraError:
        return None


Stored = tuple[Path, Manifest | NewerFormatError | None]  # a checkpoint with its manifest, see `_manifest_of`


class StepFolders:
    """Manage the checkpoint folders of a run, on rank 0. Methods are not collective."""

    def __init__(self, folder: Path, keep: int, fault: Fault, free: Callable[[Path], int]) -> None:
        """Manage `folder`. `keep`: the number of checkpoints to keep. `free`: returns the free bytes of a disk."""
        assert keep >= 1, "at least one checkpoint must be kept"
        self.folder = folder
        self.protected_step = -1  # the checkpoint of this step is removed only if the disk is full
        self._keep, self._fault, self._free = keep, fault, free

    def newest_first(self) -> list[Stored]:
        """Return all checkpoints with their manifests, newest first. Those without a readable manifest come first."""
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if step_of(path) is not None and path.is_dir()]
        stored = [(path, _manifest_of(path)) for path in paths]
        serials = {path: manifest.serial for path, manifest in stored if isinstance(manifest, Manifest)}
        return sorted(stored, key=lambda entry: (serials.get(entry[0], math.inf), entry[0].name), reverse=True)

    def newest_with(self, name: str) -> Path | None:
        """Return the newest checkpoint whose file `name` is undamaged; None if there is none.

        Other files are not read. Raise if a newer Tessera wrote one of the checkpoints.
        """
        for path, manifest in self.newest_first():
            if isinstance(manifest, NewerFormatError):
                raise manifest
            records = [record for record in manifest.files if record.name == name] if manifest is not None else []
            if records and not problems_in(path, records):
                return path
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
        """Write the small files and the manifest, publish the checkpoint by a rename, and remove older checkpoints.

        Return its path and its size in bytes. `shards`: records of the tensor files, which exist already.
        """
        existing = self.newest_first()
        records = [*shards, *(write_file(staging / name, content, self._fault) for name, content in files.items())]
        serial = 1 + max((m.serial for _, m in existing if isinstance(m, Manifest)), default=0)
        write_file(staging / MANIFEST, Manifest(step, serial, tuple(records)).to_json(), self._fault)
        sync_folder(staging, self._fault)
        target = self._free_name(step)
        # Write the file `latest` under a temporary name first: if the disk is full, nothing is published.
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
        """Keep the checkpoint of this step beyond the newest `keep`, unless the disk is full.

        The checkpoint that was protected before is removed if it is not among the newest `keep`.
        """
        self.protected_step = step
        stored = self.newest_first()
        newest = next((path for path, manifest in stored if isinstance(manifest, Manifest)), None)
        if newest is not None:
            self._prune(newest, [entry for entry in stored if entry[0] != newest])

    def _prune(self, newest: Path, older: list[Stored]) -> None:
        """Remove all checkpoints but the newest `keep` and the protected one.

        Older checkpoints of the step of `newest`, and checkpoints without a readable manifest, are also removed.
        Checkpoints of a newer Tessera stay.
        """
        step = newest.name.split(".")[0]
        worth = [p for p, manifest in older if isinstance(manifest, Manifest) and p.name.split(".")[0] != step]
        stay = {*worth[: self._keep - 1], *(path for path in worth if step_of(path) == self.protected_step)}
        for path, manifest in older:
            if path not in stay and not isinstance(manifest, NewerFormatError):
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
        """Remove old checkpoints, the oldest first and the protected one last, if that frees enough for a new one.

        Return whether a checkpoint was removed. The newest undamaged checkpoint is never removed. `full`: a write has
        failed, so remove checkpoints even if the disk reports free space, or if they free too little.
        """
        if not self.folder.is_dir():
            return False
        self.clean()
        free = self._free(self.folder)
        if not full and free >= needed:
            return False
        spare: list[tuple[Path, int]] = []
        has_good = False
        for path, manifest in self.newest_first():
            if not isinstance(manifest, Manifest):
                continue
            if has_good:
                spare.append((path, sum(record.size for record in manifest.files)))
            else:
                has_good = not problems_in(path, manifest.files)
        if not full and free + sum(size for _, size in spare) < needed:
            return False  # even without all spare checkpoints there would not be enough space
        freed = 0
        spare.reverse()
        for path, size in sorted(spare, key=lambda entry: step_of(entry[0]) == self.protected_step):
            if freed >= needed if full else self._free(self.folder) >= needed:
                break
            _log.warning("removing %s early: the disk has no space for the next checkpoint", path.name)
            freed += size if self._remove(path) else 0
        return freed > 0

    def clean(self) -> None:
        """Remove staging and trash folders that a killed process left."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith((".staging-", ".trash-")):
                remove_folder(path)
