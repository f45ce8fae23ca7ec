"""Download a model or a data set from a hub, once on every machine, pinned to a commit and verified.

Everything is kept in the cache of the hub's own library. Beside it lies a note for each download: which commit and
which files it was. With it nothing has to be asked again: off line, by the other ranks of a job, or for a commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tessera.config.hub_ids import HUBS, HubId
from tessera.errors import TesseraError
from tessera.hub.files import DataFiles, Split, data_files, model_files
from tessera.hub.progress import report_progress, say
from tessera.runtime.files import check_inside, leads_out, replace_file
from tessera.runtime.locks import locked
from tessera.runtime.progress import human_bytes
from tessera.weights.layouts import nearest_folder

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
NOTES = ".tessera"
_RESERVE_BYTES = 1 << 30  # that stay free on a disk


@dataclass(frozen=True)
class RemoteFile:
    """Describe a file on a hub."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None  # of a file that is no large one: git hashes its size, too


@dataclass(frozen=True)
class Listing:
    """Hold what a repository has at a revision."""

    commit: str
    files: tuple[RemoteFile, ...]


class HubClient(Protocol):
    """Declare what a hub's own library is asked for. Every error of it is a `TesseraError` or an `Unreachable`."""

    @property
    def cache(self) -> Path:
        """Return the folder that the library keeps downloads in."""
        ...

    def listing(self, id: HubId) -> Listing: ...

    def fetch(self, id: HubId, listing: Listing, names: Sequence[str], to: Path | None) -> Path:
        """Download files, going on with those that were begun, and return the folder that they lie in."""
        ...

    def downloading_to(self, id: HubId, to: Path | None) -> Path:
        """Return the folder that grows while files are downloaded."""
        ...

    def kept(self, id: HubId) -> tuple[Path, str] | None:
        """Return a folder that was downloaded by other programs, and its commit; None: there is none."""
        ...


class Unreachable(Exception):
    """Report that a hub did not answer; the reason is its text."""


class BrokenDownload(TesseraError):
    """Report a download that broke off or came damaged: asked for again, it may succeed."""


@dataclass(frozen=True)
class Wanted:
    """Say which files of a repository are needed."""

    weights: bool = True
    include: tuple[str, ...] = ()
    split: Split = "train"

    def of(self, id: HubId, names: Sequence[str]) -> DataFiles:
        if id.kind == "dataset":
            return data_files(names, id, self.split, self.include)
        return DataFiles(tuple(model_files(names, id, weights=self.weights, include=self.include)), id.inside)


@dataclass(frozen=True)
class Fetched:
    """Name what was downloaded, and where it lies."""

    id: HubId  # with the commit
    folder: Path  # of the repository
    path: Path  # what the id names in it: the folder, one below, a file, or a pattern of files
    files: tuple[str, ...]


def fetch(id: HubId, where: str, *, to: Path | None = None, wanted: Wanted | None = None) -> Fetched:
    """Return where a model or data set of a hub lies on this machine. It is downloaded if it is not there.

    Of several processes one downloads and the others wait for it. Ranks of one job are given the same commit.
    """
    wanted = wanted or Wanted()
    client = hub_client(id, where)
    if to is not None:
        _check_target(to, id)
    note = note_file(client.cache, id, wanted) if to is None else to / NOTES / "download.json"
    with one_at_a_time(note, id):
        known = None if to is not None else known_download(note, id)
        if known is not None:
            return known
        try:
            if _is_offline():
                raise Unreachable(f"{offline_variable()} is set")
            listing = sensible(client.listing(id))
        except Unreachable as error:
            return _without_network(client, note, id, to, wanted, where, str(error))
        chosen = wanted.of(id, [file.name for file in listing.files])
        if to is not None:  # so that a download that breaks off is known to be one
            replace_file(note, json.dumps({"name": id.name}).encode())
        verified = _verified(note, id, listing)
        fetched = download_files(client, id, listing, chosen, verified, to, where)
        for file in (note, *([note_file(client.cache, fetched.id, wanted)] if to is None else [])):
            write_note(file, fetched, listing)
        return fetched


def downloaded(id: HubId) -> Path | None:
    """Return where a whole model of a hub lies on this machine, without asking the hub; None: it does not."""
    try:
        client = hub_client(id, "model")
    except TesseraError:  # the library of that hub is not installed
        return None
    found = _read_note(note_file(client.cache, id, Wanted()), id)
    if found is not None:
        return found[0].path
    kept = client.kept(id)
    return kept[0] / id.inside if kept is not None and holds_weights(kept[0]) else None


