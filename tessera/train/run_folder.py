"""The folder of a run, in the hands of its main rank: locked, with the run it replaces kept until the new one works.

A run proves itself by its first applied step, or by a checkpoint. Until then nothing that existed is lost:

- `config.yaml` of a run that is resumed stays as it is, and so does the run that `--overwrite` replaces. Its files
  wait in `RUN/.replaced`, and come back if the new run fails before it has proved itself, also after a kill -9.
- Only a folder that holds `run.json` or a checkpoint of ours is ever emptied, and never one that we stand in.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.checkpoint.files import remove_folder
from tessera.checkpoint.manifest import read_manifest
from tessera.checkpoint.run_files import ASIDE, CONFIG, REPLACED, REPLACING, RESTORING, RUN_FILE, find_file
from tessera.checkpoint.run_files import run_exists as run_exists  # the command line asks here
from tessera.core.errors import TesseraError
from tessera.core.files import read_json_mapping
from tessera.core.run_config import CheckpointSection, RunConfig
from tessera.core.run_paths import kept_text
from tessera.core.trust import named_code, write_run_id
from tessera.train.callbacks import Callback, StepResult
from tessera.train.lock import LOCK, OWNER, FolderLock

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

FORMAT = "tessera-run"
_TRASH = ".trash-"
# What the system answers when a folder cannot be written to, for whatever reason the user has to see to.
_UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
    | {errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EIO}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

log = logging.getLogger("tessera")


@contextmanager
def writable(folder: Path, *, starting: bool = False) -> Iterator[None]:
    """Tell a full disk and missing rights as what they are. Errors that tell of other folders pass, except while the
    run's own is made."""
    try:
        yield
    except OSError as error:
        inside = (
            error.filename is not None and folder.absolute() in Path(os.fsdecode(error.filename)).absolute().parents
        )
        if error.errno not in _UNWRITABLE or not (starting or inside or error.errno in _FULL):
            raise
        raise TesseraError(
            f"{folder} cannot be written to: {error.strerror}"
            + (f" ({error.filename})" if error.filename is not None else ""),
            where="out, name",
            fix="make room, see to the rights of the folder, or choose another with out=FOLDER",
        ) from error


class RunFolder:
    """Belongs to the main rank alone; other ranks only write into it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._lock = FolderLock(folder)
        self._open = False

    def open(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Take the folder for this run, or say why not. A run that is there is set aside if it is to be replaced."""
        with writable(self.path, starting=True):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._open = True
            self._recover()
            if resume:
                return
            check_fresh(self.path, overwrite)
            if run_exists(self.path):
                self._set_aside()

    def begin(self, config: RunConfig, *, resume: bool = False) -> None:
        """Write what a new run is known by. Of a run that is resumed, `publish` does so when it has proved itself."""
        with writable(self.path, starting=True):
            if named_code(config):
                write_run_id(self.path)
            if not resume:
                write_config(self.path, config)

    def publish(self, config: RunConfig) -> None:
        """The run works: this is its configuration from now on, and what it replaced can go."""
        write_config(self.path, config)
        old = self.path / REPLACED
        if old.exists():
            trash = self.path / f"{_TRASH}{secrets.token_hex(4)}"
            os.rename(old, trash)
            # Many large files take their time, and other ranks wait; what is left over goes when the folder is opened.
            threading.Thread(target=remove_folder, args=(trash,), name="tessera-remove-old-run", daemon=True).start()

    def close(self) -> None:
        """Give the folder up. If the run has not proved itself, what it was to replace is put back."""
        if not self._open:
            return
        self._open = False
        try:
            if (self.path / REPLACED).exists():
                self._recover()
                log.warning("the run that was to be replaced is back in %s", self.path)
        except OSError as error:
            log.warning("%s holds the run that was to be replaced: %s", self.path / REPLACED, error)
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------ setting aside

    def _entries(self) -> list[Path]:
        own = {LOCK, OWNER, *ASIDE}
        return [path for path in self.path.iterdir() if path.name not in own and not path.name.startswith(_TRASH)]

    def _set_aside(self) -> None:
        aside = self.path / REPLACING
        aside.mkdir()
        for path in self._entries():
            os.rename(path, aside / path.name)
        os.rename(aside, self.path / REPLACED)

    def _recover(self) -> None:
        """Finish what a run that died has left: put back what it was to replace, remove what nobody needs."""
        trash = self.path / f"{_TRASH}{secrets.token_hex(4)}"
        if (self.path / REPLACED).exists():
            trash.mkdir()
            for path in self._entries():
                os.rename(path, trash / path.name)
            os.rename(self.path / REPLACED, self.path / RESTORING)
        for aside in (self.path / RESTORING, self.path / REPLACING):
            if aside.exists():
                for path in list(aside.iterdir()):
                    os.rename(path, self.path / path.name)
                aside.rmdir()
        for left in self.path.glob(f"{_TRASH}*"):
            remove_folder(left)


