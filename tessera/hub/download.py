"""Download a model or a data set from a hub, once on every machine, pinned to a commit and verified.

The libraries of the hubs download, resume and cache. Beside their cache this module keeps a note for each download:
its commit and the sizes of its files. A note answers without the hub: off line, for other ranks of a job, for a commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tessera.config.hub_ids import HUBS, HubId
from tessera.errors import TesseraError
from tessera.hub.files import DataFiles, Split, data_files, model_files
from tessera.runtime.files import check_inside, leads_out, replace_file
from tessera.runtime.locks import locked
from tessera.runtime.progress import human_bytes
from tessera.weights.layouts import nearest_folder

NOTES = ".tessera"
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def say(text: str) -> None:
    """Write a line for the user: the logger of a run is not set up while its model is downloaded."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RemoteFile:
    """Describe a file on a hub."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None  # of a small file: the hash of git, which includes the size


@dataclass(frozen=True)
class Listing:
    """Hold the commit of a revision and the files of the repository at it."""

    commit: str
    files: tuple[RemoteFile, ...]


class Unreachable(Exception):
    """Report that a hub did not answer; the reason is its text."""


class BrokenDownload(TesseraError):
    """Report a download that broke off or arrived damaged. A second attempt may succeed."""


class HubClient(Protocol):
    """Declare the calls to a hub's own library. It raises `TesseraError` or `Unreachable` and nothing else."""

    @property
    def cache(self) -> Path:
        """Return the cache folder of the library."""
        ...

    def listing(self, id: HubId) -> Listing: ...

    def fetch(self, id: HubId, commit: str, names: Sequence[str], to: Path | None) -> Path:
        """Download files, or resume their download, and return the folder of the repository."""
        ...

    def cached(self, id: HubId) -> tuple[Path, str] | None:
        """Return a folder of the library's cache and its commit. Another program may have downloaded it."""
        ...


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
    wanted = wanted or Wanted()
    client = hub_client(id, where)
    if to is not None:
        _check_target(to, id)
    note = _note_file(client.cache, id, wanted) if to is None else to / NOTES / "download.json"
    with one_at_a_time(note, id):
        noted = _read_note(note, id) if to is None else None
        if noted is not None and (id.is_pinned or noted[1] == job_of_ranks() is not None):
            return noted[0]
        try:
            listing = list_files(client, id)
        except Unreachable as error:
            return _without_network(client, noted, id, to, wanted, where, str(error))
        if noted is not None and noted[0].id.revision == listing.commit:
            return noted[0]
        chosen = wanted.of(id, [file.name for file in listing.files])
        if to is not None:  # so that the next attempt knows whose files are in the folder
            replace_file(note, json.dumps({"name": id.name}).encode())
        files = [file for file in listing.files if file.name in set(chosen.files)]
        folder = download_files(client, id, listing.commit, files, to, where)
        fetched = Fetched(id.at(listing.commit), folder, folder / chosen.path if chosen.path else folder)
        for file in {note, note if to is not None else _note_file(client.cache, fetched.id, wanted)}:
            _write_note(file, fetched, files)
        return fetched


def downloaded(id: HubId) -> Path | None:
    """Return the folder of a full model of a hub without a request to the hub; None if it is not on this machine."""
    try:
        client = hub_client(id, "model")
    except TesseraError:  # the library of that hub is not installed
        return None
    noted = _read_note(_note_file(client.cache, id, Wanted()), id)
    if noted is not None:
        return noted[0].path
    copy = client.cached(id)
    return copy[0] / id.inside if copy is not None and holds_weights(copy[0]) else None


def hub_client(id: HubId, where: str) -> HubClient:
    # Here and not above: both libraries are optional, and slow to import.
    if id.hub == "ms":
        from tessera.hub.modelscope import ModelScope

        return ModelScope(where)
    from tessera.hub.huggingface import HuggingFace

    return HuggingFace(where)


def list_files(client: HubClient, id: HubId) -> Listing:
    """Return the files of a repository. Raise `Unreachable` off line, and for an answer that no hub gives."""
    if (variable := offline_variable()) is not None:
        raise Unreachable(f"{variable} is set")
    listing = client.listing(id)
    if re.fullmatch(r"\w[\w.\-]{0,127}", listing.commit) is None:  # it becomes the name of a folder
        raise Unreachable(f"its answer is not one of a hub (commit {listing.commit!r:.80})")
    for file in listing.files:
        if not isinstance(file.name, str) or not 0 <= file.size < 1 << 60:
            raise Unreachable(f"its answer is not one of a hub (file {file.name!r:.80} of {file.size!r:.20} bytes)")
    return listing


def offline_variable() -> str | None:
    yes = ("1", "on", "yes", "true")
    return next((name for name in _OFFLINE_VARIABLES if os.environ.get(name, "").lower() in yes), None)


def download_files(
    client: HubClient, id: HubId, commit: str, files: Sequence[RemoteFile], to: Path | None, where: str
) -> Path:
    """Download files of a repository, verify them, and return its folder."""
    copy = client.cached(id.at(commit))
    folder = to or (None if copy is None else copy[0])
    missing = [file for file in files if folder is None or not is_there(folder, file)]
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


