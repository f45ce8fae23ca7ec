"""Manage the folder of a run: lock it, and keep the run that it replaces until the new one works.

A run works when its first step is applied, or a checkpoint is written. Until then nothing is lost:

- `config.yaml` of a run that is resumed stays as it is.
- `--overwrite` moves the files of the old run to `RUN/.replacing`, and renames that to `RUN/.replaced` when all of them
  are there. If the new run fails before it works, the files are moved back. After a kill the next start does so: files
  in `.replacing` belong into the folder; files beside `.replaced` belong to the new run and are removed.
- Only a folder with a `run.json` of Tessera is ever emptied, and never the working folder. Only files and folders with
  names of a run are moved; others stay.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import remove_folder
from tessera.config.run_config import CheckpointSection, RunConfig
from tessera.config.run_paths import kept_text
from tessera.config.trust import named_code, write_run_id
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError
from tessera.inference.weight_source import ASIDE, CONFIG, REPLACED, REPLACING, RUN_FILE, find_file
from tessera.inference.weight_source import run_exists as run_exists  # the command line asks here
from tessera.runtime.distributed import expected_rank
from tessera.runtime.files import read_json_mapping, replace_file
from tessera.training.lock import FolderLock

FORMAT = "tessera-run"
_TRASH = ".trash-"
# Names that belong to a run: the next run would read them as its own.
_OF_A_RUN = frozenset(
    {RUN_FILE, CONFIG, "run-id", "checkpoints", "ledger", "logs", "index", "processor", "data", "hf", "hf-ema"}
    | {f"{name}.jsonl" for name in ("metrics", "history", "quarantine", "guard", "answers", "previews")}
    | {"adapter", "adapter-ema", "best.json", "report.html", "profile", "previews", "answer_images"}
    | {"tensorboard", "wandb", "swanlab", "trackers.json"}
)
_ANSWERS = re.compile(r"answers-step-\d+\.jsonl")
# Errors of the system that mean: the folder cannot be written to, and the user has to change that.
_UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
    | {errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EFBIG}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # EFBIG: a limit of the system on files

log = logging.getLogger("tessera")


@contextmanager
def writable(folder: Path, *, starting: bool = False) -> Iterator[None]:
    """Turn errors about a full disk or missing permissions into a `TesseraError`.

    Errors about other folders pass, except while the folder of the run is created.
    """
    try:
        yield
    except OSError as error:
        inside = (
            error.filename is not None and folder.absolute() in Path(os.fsdecode(error.filename)).absolute().parents
        )
        if not starting and not (error.errno in _UNWRITABLE and (inside or error.errno in _FULL)):
            raise
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> TesseraError:
    at = None if error.filename is None else Path(os.fsdecode(error.filename))
    gone = at is not None and at.is_symlink() and not at.exists()
    reason = f"{at} is a link to {os.readlink(at)}, which does not exist" if at is not None and gone else error.strerror
    return TesseraError(
        f"{folder} cannot be written to: {reason}" + ("" if at is None or gone else f" ({at})"),
        where="out, name",
        fix="free disk space, check the permissions of the folder, or choose another with out=FOLDER",
        code="run.folder-not-writable",
    )


class RunFolder:
    """Manage the folder of a run on the main rank; other ranks only write files into it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._lock = FolderLock(folder)
        self._open = False
        self._objects: list[str] = []
        self.resumed = False

    def open(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Lock the folder for this run, and set the run aside that it replaces."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # such as a disk that is not mounted
            raise _unwritable(self.path, error) from error
        with writable(self.path, starting=True):
            self._lock.acquire()
            self._open = True
            self._recover()
            self.resumed = resume
            if resume:
                return
            _check_replaceable(self.path, overwrite)
            if run_exists(self.path):
                self._set_aside()

    def begin(self, config: RunConfig, *, resume: bool = False, objects: Sequence[str] = ()) -> None:
        """Write the configuration of a new run; that of a resumed run is written later, by `publish`.

        `objects`: parts that the caller gave as objects, and has to give again to a resume."""
        self._objects = list(objects)
        with writable(self.path, starting=True):
            if named_code(config):
                write_run_id(self.path)
            if not resume:
                write_config(self.path, config, self._objects)

    def publish(self, config: RunConfig) -> None:
        """Write the configuration of a run that works, and remove the run that it replaced."""
        write_config(self.path, config, self._objects)
        old = self.path / REPLACED
        if old.exists():
            trash = self.path / f"{_TRASH}{secrets.token_hex(4)}"
            os.rename(old, trash)
            # Removing many large files takes long, and other ranks wait. The next start removes the remains of a kill.
            threading.Thread(target=remove_folder, args=(trash,), name="tessera-remove-old-run", daemon=True).start()

    def close(self) -> None:
        """Unlock the folder. If the run never worked, put back the run that it was to replace."""
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
        """Return the files and folders of the run."""
        return [path for path in self.path.iterdir() if path.name in _OF_A_RUN or _ANSWERS.fullmatch(path.name)]

    def _set_aside(self) -> None:
        _move(self._entries(), self.path / REPLACING)
        os.rename(self.path / REPLACING, self.path / REPLACED)

    def _recover(self) -> None:
        """Put back the run that a killed one was to replace, and remove the remains of the killed one."""
        if (self.path / REPLACED).exists():
            _move(self._entries(), self.path / f"{_TRASH}{secrets.token_hex(4)}")
            os.rename(self.path / REPLACED, self.path / REPLACING)
        for aside in (self.path / name for name in ASIDE):
            if aside.exists():
                _move(list(aside.iterdir()), self.path)
                aside.rmdir()
        for trash in filter(_is_trash, list(self.path.iterdir())):
            remove_folder(trash)


def _move(paths: Sequence[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        os.rename(path, folder / path.name)


def _is_trash(path: Path) -> bool:
    return path.name.startswith(_TRASH)


def check_fresh(folder: Path, overwrite: bool) -> None:
    """Refuse to begin a run where one is running or has ended, or to replace a folder that is not a run."""
    if expected_rank() == 0:  # the others may see the lock of their main rank
        FolderLock(folder).refuse_running()
    _check_replaceable(folder, overwrite)


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if not run_exists(folder):
        return
    if not overwrite:
        raise TesseraError(
            f"{folder} already holds a run with checkpoints",
            where="out, name",
            fix=f"`tessera resume {folder}` goes on with it; name=NEW starts another; --overwrite replaces it",
            code="run.exists",
        )
    here, target = Path.cwd().resolve(), folder.resolve()
    if target == here or target in here.parents:
        raise TesseraError(
            f"{folder} is the working folder, or holds it: it is not replaced",
            where="--overwrite",
            fix="start from another folder, or choose another name",
            code="run.working-folder",
        )
    if _run_file(folder) is None:
        raise TesseraError(
            f"{folder} holds other things than a run of Tessera: it is not replaced",
            where="--overwrite",
            fix=f"choose another name, or remove the folder yourself (a run has a file {RUN_FILE})",
            code="run.foreign-folder",
        )


def _run_file(folder: Path) -> dict[str, Any] | None:
    """Return the content of `run.json`; None if there is none, or if it is not written by Tessera."""
    try:
        content = read_json_mapping(find_file(folder, RUN_FILE))
    except TesseraError:
        return None
    return content if content.get("format") == FORMAT else None


def given_objects(folder: Path) -> list[str]:
    """Return which parts of a run its caller gave as objects."""
    names = (_run_file(folder) or {}).get("objects", [])
    return [str(name) for name in names] if isinstance(names, list) else []


def write_config(folder: Path, config: RunConfig, objects: Sequence[str] = ()) -> None:
    """Replace `config.yaml` in one step, and write `run.json`, which marks the folder as a run."""
    content = {"format": FORMAT, "version": 1, "folder": str(folder.absolute()), "objects": list(objects)}
    for path, text in ((folder / RUN_FILE, json.dumps(content) + "\n"), (folder / CONFIG, kept_text(config))):
        if not (path.is_file() and path.read_bytes() == text.encode()):
            replace_file(path, text.encode())


class PublishRun(Callback):
    """Call `RunFolder.publish` after the first update or save, or at the end of a new run.

    It also logs at the start how often a run saves.
    Publishing writes the configuration and removes the run that this one replaces. Only the main rank has it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._published = False

    def on_start(self, trainer: TrainerHandle) -> None:
        log.info("%s", describe_saving(trainer.config.checkpoint))

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if result.applied:
            self._publish(trainer)

    def on_save(self, trainer: TrainerHandle, path: Path) -> None:
        self._publish(trainer)

    def on_end(self, trainer: TrainerHandle) -> None:
        # A resume that applied no step has not shown that its settings work: it leaves those of the run.
        if trainer.stop_reason is None and not self._folder.resumed:
            self._publish(trainer)

    def _publish(self, trainer: TrainerHandle) -> None:
        if not self._published:
            self._published = True
            self._folder.publish(trainer.config)


def describe_saving(section: CheckpointSection) -> str:
    """Return a line about when checkpoints are written, and so how much a kill can cost."""
    moments = [f"every {section.interval}"] if section.interval else []
    moments += ["at the end"] if section.at_end else []
    if not moments:
        return "checkpoints   none: checkpoint.every is 0, and checkpoint.at_end is off"
    return f"checkpoints   {' and '.join(moments)}; the newest {section.keep} are kept"