def check_fresh(folder: Path, overwrite: bool) -> None:
    """Refuse to begin a run where there is one, or to replace what is not ours to replace."""
    if not run_exists(folder):
        return
    if not overwrite:
        raise TesseraError(
            f"{folder} already holds a run with checkpoints",
            where="out, name",
            fix=f"`tessera resume {folder}` goes on with it; name=NEW starts another; --overwrite replaces it",
        )
    here, target = Path.cwd().resolve(), folder.resolve()
    if target == here or target in here.parents:
        raise TesseraError(
            f"{folder} is the working folder, or holds it: it is not replaced",
            where="--overwrite",
            fix="start from another folder, or choose another name",
        )
    if not _is_ours(folder):
        raise TesseraError(
            f"{folder} holds other things than a run of Tessera: it is not replaced",
            where="--overwrite",
            fix=f"choose another name, or remove the folder yourself (a run has a file {RUN_FILE})",
        )


def _is_ours(folder: Path) -> bool:
    try:
        if read_json_mapping(find_file(folder, RUN_FILE)).get("format") == FORMAT:
            return True
    except TesseraError:
        pass
    for path in find_file(folder, "checkpoints").glob("step-*"):  # of a version that wrote no run file
        try:
            read_manifest(path)
            return True
        except TesseraError:
            continue
    return False


def write_config(folder: Path, config: RunConfig) -> None:
    """Replace `config.yaml` in one step; and leave the file that tells that the folder is a run, and where it was."""
    _replace(folder / RUN_FILE, json.dumps({"format": FORMAT, "version": 1, "folder": str(folder.absolute())}) + "\n")
    _replace(folder / CONFIG, kept_text(config))


def _replace(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # not through a link that may lie there
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


class Proof(Callback):
    """On the main rank: says how often a run saves, and publishes it as soon as it has proved itself."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._proved = False

    def on_start(self, trainer: Trainer) -> None:
        log.info("%s", describe_saving(trainer.config.checkpoint))

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if result.applied:
            self._publish(trainer)

    def on_save(self, trainer: Trainer, path: Path) -> None:
        self._publish(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is None:  # also a run that had no step left to do
            self._publish(trainer)

    def _publish(self, trainer: Trainer) -> None:
        if not self._proved:
            self._proved = True
            self._folder.publish(trainer.config)


def describe_saving(section: CheckpointSection) -> str:
    """One line: when checkpoints are written, and so how much a kill can cost."""
    moments = [f"every {section.every} steps"] if section.every else []
    if section.minutes_between:
        moments.append(f"every {section.minutes_between:g} minutes")
    moments += ["at the end"] if section.at_end else []
    if not moments:
        return "checkpoints   none: checkpoint.every, checkpoint.minutes and checkpoint.at_end are all off"
    return f"checkpoints   {' and '.join(moments)}; the newest {section.keep} are kept"