def is_there(folder: Path, file: RemoteFile) -> bool:
    """Return whether a folder has a file in its full size."""
    try:
        return (folder / file.name).stat().st_size == file.size
    except OSError:
        return False


def _verify(folder: Path, file: RemoteFile, id: HubId) -> None:
    """Raise if a file differs from the hub's list. It is removed, so that the next attempt downloads it again."""
    path, problem = folder / file.name, None
    if not is_there(folder, file):
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


def _remove(path: Path, folder: Path) -> None:
    """Remove a file, and the file of the cache that it is a link to. A file elsewhere is left alone."""
    for place in (path,) if leads_out(path, folder) else (path.resolve(), path):
        place.unlink(missing_ok=True)


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def _check_target(to: Path, id: HubId) -> None:
    """Refuse a folder with other content: files of two models in one folder are neither."""
    if to.exists() and not to.is_dir():
        raise TesseraError(f"{to} is a file", where="--to", fix="name a folder", code="output.not-a-folder")
    if not to.is_dir() or all(entry.name == NOTES for entry in to.iterdir()):
        return
    try:
        other = json.loads((to / NOTES / "download.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        other = None
    if other != id.name:
        raise TesseraError(
            f"{to} holds {'something else' if other is None else other}",
            where="--to",
            fix="name an empty folder",
            code="output.folder-not-empty",
        )


# ---------------------------------------------------------------------------------------------- notes


def _note_file(cache: Path, id: HubId, wanted: Wanted) -> Path:
    return cache / NOTES / f"{hashlib.sha256(f'{id} {wanted}'.encode()).hexdigest()[:32]}.json"


@contextmanager
def one_at_a_time(note: Path, id: HubId) -> Iterator[None]:
    """Let one process at a time work on a download."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(note.with_suffix(".lock")))
        except OSError as error:
            raise TesseraError(
                f"nothing can be downloaded to {note.parent.parent}: {error.strerror}",
                where=str(id),
                fix="name a folder that can be written: HF_HUB_CACHE, MODELSCOPE_CACHE, or tessera download --to "
                "FOLDER",
                code="hub.cache-not-writable",
            ) from None
        yield


def job_of_ranks() -> str | None:
    """Return a name that the ranks of one job on this machine share; None for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) == 1:
        return None
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}:{os.getppid()}"


def _read_note(note: Path, id: HubId) -> tuple[Fetched, str | None] | None:
    """Return the download of a note and the job that wrote it; None unless all its files are still there."""
    try:
        record = json.loads(note.read_text(encoding="utf-8"))
        folder = Path(record["folder"])
        files = [RemoteFile(str(name), int(size)) for name, size in dict(record["files"]).items()]
        if record["name"] != id.name or not all(is_there(folder, file) for file in files):
            return None
        return Fetched(id.at(str(record["commit"])), folder, Path(record["path"])), record.get("job")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_note(note: Path, fetched: Fetched, files: Sequence[RemoteFile]) -> None:
    record = {
        "name": fetched.id.name,
        "id": str(fetched.id),
        "commit": fetched.id.revision,
        "folder": str(fetched.folder),
        "path": str(fetched.path),
        "files": {file.name: file.size for file in files},
        "job": job_of_ranks(),
    }
    replace_file(note, json.dumps(record, indent=1).encode())


def _without_network(
    client: HubClient,
    noted: tuple[Fetched, str | None] | None,
    id: HubId,
    to: Path | None,
    wanted: Wanted,
    where: str,
    why: str,
) -> Fetched:
    """Return an earlier download, or raise the error that explains how to do without a network."""
    copy = client.cached(id) if to is None and id.kind == "model" and not wanted.include else None
    if noted is None and copy is not None and (not wanted.weights or holds_weights(copy[0])):
        noted = Fetched(id.at(copy[1]), copy[0], copy[0] / id.inside), None
    if noted is not None:
        if not id.is_pinned and os.environ.get("RANK", "0") == "0":
            say(f"{id}: {HUBS[id.hub]} was not asked ({why}); the copy of {noted[0].id.revision} is used")
        return noted[0]
    data = " --data" if id.kind == "dataset" else ""
    key = "data.train=FOLDER" if id.kind == "dataset" else "model.path=FOLDER"
    path = f"there is no folder {id.name} here; " if id.looks_like_path else ""
    raise TesseraError(
        f"{path}{id} is not on this machine, and {HUBS[id.hub]} cannot be asked: {why}",
        where=where,
        nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
        fix=f"on a machine with a network: tessera download {replace(id, inside='')}{data} --to FOLDER; copy that "
        f"folder here, and give {key}",
        code="hub.not-reachable",
    )


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has a file of weights, and all files that its indexes name."""
    files = list(folder.rglob("*.safetensors"))
    for index in folder.rglob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        files += [index]
        if not all((index.parent / str(name)).is_file() for name in names):
            return False
    return bool(files)