def sensible(listing: Listing) -> Listing:
    """Return a listing that can be one; a server may say anything, and the commit becomes the name of a folder."""
    if re.fullmatch(r"\w[\w.\-]{0,127}", listing.commit) is None:
        raise Unreachable(f"its answer is not one of a hub (commit {listing.commit!r:.80})")
    for file in listing.files:
        if not isinstance(file.name, str) or not 0 <= file.size < 1 << 60:
            raise Unreachable(f"its answer is not one of a hub (file {file.name!r:.80} of {file.size!r:.20} bytes)")
    return listing


def hub_client(id: HubId, where: str) -> HubClient:
    # Here and not above: both libraries are optional, and slow to import.
    if id.hub == "ms":
        from tessera.hub.modelscope import ModelScope

        return ModelScope(where)
    from tessera.hub.huggingface import HuggingFace

    return HuggingFace(where)


def _is_offline() -> bool:
    return offline_variable() is not None


def offline_variable() -> str | None:
    yes = ("1", "on", "yes", "true")
    return next((name for name in OFFLINE_VARIABLES if os.environ.get(name, "").lower() in yes), None)


# ---------------------------------------------------------------------------------------------- download


def download_files(
    client: HubClient,
    id: HubId,
    listing: Listing,
    chosen: DataFiles,
    verified: frozenset[str],
    to: Path | None,
    where: str,
) -> Fetched:
    pinned, names = id.at(listing.commit), set(chosen.files)
    remote = [file for file in listing.files if file.name in names]
    place = client.downloading_to(id, to)
    if to is not None:
        for file in remote:  # a link of the user's own: what it leads to would be written or removed
            check_inside(to / file.name, to)
    missing = _missing(client, pinned, remote, to)
    needed = sum(file.size for file in missing)
    if missing:
        _check_space(place, needed, id)
        say(f"{id}: {len(missing)} files, {human_bytes(needed)}, to {to or client.cache}")
    try:
        with report_progress(place, needed, str(id)):
            folder = client.fetch(pinned if to is not None else id, listing, chosen.files, to)
    except Unreachable as error:
        raise BrokenDownload(
            f"the download of {id} broke off: {error}",
            where=where,
            fix="run the command again: it goes on where it stopped",
        ) from None
    verify(folder, [file for file in remote if file.name not in verified], pinned)
    if missing:
        say(f"{pinned}: downloaded and verified")
    return Fetched(pinned, folder, folder / chosen.path if chosen.path else folder, tuple(chosen.files))


def _missing(client: HubClient, pinned: HubId, remote: Sequence[RemoteFile], to: Path | None) -> list[RemoteFile]:
    """Return the files that are not here in their full size; what is left of others is removed."""
    folder = to
    if to is None:
        kept = client.kept(pinned)
        folder = None if kept is None else kept[0]
    missing = [file for file in remote if folder is None or not _is_there(folder, file.name, file.size)]
    for file in missing:
        if folder is not None and (folder / file.name).is_file():
            _remove(folder / file.name, folder)  # torn, or changed: the library would take it for the one it fetched
    return missing


def _is_there(folder: Path, name: str, size: int) -> bool:
    try:
        return (folder / name).stat().st_size == size
    except OSError:
        return False


def verify(folder: Path, files: Sequence[RemoteFile], id: HubId) -> None:
    """Raise if a file is not the one that the hub lists. It is removed, so that the next attempt fetches it again."""
    for file in files:
        path = folder / file.name
        problem = None
        if not path.is_file() or path.stat().st_size != file.size:
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
            )


def _remove(path: Path, folder: Path) -> None:
    """Remove a file, and what it is a link to in the cache; what lies elsewhere is left alone."""
    for place in (path,) if leads_out(path, folder) else (path.resolve(), path):
        place.unlink(missing_ok=True)


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return str(digest.hexdigest())


def _check_space(place: Path, needed: int, id: HubId) -> None:
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed + _RESERVE_BYTES > free:
        raise TesseraError(
            f"{id} takes {human_bytes(needed)}, and {human_bytes(free)} are free",
            where=str(place),
            fix="make room, or name another folder: HF_HUB_CACHE, MODELSCOPE_CACHE, or tessera download --to FOLDER",
        )


