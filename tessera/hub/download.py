"""Download a model or a data set from a hub, once on every machine, pinned to a commit and verified.

The libraries of the hubs download, resume and cache. This module stores two kinds of notes beside their cache: the
newest commit of an id, and the file list of a commit. With these notes no request is necessary off line, on the other
ranks of a run, and for an id that names a commit. Streamed files have a cache of their own, limited in size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HUBS, HubId
from tessera.errors import TesseraError, few_names
from tessera.hub.clients import HubClient, Listing, RemoteFile, Unreachable, hub_client
from tessera.hub.files import RECORD_SUFFIXES, DataFiles, Split, data_files, model_files, suffix_of
from tessera.runtime.files import check_inside, leads_out, replace_file
from tessera.runtime.locks import alone, locked, shared
from tessera.runtime.progress import human_bytes
from tessera.weights.layouts import nearest_folder

NOTES = ".tessera"
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_RETRY_AFTER_S = (1.0, 5.0, 30.0, 120.0)
_HELD = ".held"  # suffix of lock files: a process holds a shared lock while it reads a streamed file


def say(text: str) -> None:
    """Print a line to stderr. The logger of a run is not yet set up while its model is downloaded."""
    print(text, file=sys.stderr, flush=True)


class BrokenDownload(TesseraError):
    """Report an interrupted or damaged download. A second attempt may succeed."""


@dataclass(frozen=True)
class Wanted:
    """State which files of a repository to download."""

    weights: bool = True
    include: tuple[str, ...] = ()
    split: Split = "train"

    def of(self, id: HubId, names: Sequence[str]) -> DataFiles:
        if id.kind == "dataset":
            return data_files(names, id, self.split, self.include)
        return DataFiles(tuple(model_files(names, id, weights=self.weights, include=self.include)), id.inside)


@dataclass(frozen=True)
class Fetched:
    """Hold the local path of a downloaded model or data set, and its id."""

    id: HubId  # pinned to the commit
    folder: Path
    path: Path  # the folder, or the subfolder, file or glob pattern in it that the id names


def fetch(id: HubId, where: str, *, to: Path | None = None, wanted: Wanted | None = None) -> Fetched:
    """Return the local folder of a model or data set of a hub. Download it if files are missing.

    If several processes call this at once, one downloads and the others wait. All ranks of a job on this machine get
    the same commit.
    """
    wanted, client = wanted or Wanted(), hub_client(id, where)
    if to is not None:
        _check_target(to, id)
    note = _note_file(client, id) if to is None else to / NOTES / "download.json"
    with _one_at_a_time(note, id):
        if to is not None:  # write the repository's name: a later download to this folder compares it
            replace_file(note, json.dumps({"name": id.name}).encode())
        try:
            listing, unreachable = _list_files(client, id)
            pinned, chosen = id.at(listing.commit), wanted.of(id, [file.name for file in listing.files])
            files = [file for file in listing.files if file.name in set(chosen.files)]
            folder = None if to is not None else client.cached(pinned)
            if folder is None or not all(_is_there(folder, file) for file in files):
                if unreachable := unreachable or _offline_reason():
                    raise Unreachable(unreachable)
                folder = _download_files(client, id, listing.commit, files, to, where)
        except Unreachable as error:
            folder = None if to is not None else _usable_copy(client, id, wanted)
            if folder is None:
                raise _not_here(id, where, str(error), wanted.include) from None
            unreachable, pinned, chosen = str(error), id.at(folder.name), DataFiles((), id.inside)
        if unreachable and not id.is_pinned and os.environ.get("RANK", "0") == "0":
            say(f"{id}: {HUBS[id.hub]} could not be reached ({unreachable}); the copy of {pinned.revision} is used")
        return Fetched(pinned, folder, folder / chosen.path if chosen.path else folder)


def downloaded(id: HubId) -> Path | None:
    """Return the cached folder of a model, without a request to the hub; None if it is not cached with all weights."""
    try:
        client = hub_client(id, "model")
    except TesseraError:  # the library of that hub is not installed
        return None
    folder = _usable_copy(client, id, Wanted())
    return None if folder is None else folder / id.inside


def _usable_copy(client: HubClient, id: HubId, wanted: Wanted) -> Path | None:
    """Return the cached folder of a model, which any program may have downloaded; None if weight files are missing."""
    if id.kind != "model" or wanted.include:
        return None
    commit = _read_note(_note_file(client, id)).get("commit")
    folder = client.cached(id if commit is None else id.at(str(commit)))
    if folder is None or not wanted.weights:
        return folder
    for index in folder.rglob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not all((index.parent / str(name)).is_file() for name in names):
            return None
    return folder if any(folder.rglob("*.safetensors")) else None


def _not_here(id: HubId, where: str, why: str, include: Sequence[str] = ()) -> TesseraError:
    if id.kind == "dataset":
        options, key = " --data", "set data.train=FOLDER"
    else:  # a recipe has a key for the folder, and a command has an argument
        options, key = "", f"set {where}=FOLDER" if where.startswith("model.") else f"write FOLDER in place of {id}"
    options += "".join(f' --include "{pattern}"' for pattern in include)
    use = "add --data FOLDER" if where == "--tasks" else key
    path = f"there is no folder {id.name} here; " if id.looks_like_path else ""
    return TesseraError(
        f"{path}{id} is not on this machine, and {HUBS[id.hub]} cannot be reached: {why}",
        where=where,
        nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
        fix=f"on a machine with a network: tessera download {replace(id, inside='')}{options} --to FOLDER; copy the "
        f"folder to this machine and {use}",
        code="hub.not-reachable",
    )


def _check_target(to: Path, id: HubId) -> None:
    """Raise if a folder contains anything but an earlier download of the same repository."""
    if to.exists() and not to.is_dir():
        raise TesseraError(f"{to} is a file", where="--to", fix="set --to to a folder", code="output.not-a-folder")
    if not to.is_dir() or all(entry.name == NOTES for entry in to.iterdir()):
        return
    other = _read_note(to / NOTES / "download.json").get("name")
    if other != id.name:
        raise TesseraError(
            f"{to} contains {'other files' if other is None else f'a download of {other}'}",
            where="--to",
            fix="set --to to an empty folder",
            code="output.folder-not-empty",
        )


# ---------------------------------------------------------------------------------------------- lists of files


def _list_files(client: HubClient, id: HubId) -> tuple[Listing, str]:
    """Return the files of a repository, and why the hub was not reached ("" if it was).

    The list of a commit is requested only once and stored. Raise `Unreachable` if the hub cannot be reached and no list
    is stored.
    """
    newest = {"commit": id.revision} if id.is_pinned else _read_note(_note_file(client, id))
    listing = None if "commit" not in newest else _stored_list(client, id.at(str(newest["commit"])))
    if listing is not None and (id.is_pinned or newest.get("job") == _job_of_ranks() is not None):
        return listing, ""
    try:
        if reason := _offline_reason():
            raise Unreachable(reason)
        fresh = client.listing(id)
        sound = all(isinstance(file.name, str) and 0 <= file.size < 1 << 60 for file in fresh.files)
        if not sound or re.fullmatch(r"\w[\w.\-]{0,127}", fresh.commit) is None:  # the commit becomes a folder name
            raise Unreachable(f"the server's list of files is not valid (commit {fresh.commit!r:.80})")
    except Unreachable as error:
        if listing is None:
            raise
        return listing, str(error)
    notes: dict[HubId, dict[str, Any]] = {id.at(fresh.commit): {"files": [asdict(file) for file in fresh.files]}}
    if not id.is_pinned:
        notes[id] = {"commit": fresh.commit, "job": _job_of_ranks()}
    for named, record in notes.items():
        note = _note_file(client, named)
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, json.dumps(record).encode())
    return fresh, ""


def _offline_reason() -> str:
    yes = ("1", "on", "yes", "true")
    return next((f"{name} is set" for name in _OFFLINE_VARIABLES if os.environ.get(name, "").lower() in yes), "")


def _job_of_ranks() -> str | None:
    """Return a name that all ranks of a run on this machine have in common; None if there is only one rank."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) == 1:
        return None
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}:{os.getppid()}"


