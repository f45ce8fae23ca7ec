"""Download a model or a data set from a hub, once on every machine, pinned to a commit and verified.

The libraries of the hubs download, resume and cache. Beside their cache this module stores which commit an id means,
and for each commit the list of its files. The lists answer without the hub: off line, for other ranks of a job, for a
commit. Files that a run streams are in a folder of their own and are removed by age.
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
_HELD = ".held"  # suffix of the lock that a process shares while it reads a file


def say(text: str) -> None:
    """Write a line for the user: the logger of a run is not set up while its model is downloaded."""
    print(text, file=sys.stderr, flush=True)


class BrokenDownload(TesseraError):
    """Report a download that broke off or arrived damaged. A second attempt may succeed."""


@dataclass(frozen=True)
class Wanted:
    """Select the files of a repository."""

    weights: bool = True
    include: tuple[str, ...] = ()
    split: Split = "train"

    def of(self, id: HubId, names: Sequence[str]) -> DataFiles:
        if id.kind == "dataset":
            return data_files(names, id, self.split, self.include)
        return DataFiles(tuple(model_files(names, id, weights=self.weights, include=self.include)), id.inside)


@dataclass(frozen=True)
class Fetched:
    """Hold the folder of a download."""

    id: HubId  # with the commit
    folder: Path  # of the repository
    path: Path  # of what the id names in it: the folder, a folder below it, a file, or a pattern of files


def fetch(id: HubId, where: str, *, to: Path | None = None, wanted: Wanted | None = None) -> Fetched:
    """Return the folder of a model or data set of a hub. It is downloaded if it is not on this machine.

    Of several processes one downloads and the others wait for it. Ranks of one job get the same commit.
    """
    wanted, client = wanted or Wanted(), hub_client(id, where)
    if to is not None:
        _check_target(to, id)
    note = _note_file(client, id) if to is None else to / NOTES / "download.json"
    with _one_at_a_time(note, id):
        if to is not None:  # so that the next attempt knows whose files are in the folder
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
                raise _not_here(id, where, str(error)) from None
            unreachable, pinned, chosen = str(error), id.at(folder.name), DataFiles((), id.inside)
        if unreachable and not id.is_pinned and os.environ.get("RANK", "0") == "0":
            say(f"{id}: {HUBS[id.hub]} was not asked ({unreachable}); the copy of {pinned.revision} is used")
        return Fetched(pinned, folder, folder / chosen.path if chosen.path else folder)


def downloaded(id: HubId) -> Path | None:
    """Return the folder of a full model of a hub without a request to the hub; None if it is not on this machine."""
    try:
        client = hub_client(id, "model")
    except TesseraError:  # the library of that hub is not installed
        return None
    folder = _usable_copy(client, id, Wanted())
    return None if folder is None else folder / id.inside


def _usable_copy(client: HubClient, id: HubId, wanted: Wanted) -> Path | None:
    """Return the folder of a model that some program has downloaded, if no file of weights is missing in it."""
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


def _not_here(id: HubId, where: str, why: str) -> TesseraError:
    data, key = (" --data", "data.train") if id.kind == "dataset" else ("", "model.path")
    path = f"there is no folder {id.name} here; " if id.looks_like_path else ""
    return TesseraError(
        f"{path}{id} is not on this machine, and {HUBS[id.hub]} cannot be asked: {why}",
        where=where,
        nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
        fix=f"on a machine with a network: tessera download {replace(id, inside='')}{data} --to FOLDER; copy that "
        f"folder here, and give {key}=FOLDER",
        code="hub.not-reachable",
    )


def _check_target(to: Path, id: HubId) -> None:
    """Refuse a folder with other content: files of two models in one folder are neither."""
    if to.exists() and not to.is_dir():
        raise TesseraError(f"{to} is a file", where="--to", fix="name a folder", code="output.not-a-folder")
    if not to.is_dir() or all(entry.name == NOTES for entry in to.iterdir()):
        return
    other = _read_note(to / NOTES / "download.json").get("name")
    if other != id.name:
        raise TesseraError(
            f"{to} holds {'something else' if other is None else other}",
            where="--to",
            fix="name an empty folder",
            code="output.folder-not-empty",
        )


# ---------------------------------------------------------------------------------------------- lists of files


def _list_files(client: HubClient, id: HubId) -> tuple[Listing, str]:
    """Return the files of a repository, and the reason if the hub was not reached and the stored list is used.

    The list of a commit is requested once. Raise `Unreachable` off line, and for an answer that no hub gives.
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
        if not sound or re.fullmatch(r"\w[\w.\-]{0,127}", fresh.commit) is None:  # it becomes the name of a folder
            raise Unreachable(f"its answer is not one of a hub (commit {fresh.commit!r:.80})")
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
    """Return a name that the ranks of one job on this machine share; None for a process alone."""
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
    """Let one process at a time work on a download."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(note.with_suffix(".lock")))
        except OSError as error:
            raise TesseraError(
                f"nothing can be downloaded to {note.parent.parent}: {error.strerror}",
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
        for file in files:  # the library would write through a link that the user has made
            check_inside(to / file.name, to)
    for file in missing:
        if folder is not None and (folder / file.name).is_file():
            _remove(folder / file.name, folder)  # torn or changed: the library would take it for complete
    if missing:
        say(f"{id}: {len(missing)} files, {human_bytes(sum(file.size for file in missing))}, to {to or client.cache}")
    try:
        folder = client.fetch(id, commit, [file.name for file in files], to)
    except Unreachable as error:
        raise BrokenDownload(
            f"the download of {id} broke off: {error}",
            where=where,
            fix="run the command again: it goes on where it stopped",
            code="hub.download-broke-off",
        ) from None
    for file in files:
        _verify(folder, file, id.at(commit))
    if missing:
        say(f"{id.at(commit)}: downloaded and verified")
    return folder


def _is_there(folder: Path, file: RemoteFile) -> bool:
    """Return whether a folder has a file in its full size."""
    try:
        return (folder / file.name).stat().st_size == file.size
    except OSError:
        return False


def _verify(folder: Path, file: RemoteFile, id: HubId) -> None:
    """Raise if a file differs from the hub's list. It is removed, so that the next attempt downloads it again."""
    path, problem = folder / file.name, None
    if not _is_there(folder, file):
        problem = f"has {path.stat().st_size if path.is_file() else 0} bytes instead of {file.size}"
    elif file.sha256 is not None and _digest(path, hashlib.sha256()) != file.sha256:
        problem = f"has another sha256 than {file.sha256}"
    elif file.sha256 is None and file.git_sha1 is not None:
        begun = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
        problem = None if _digest(path, begun) == file.git_sha1 else "has another hash than the hub lists"
    if problem is not None:
        _remove(path, folder)
        raise BrokenDownload(
            f"{file.name} {problem}: the download was damaged, and it is removed",
            where=str(id),
            fix="run the command again: the other files are kept",
            code="hub.bytes-differ",
        )


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, lambda: digest).hexdigest())


