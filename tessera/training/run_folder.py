"""Manage the folder of a run: lock it, and keep a replaced run until the new run has applied a step.

Until the first step is applied or a checkpoint is written, nothing of an earlier run is lost:

- `config.yaml` of a resumed run is not changed.
- `--overwrite` moves the files of the old run to `RUN/.replacing`, and renames it to `RUN/.replaced` when it is
  complete. If the new run fails before its first step, the files are moved back. After a kill the next start moves them
  back. If `.replacing` exists, other files in RUN belong to the old run. If `.replaced` exists, other files in RUN
  belong to the new run and are removed.
- A recipe in RUN may read `RUN/processor` and `RUN/data`, as the recipe of a resumed run does. `--overwrite` copies
  these folders back into RUN after the move.
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
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import remove_folder
from tessera.config.run_config import CheckpointSection, RunConfig
from tessera.config.run_paths import ASIDE, REPLACED, REPLACING, find_file, kept_text, paths_inside
from tessera.config.trust import named_code, write_run_id
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError, first_line
from tessera.inference.weight_source import CONFIG, RUN_FILE
from tessera.inference.weight_source import run_exists as run_exists  # re-exported for the command line
from tessera.runtime.distributed import expected_rank
from tessera.runtime.files import leads_out, read_json_mapping, replace_file
from tessera.runtime.folder_lock import FolderLock
from tessera.weights.layouts import EXPORT_FOLDER

FORMAT = "tessera-run"
_TRASH = ".trash-"
# Names of files and folders that a run writes into its folder. Only these are moved by --overwrite.
_OF_A_RUN = frozenset(
    {RUN_FILE, CONFIG, "run-id", "checkpoints", "ledger", "logs", "index", "processor", "data"}
    | {EXPORT_FOLDER, f"{EXPORT_FOLDER}-ema"}
    | {f"{name}.jsonl" for name in ("metrics", "history", "quarantine", "guard", "answers", "previews")}
    | {"adapter", "adapter-ema", "best.json", "report.html", "profile", "previews", "answer_images", "eval"}
    | {"tensorboard", "wandb", "swanlab", "trackers.json"}
)
_INPUTS = ("data", "processor")  # sub-folders of the run folder that the run's own recipe may name as inputs
_ANSWERS = re.compile(r"answers-step-\d+\.jsonl")
# Error numbers that the user has to resolve: no permission, a full disk, a wrong path.
_UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR}
    | {errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EFBIG}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # EFBIG: the limit on the size of a file

log = logging.getLogger("tessera")


@contextmanager
def writable(folder: Path, *, starting: bool = False) -> Iterator[None]:
    """Turn errors about a full disk or missing permissions in the run folder into a `TesseraError`.

    Errors about files in other folders are raised unchanged, except for a full disk. `starting`: whether the folder is
    being created; then every OSError is turned into a `TesseraError`.
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
    """Lock the folder of a run, and replace an old run in it. Only the main rank uses this."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._lock = FolderLock(folder)
        self._open = False
        self._objects: list[str] = []
        self.resumed = False

    def open(self, *, overwrite: bool = False, resume: bool = False, inputs: Collection[str] = ()) -> None:
        """Lock the folder. Move the files of a run that is replaced to `.replaced`.

        `inputs`: subfolders that the new run reads (see `read_from_old_run`); they are copied back."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # such as a missing permission or a disk that is not mounted
            raise _unwritable(self.path, error) from error
        with writable(self.path, starting=True):
            self._lock.acquire()
            self._open = True
            self._recover()
            self._check_links()
            self.resumed = resume
            if resume:
                return
            _check_replaceable(self.path, overwrite)
            if run_exists(self.path):
                self._set_aside(inputs)

    def begin(self, config: RunConfig, *, resume: bool = False, objects: Sequence[str] = ()) -> None:
        """Write the configuration of a new run. For a resumed run, `publish` writes it later.

        `objects`: names of arguments of `train` that were objects; a resume needs them again."""
        self._objects = list(objects)
        with writable(self.path, starting=True):
            if named_code(config):
                write_run_id(self.path)
            if not resume:
                write_config(self.path, config, self._objects)

    def publish(self, config: RunConfig) -> None:
        """Write the configuration, and remove the run that this one replaces.

        This happens after the first applied step or checkpoint: if the run fails before, the old run is kept.
        """
        write_config(self.path, config, self._objects)
        old = self.path / REPLACED
        if old.exists():
            trash = self.path / f"{_TRASH}{secrets.token_hex(4)}"
            os.rename(old, trash)
            # Remove large files in a thread, because it takes long. After a kill, the next start removes the rest.
            threading.Thread(target=remove_folder, args=(trash,), name="tessera-remove-old-run", daemon=True).start()

    def close(self) -> None:
        """Unlock the folder. If the run ended before its first step, put back the run that it was to replace."""
        if not self._open:
            return
        self._open = False
        try:
            if (self.path / REPLACED).exists():
                self._recover()
                log.warning("the run in %s was not replaced: its files are restored", self.path)
        except (OSError, TesseraError) as error:
            log.warning(
                "files of the run that was to be replaced are in a hidden folder of %s: %s",
                self.path,
                first_line(error),
            )
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------ replacing an old run

    def _entries(self) -> list[Path]:
        """Return the files and folders in the run folder whose names are those that runs write."""
        return [path for path in self.path.iterdir() if path.name in _OF_A_RUN or _ANSWERS.fullmatch(path.name)]

    def _check_links(self) -> None:
        """Raise if a folder that the run writes to is a link out of the run folder (downloads may contain them)."""
        for path in [*self._entries(), *(self.path / name for name in ASIDE)]:
            if path.name not in _INPUTS and path.is_symlink() and path.is_dir() and leads_out(path, self.path):
                raise TesseraError(
                    f"{path} is a link out of the run folder, to {os.path.realpath(path)}",
                    where=str(self.path),
                    fix="move the linked folder here in place of the link; to use another disk, link the run folder",
                    code="run.link-out-of-folder",
                )

    def _set_aside(self, inputs: Collection[str]) -> None:
        _move(self._entries(), self.path / REPLACING)
        os.rename(self.path / REPLACING, self.path / REPLACED)
        for name in inputs:
            if (self.path / REPLACED / name).is_dir():
                shutil.copytree(self.path / REPLACED / name, self.path / name)

    def _recover(self) -> None:
        """Restore a run that was to be replaced, if there is one, and remove files of the new run."""
        self._check_links()
        if (self.path / REPLACED).exists():
            _move(self._entries(), self.path / f"{_TRASH}{secrets.token_hex(4)}")
            os.rename(self.path / REPLACED, self.path / REPLACING)
        for aside in (self.path / name for name in ASIDE):
            if aside.exists():
                _move(list(aside.iterdir()), self.path)
                aside.rmdir()
        for trash in list(self.path.glob(f"{_TRASH}*")):
            remove_folder(trash)