def _note_file(client: HubClient, id: HubId) -> Path:
    name = hashlib.sha256(str(replace(id, inside="")).encode()).hexdigest()
    return client.cache / NOTES / f"list-{name[:32]}.json"


def _read_note(note: Path) -> dict[str, Any]:
    try:
        record = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _stored_list(client: HubClient, pinned: HubId) -> Listing | None:
    try:
        files = tuple(RemoteFile(**file) for file in _read_note(_note_file(client, pinned))["files"])
    except (KeyError, TypeError):
        return None
    return Listing(str(pinned.revision), files)


@contextmanager
def _one_at_a_time(note: Path, id: HubId) -> Iterator[None]:
    """Hold the lock of a download inside the block. Other processes wait for it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(note.with_suffix(".lock")))
        except OSError as error:
            raise TesseraError(
                f"cannot write to the download folder {note.parent.parent}: {error.strerror}",
                where=str(id),
                fix="set HF_HUB_CACHE or MODELSCOPE_CACHE to a folder that can be written, or give --to FOLDER",
                code="hub.cache-not-writable",
            ) from None
        yield


# ---------------------------------------------------------------------------------------------- files


def _download_files(
    client: HubClient, id: HubId, commit: str, files: Sequence[RemoteFile], to: Path | None, where: str
) -> Path:
    """Download files of a repository, verify them, and return its folder."""
    folder = to or client.cached(id.at(commit))
    missing = [file for file in files if folder is None or not _is_there(folder, file)]
    if to is not None:
        for file in files:  # the library would follow a symbolic link and overwrite its target
            check_inside(to / file.name, to)
    for file in missing:
        if folder is not None and (folder / file.name).is_file():
            _remove(folder / file.name, folder)  # its size is wrong; the library would consider it complete
    if missing:
        say(f"{id}: {len(missing)} files, {human_bytes(sum(file.size for file in missing))}, to {to or client.cache}")
    try:
        folder = client.fetch(id, commit, [file.name for file in files], to)
    except Unreachable as error:
        raise BrokenDownload(
            f"the download of {id} was interrupted: {error}",
            where=where,
            fix="run the command again: the download resumes",
            code="hub.download-broke-off",
        ) from None
    for file in files:
        _verify(folder, file, id.at(commit))
    if missing:
        say(f"{id.at(commit)}: downloaded and verified")
    return folder


def _is_there(folder: Path, file: RemoteFile) -> bool:
    """Return whether a folder contains a file of the listed size."""
    try:
        return (folder / file.name).stat().st_size == file.size
    except OSError:
        return False


def _verify(folder: Path, file: RemoteFile, id: HubId) -> None:
    """Raise if size or hash of a file differ from the hub's list. The file is deleted, so that a retry downloads it."""
    path, problem = folder / file.name, None
    if not _is_there(folder, file):
        problem = f"has {path.stat().st_size if path.is_file() else 0} bytes instead of {file.size}"
    elif file.sha256 is not None and _digest(path, hashlib.sha256()) != file.sha256:
        problem = f"does not have the SHA-256 {file.sha256}"
    elif file.sha256 is None and file.git_sha1 is not None:
        begun = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
        problem = None if _digest(path, begun) == file.git_sha1 else "does not have the hash that the hub lists"
    if problem is not None:
        _remove(path, folder)
        raise BrokenDownload(
            f"{file.name} {problem}: the download was damaged, and the file is deleted",
            where=str(id),
            fix="run the command again: only this file is downloaded",
            code="hub.bytes-differ",
        )


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, lambda: digest).hexdigest())