def _remove(path: Path, folder: Path) -> None:
    """Remove a file, and the file of the cache that it is a link to. A file elsewhere is left alone."""
    for place in (path,) if leads_out(path, folder) else (path.resolve(), path):
        place.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- streamed files


@dataclass(frozen=True)
class RemoteShards:
    """Hold the files of records of a data set at a commit, sorted by name."""

    id: HubId  # with the commit
    files: tuple[RemoteFile, ...]


def remote_shards(id: HubId, where: str) -> RemoteShards:
    """Return the files of the training split of a data set. None of them is downloaded."""
    client = hub_client(id, where)
    with _one_at_a_time(_note_file(client, id), id):
        try:
            listing, _ = _list_files(client, id)
        except Unreachable as error:
            raise TesseraError(
                f"{id} cannot be listed, and {HUBS[id.hub]} cannot be asked: {error}",
                where=where,
                fix="a run that streams needs its hub, at least for the first time; data.stream=false reads a copy of "
                "the full set, which `tessera download` makes",
                code="hub.not-reachable",
            ) from None
    names = set(data_files([file.name for file in listing.files], id, "train").files)
    media = sorted(name for name in names if suffix_of(name) not in RECORD_SUFFIXES)
    if media:
        raise TesseraError(
            f"{id} has media in files of their own ({few_names(media, 3)}), which cannot be streamed",
            where=where,
            fix="data.stream=false downloads them before the run; Parquet and tar files have their media inside",
            code="hub.media-not-streamable",
        )
    files = sorted((file for file in listing.files if file.name in names), key=lambda file: file.name)
    return RemoteShards(id.at(listing.commit), tuple(files))


def _stream_folder(client: HubClient, id: HubId) -> Path:
    return client.cache / NOTES / "stream" / f"{id.hub}--{id.name.replace('/', '--')}" / str(id.revision)


@contextmanager
def held_shard(id: HubId, file: RemoteFile, where: str) -> Iterator[None]:
    """Protect a file of a data set from `trim` inside the block, also if it is downloaded there."""
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written: nothing is removed from it either
            path = _stream_folder(hub_client(id, where), id) / file.name
            stack.enter_context(shared(path.with_name(path.name + _HELD)))
        yield


def fetch_shard(
    id: HubId, file: RemoteFile, where: str, waits: Sequence[float] = _RETRY_AFTER_S, keep_bytes: int | None = None
) -> Path:
    """Return a file of a data set on this machine, downloaded and verified now or before.

    `id`: with the commit. `keep_bytes`: when a file is downloaded, the oldest others are removed beyond that size. A
    download that breaks off is tried again some times: a run of days should survive that. A refusal is final.
    """
    client = hub_client(id, where)
    folder = _stream_folder(client, id)
    path = folder / file.name
    with _one_at_a_time(path.with_name(path.name + ".part"), id):
        copy = client.cached(id)
        for place in (folder, *([] if copy is None else [copy])):
            if _is_there(place, file):
                return place / file.name
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
                say(f"{error.what}; it is tried again in {wait:g} s")
                time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def trim(cache: Path, limit: int) -> list[Path]:
    """Remove streamed files, the one that was read longest ago first, until at most `limit` bytes are left. A file that
    a process reads stays. Return the removed files."""
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
