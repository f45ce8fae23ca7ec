"""Publish a folder by one rename: files are written to a staging folder beside the target.

A killed process leaves its staging folder `.staging-NAME~*` and no new target. The next export to the same target
removes that staging folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import Fault, free_bytes, no_fault, remove_folder, rename, sync_folder, write_file
from tessera.errors import TesseraError
from tessera.runtime.collective import Ranks
from tessera.runtime.files import PICKLE_SUFFIXES, read_json_mapping
from tessera.runtime.progress import human_bytes

MARK = "tessera_export.json"  # file that marks an export of Tessera, and records its source
_MAX_RECORD_BYTES = 256 << 20
# Files that identify an export or other weights: a pipeline, adapters, shards of ranks, a torch DCP folder.
_OF_WEIGHTS = (MARK, "model_index.json", "adapter_config.json", "latest_checkpointed_iteration.txt", ".metadata")
_OF_A_RUN = ("run.json", ".lock")  # files of a run that has begun, or is just starting

Origin = Mapping[str, str]  # what an export was made from, as `made_from` returns it


def made_from(form: str, source: str | Path) -> Origin:
    """Return the origin of an export: its format and a hash of its source's path.

    A later export with the same origin may replace it. The path is hashed because it is private.
    """
    return {"form": form, "source": hashlib.sha256(os.path.realpath(source).encode()).hexdigest()}


@dataclass(frozen=True)
class Staging:
    """Hold a staging folder, the parent folders that were created for it, and the lock of the staging folder.

    The lock keeps another export to the same target from removing the folder.
    """

    path: Path
    parents: tuple[Path, ...]
    lock: int

    def discard(self) -> None:
        """Remove the staging folder and the parent folders that were created for it."""
        remove_folder(self.path)
        for parent in self.parents:
            with suppress(OSError):  # a folder into which another export was written is not empty, and stays
                parent.rmdir()
        os.close(self.lock)


def publish(
    folder: Path, write: Callable[[Path], None], *, origin: Origin | None = None, overwrite: bool = False
) -> None:
    """Publish a folder by one rename. `write` creates its files in a staging folder, on rank 0."""

    def work() -> None:
        with staged(folder, origin, overwrite) as staging:
            write(staging)

    Ranks.current().on_rank0(work)


@contextmanager
def staged(folder: Path, origin: Origin | None, overwrite: bool, fault: Fault = no_fault) -> Iterator[Path]:
    """Yield a staging folder. Publish it at the end of the `with` block, or remove it if the block fails."""
    staging = begin(folder, overwrite, origin)
    try:
        yield staging.path
        show(staging.path, folder, fault, origin, overwrite)
    except BaseException:
        staging.discard()
        raise
    os.close(staging.lock)


def begin(folder: Path, overwrite: bool, origin: Origin | None = None) -> Staging:
    """Check a target and return a new staging folder for it. Remove staging folders of killed processes."""
    with written_in(folder):
        _recover(folder)
    parents = check_target(folder, overwrite, origin)
    with written_in(folder):
        while True:
            path = folder.parent / f".staging-{folder.name}~{uuid.uuid4().hex[:8]}"
            path.mkdir()
            if (lock := _lock(path)) is not None:
                return Staging(path, parents, lock)


@contextmanager
def written_in(folder: Path) -> Iterator[None]:
    """Turn an `OSError` in the `with` block, such as a too long file name, into a `TesseraError` about `folder`."""
    try:
        yield
    except OSError as error:
        reason = str(error.args[0][0][-1]) if isinstance(error, shutil.Error) else error.strerror
        raise TesseraError(
            f"the folder cannot be written: {reason}", where=str(folder), code="output.write-failed"
        ) from error


def space_report(folder: Path, needed: int) -> str:
    """Return the `fix` text of an error about a full disk, with the number of bytes needed and free."""
    free = free_bytes(folder)
    sizes = f"{human_bytes(needed)} ({needed} bytes) are needed, {human_bytes(free)} ({free} bytes) are free"
    return f"free some space: {sizes}"


def check_target(folder: Path, overwrite: bool, origin: Origin | None = None) -> tuple[Path, ...]:
    """Raise unless the target is missing, empty or an earlier export of this origin.

    With `overwrite`, it may be any other export or folder of weights. Create missing parent folders, and return them.
    """
    with written_in(folder):
        if folder.is_symlink():  # the rename would replace the link, not the linked folder
            raise TesseraError(
                "the target is a symbolic link",
                where=str(folder),
                fix=f"give the linked folder itself as the target: {os.path.realpath(folder)}",
                code="output.target-is-link",
            )
        here = Path.cwd()
        if Path(os.path.realpath(folder)) in (here, *here.parents):
            raise TesseraError(
                "the target is the working folder, or contains it",
                where=str(folder),
                fix="give a new folder inside the working folder as the target",
                code="output.target-holds-working-folder",
            )
        if folder.exists() and not folder.is_dir():
            raise TesseraError(
                f"the target is a file: {folder}", fix="name a folder as the target", code="output.target-is-file"
            )
        if folder.is_dir() and any(folder.iterdir()):
            if not overwrite and not _is_export(folder, origin):
                raise TesseraError(
                    "the target is not empty, and not an earlier export of the same source in the same format",
                    where=str(folder),
                    fix="choose another target; --overwrite (overwrite=True in Python) replaces any folder of weights",
                    code="output.folder-not-empty",
                )
            if reason := _why_not_replaced(folder):
                raise TesseraError(
                    f"the target {reason}, and is not replaced",
                    where=str(folder),
                    fix="choose another target, or remove this folder yourself",
                    code="output.not-an-export",
                )
        missing = tuple(path for path in folder.parents if not path.exists())
        folder.parent.mkdir(parents=True, exist_ok=True)
        return missing


def _why_not_replaced(folder: Path) -> str | None:
    """Return why a folder must not be replaced; None if it is an export or weight folder that contains no run."""
    home = Path(os.path.realpath(os.path.expanduser("~")))
    if Path(os.path.realpath(folder)) in (home, *home.parents):
        return "is or contains the home folder"
    if any((folder / name).exists() for name in _OF_A_RUN):
        return "is a run folder"
    published = (folder / "config.json").is_file() and any(
        path.suffix in (".safetensors", *PICKLE_SUFFIXES) for path in folder.iterdir()
    )
    if not published and not any((folder / name).is_file() for name in _OF_WEIGHTS):
        return "is neither an export of Tessera nor a folder of weights"
    return "contains a run folder" if any(any(folder.rglob(name)) for name in _OF_A_RUN) else None


def _is_export(folder: Path, origin: Origin | None) -> bool:
    """Return whether a folder is an earlier export of `origin`, by its `tessera_export.json`; False for None."""
    try:
        return origin is not None and read_json_mapping(folder / MARK, _MAX_RECORD_BYTES).get("origin") == origin
    except TesseraError:
        return False


def show(staging: Path, folder: Path, fault: Fault, origin: Origin | None, overwrite: bool) -> None:
    """Rename a complete staging folder to the target, and remove the old target."""
    check_target(folder, overwrite, origin)  # check again: another process may have published meanwhile
    mark = staging / MARK
    # An exported Hugging Face folder already has the file `MARK`. Keep its text, and insert the origin at the start.
    record = mark.read_bytes() if mark.exists() else pretty_json({"format": "tessera-export", "version": 1})
    mark.unlink(missing_ok=True)
    if origin is not None:
        record = b"{\n" + f' "origin": {json.dumps(origin)},'.encode() + record.removeprefix(b"{")
    write_file(mark, record, fault)
    sync_folder(staging, fault)
    if folder.is_dir():
        # Remove old exports that killed processes left. Files of them may be missing, so `_recover` must not use them.
        _remove_trash(folder)
        rename(folder, folder.parent / f".trash-{folder.name}~{uuid.uuid4().hex[:8]}", fault)
    rename(staging, folder, fault)
    _remove_trash(folder)  # the old export, which `_recover` would restore after a kill between the two renames
    _remove_abandoned(folder)


def _remove_trash(folder: Path) -> None:
    for path in folder.parent.glob(f".trash-{escape(folder.name)}~*"):
        remove_folder(path)


def _recover(folder: Path) -> None:
    """Remove staging folders of killed processes. Restore the old target after a kill between the two renames."""
    _remove_abandoned(folder)
    if not folder.exists() and not any(folder.parent.glob(f".staging-{escape(folder.name)}~*")):
        for path in list(folder.parent.glob(f".trash-{escape(folder.name)}~*"))[:1]:
            rename(path, folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove staging folders of the target that no process has locked."""
    for path in folder.parent.glob(f".staging-{escape(folder.name)}~*"):
        if path.is_symlink():
            remove_folder(path)
        with suppress(OSError):  # another user's folder cannot be opened, and is kept
            if (lock := _lock(path)) is not None:
                remove_folder(path)
                os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a staging folder and return its file descriptor; None if another process has locked or removed it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    locked = True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # These two mean that another process has the lock. Other errors mean that the file system has no locks; then
        # continue as if this process had it.
        locked = error.errno not in (errno.EACCES, errno.EAGAIN)
    if locked and path.exists():
        return handle
    os.close(handle)
    return None


def pretty_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