def _remove(path: Path, folder: Path) -> None:
    """Delete a file. If it is a symbolic link into the cache, delete its target too; other targets stay."""
    for target in (path,) if leads_out(path, folder) else (path.resolve(), path):
        target.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- streamed files


@dataclass(frozen=True)
class RemoteShards:
    """List the record files of a streamed data set at one commit, sorted by name."""

    id: HubId  # id of the data set, with this commit as its revision
    files: tuple[RemoteFile, ...]


def remote_shards(id: HubId, where: str) -> RemoteShards:
    """List the files of the training split of a data set. No file is downloaded."""
    client = hub_client(id, where)
    with _one_at_a_time(_note_file(client, id), id):
        try:
            listing, _ = _list_files(client, id)
        except Unreachable as error:
            raise TesseraError(
                f"the files of {id} cannot be listed: {HUBS[id.hub]} cannot be reached: {error}",
                where=where,
                fix="start the run once with a network; or `tessera download` the data set, and set data.stream=false",
                code="hub.not-reachable",
            ) from None
    names = set(data_files([file.name for file in listing.files], id, "train").files)
    media = sorted(name for name in names if suffix_of(name) not in RECORD_SUFFIXES)
    if media:
        raise TesseraError(
            f"{id} has media in separate files ({few_names(media, 3)}), which cannot be streamed",
            where=where,
            fix="set data.stream=false, or use a data set whose Parquet or tar files contain the media",
            code="hub.media-not-streamable",
        )
    files = sorted((file for file in listing.files if file.name in names), key=lambda file: file.name)
    return RemoteShards(id.at(listing.commit), tuple(files))