def _check_target(to: Path, id: HubId) -> None:
    """Refuse a folder with something else in it: files of two models in one folder are neither."""
    if to.exists() and not to.is_dir():
        raise TesseraError(f"{to} is a file", where="--to", fix="name a folder")
    if not to.is_dir() or all(entry.name == NOTES for entry in to.iterdir()):
        return
    try:
        other = json.loads((to / NOTES / "download.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        other = None
    if other != id.name:
        raise TesseraError(
            f"{to} holds {'something else' if other is None else other}", where="--to", fix="name an empty folder"
        )


# ---------------------------------------------------------------------------------------------- notes


def note_file(cache: Path, id: HubId, wanted: Wanted) -> Path:
    return cache / NOTES / f"{hashlib.sha256(f'{id} {wanted}'.encode()).hexdigest()[:32]}.json"


@contextmanager
def one_at_a_time(note: Path, id: HubId) -> Iterator[None]:
    """Let one process of those that share a note work on it at a time."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(note.with_suffix(".lock")))
        except OSError as error:
            raise TesseraError(
                f"nothing can be downloaded to {note.parent.parent}: {error.strerror}",
                where=str(id),
                fix="name a folder that can be written: HF_HUB_CACHE, MODELSCOPE_CACHE, or tessera download --to "
                "FOLDER",
            ) from None
        yield


def job_of_ranks() -> str | None:
    """Return what the ranks of one job on this machine have in common; None for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) == 1:
        return None
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}:{os.getppid()}"


def _read_note(note: Path, id: HubId) -> tuple[Fetched, dict[str, Any]] | None:
    """Return what a note says, if all files are still there."""
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        folder, sizes = Path(said["folder"]), dict(said["files"])
        fetched = Fetched(id.at(str(said["commit"])), folder, Path(said["path"]), tuple(sizes))
        whole = said["name"] == id.name and all(_is_there(folder, name, int(size)) for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (fetched, said) if whole else None


def known_download(note: Path, id: HubId) -> Fetched | None:
    """Return what needs no question to the hub: a commit that is here, or what another rank of this job has found."""
    found = _read_note(note, id)
    if found is None or not (id.is_pinned or (job_of_ranks() is not None and found[1].get("job") == job_of_ranks())):
        return None
    return found[0]


def _verified(note: Path, id: HubId, listing: Listing) -> frozenset[str]:
    """Return the files of this commit that an earlier download has verified, and that are there."""
    found = _read_note(note, id)
    same = found is not None and found[0].id.revision == listing.commit
    return frozenset(found[0].files) if found is not None and same else frozenset()


def write_note(note: Path, fetched: Fetched, listing: Listing) -> None:
    sizes = {file.name: file.size for file in listing.files if file.name in set(fetched.files)}
    said = {
        "name": fetched.id.name,
        "id": str(fetched.id),
        "commit": fetched.id.revision,
        "folder": str(fetched.folder),
        "path": str(fetched.path),
        "files": sizes,
        "job": job_of_ranks(),
    }
    replace_file(note, json.dumps(said, indent=1).encode())


def _without_network(
    client: HubClient, note: Path, id: HubId, to: Path | None, wanted: Wanted, where: str, why: str
) -> Fetched:
    """Return what was downloaded before, or raise what to do without a network."""
    found = None if to is not None else _read_note(note, id)
    if found is not None:
        if not id.is_pinned:
            _say_once(f"{id}: {HUBS[id.hub]} was not asked ({why}); the copy of {found[0].id.revision} is used")
        return found[0]
    kept = client.kept(id) if to is None and id.kind == "model" and not wanted.include else None
    if kept is not None and (not wanted.weights or holds_weights(kept[0])):
        _say_once(f"{id}: {HUBS[id.hub]} was not asked ({why}); the copy in {kept[0]} is used")
        return Fetched(id.at(kept[1]), kept[0], kept[0] / id.inside, ())
    data = " --data" if id.kind == "dataset" else ""
    key = "data.train=FOLDER" if id.kind == "dataset" else "model.path=FOLDER"
    path = f"there is no folder {id.name} here; " if id.looks_like_path else ""
    raise TesseraError(
        f"{path}{id} is not on this machine, and {HUBS[id.hub]} cannot be asked: {why}",
        where=where,
        nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
        fix=f"on a machine with a network: tessera download {replace(id, inside='')}{data} --to FOLDER; copy that "
        f"folder here, and give {key}",
    )


def _say_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the other ranks find the same
        say(text)


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has all weights that its indexes name, and at least one file of them."""
    found = list(folder.rglob("*.safetensors"))
    for index in folder.rglob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            found += [index]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if not all((index.parent / str(name)).is_file() for name in names):
            return False
    return bool(found)