def _move(paths: Sequence[Path], folder: Path) -> None:
    """Move files and folders into `folder`. Raise before the first move if one of them would replace another."""
    folder.mkdir(exist_ok=True)
    for path in paths:
        if os.path.lexists(folder / path.name):
            raise TesseraError(
                f"{path} cannot be moved to {folder}, which already has {path.name}",
                where=str(folder),
                fix=f"--overwrite left {path}, and another program wrote {folder / path.name} later: move the one "
                "that you do not need to another place",
                code="run.files-in-two-places",
            )
    for path in paths:
        os.rename(path, folder / path.name)


def check_fresh(folder: Path, overwrite: bool) -> None:
    """Raise if the folder cannot take a new run.

    It cannot if a run uses it, or if it contains a run and `overwrite` is off. With `overwrite`, the folder must have a
    `run.json` and must not contain the working folder.
    """
    if expected_rank() == 0:  # other ranks would mistake the lock of their main rank for that of another run
        FolderLock(folder).refuse_running()
    _check_replaceable(folder, overwrite)


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if not run_exists(folder):
        return
    if not overwrite:
        raise TesseraError(
            f"{folder} already contains a run with checkpoints",
            where="out, name",
            fix=f"`tessera resume {folder}` continues it; name=NEW starts another; --overwrite replaces it",
            code="run.exists",
        )
    here, target = Path.cwd().resolve(), folder.resolve()
    if target == here or target in here.parents:
        raise TesseraError(
            f"{folder} is or contains the working folder, and is not replaced",
            where="--overwrite",
            fix="start from another folder, or choose another name",
            code="run.working-folder",
        )
    if _run_file(folder) is None:
        raise TesseraError(
            f"{folder} is not a run folder of Tessera, and is not replaced",
            where="--overwrite",
            fix=f"choose another name, or remove the folder yourself (a run has a file {RUN_FILE})",
            code="run.foreign-folder",
        )