def _stream_folder(client: HubClient, id: HubId) -> Path:
    return client.cache / NOTES / "stream" / f"{id.hub}--{id.name.replace('/', '--')}" / str(id.revision)


@contextmanager
def held_shard(id: HubId, file: RemoteFile, where: str) -> Iterator[None]:
    """Hold a shared lock on a streamed file, so that `trim` does not delete it. The file may not be downloaded yet."""
    with ExitStack() as stack:
        with suppress(OSError):  # the lock cannot be created in a read-only cache, from which nothing is deleted
            path = _stream_folder(hub_client(id, where), id) / file.name
            stack.enter_context(shared(path.with_name(path.name + _HELD)))
        yield


def fetch_shard(
    id: HubId, file: RemoteFile, where: str, waits: Sequence[float] = _RETRY_AFTER_S, keep_bytes: int | None = None
) -> Path:
    """Return the local path of one file of a data set. Download and verify it if it is missing.

    `id`: pinned to a commit. `keep_bytes`: size limit of the cache; after a download the least recently read files are
    deleted. `waits`: seconds before each retry of an interrupted download. A refusal by the hub is not retried.
    """
    client = hub_client(id, where)
    folder = _stream_folder(client, id)
    path = folder / file.name
    with _one_at_a_time(path.with_name(path.name + ".part"), id):
        copy = client.cached(id)
        for holder in (folder, *([] if copy is None else [copy])):
            if _is_there(holder, file):
                return holder / file.name
        for wait in (*waits, None):
            try:
                if reason := _offline_reason():
                    what = f"{file.name} of {id} is not on this machine, and {reason}"
                    raise TesseraError(
                        what,
                        where=where,
                        fix="run it once with a network, or unset the variable",
                        code="hub.not-reachable",
                    )
                incoming = folder / "incoming"
                _download_files(client, id, str(id.revision), [file], incoming, where)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(incoming / file.name, path)
                if keep_bytes is not None:
                    trim(client.cache, keep_bytes)
                return path
            except BrokenDownload as error:
                if wait is None:
                    raise
                say(f"{error.what}; next attempt in {wait:g} s")
                time.sleep(wait)
    raise AssertionError("unreachable: the last attempt returns or raises")


def trim(cache: Path, limit: int) -> list[Path]:
    """Delete the least recently read streamed files until at most `limit` bytes remain. Return the deleted files.

    A file that a process is reading is never deleted.
    """
    marks = sorted((cache / NOTES / "stream").rglob(f"*{_HELD}"), key=lambda mark: mark.stat().st_mtime)
    files = {mark: file for mark in marks if (file := mark.with_name(mark.name.removesuffix(_HELD))).is_file()}
    total, removed = sum(file.stat().st_size for file in files.values()), []
    for mark, file in files.items():
        if total <= limit:
            break
        with alone(mark) as free:
            if not free:
                continue
            total -= file.stat().st_size
            file.unlink(missing_ok=True)
            mark.unlink(missing_ok=True)
        removed.append(file)
    return removed