def read_from_old_run(config: RunConfig, written: Collection[Path] = ()) -> list[str]:
    """Return the subfolders of the run folder that the recipe reads.

    Raise if the recipe reads files that --overwrite would replace. `written`: files in the recipe that the new run
    writes before it reads them.
    """
    if not run_exists(config.folder):
        return []
    new_files = {path.resolve() for path in written}
    paths = [path for path in paths_inside(config, config.folder) if config.folder.resolve() / path not in new_files]
    for path in paths:
        if not path.parts or path.parts[0] in _OF_A_RUN.difference(_INPUTS):
            raise TesseraError(
                f"the recipe reads {config.folder / path}, which --overwrite would replace",
                where="--overwrite",
                fix="choose another name for the new run: name=NEW",
                code="run.reads-replaced-run",
            )
    return sorted({path.parts[0] for path in paths}.intersection(_INPUTS))


def _run_file(folder: Path) -> dict[str, Any] | None:
    """Return the content of `run.json`; None if the file is missing, unreadable, or not written by Tessera."""
    try:
        content = read_json_mapping(find_file(folder, RUN_FILE))
    except TesseraError:
        return None
    return content if content.get("format") == FORMAT else None


def given_objects(folder: Path) -> list[str]:
    """Return the names of arguments of `train` that were objects, from `run.json`."""
    names = (_run_file(folder) or {}).get("objects", [])
    return [str(name) for name in names] if isinstance(names, list) else []


def write_config(folder: Path, config: RunConfig, objects: Sequence[str] = ()) -> None:
    """Write `config.yaml`, and `run.json`, which marks the folder as a run. Each file is replaced atomically."""
    content = {"format": FORMAT, "version": 1, "folder": str(folder.absolute()), "objects": list(objects)}
    for path, text in ((folder / RUN_FILE, json.dumps(content) + "\n"), (folder / CONFIG, kept_text(config))):
        if not (path.is_file() and path.read_bytes() == text.encode()):
            replace_file(path, text.encode())


class PublishRun(Callback):
    """Call `RunFolder.publish`, which saves the configuration and removes the replaced run.

    This happens after the first applied step or checkpoint, or at the end of a new run. At the start, log how often
    the run saves. Only the main rank has this callback.
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
        # A resume without an applied step does not replace the configuration: its settings are untested.
        if trainer.stop_reason is None and not self._folder.resumed:
            self._publish(trainer)

    def _publish(self, trainer: TrainerHandle) -> None:
        if not self._published:
            self._published = True
            self._folder.publish(trainer.config)


def describe_saving(section: CheckpointSection) -> str:
    """Return a line that says when checkpoints are written."""
    moments = [f"every {section.interval}"] if section.interval else []
    moments += ["at the end"] if section.at_end else []
    if not moments:
        return "checkpoints   none: checkpoint.every is 0, and checkpoint.at_end is off"
    return f"checkpoints   {' and '.join(moments)}; the newest {section.keep} are kept"
