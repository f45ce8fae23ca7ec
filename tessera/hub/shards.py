"""Files of a data set on a hub, one by one: listed at a commit, downloaded when a run reaches them, removed by age.

They are in a folder of their own beside the cache of the hub's library, so that no file of another program is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tessera.config.hub_ids import HUBS, HubId
from tessera.errors import TesseraError, few_names
from tessera.hub.download import (
    NOTES,
    BrokenDownload,
    HubClient,
    Listing,
    RemoteFile,
    Unreachable,
    download_files,
    hub_client,
    is_there,
    job_of_ranks,
    list_files,
    offline_variable,
    one_at_a_time,
    say,
)
from tessera.hub.files import RECORD_SUFFIXES, data_files, suffix_of
from tessera.runtime.files import replace_file
from tessera.runtime.locks import alone, shared

_RETRY_AFTER_S = (1.0, 5.0, 30.0, 120.0)
_HELD = ".held"  # suffix of the lock that a process shares while it reads a file


@dataclass(frozen=True)
class RemoteShards:
    """Hold the files of records of a data set at a commit, sorted by name."""

    id: HubId  # with the commit
    files: tuple[RemoteFile, ...]


def remote_shards(id: HubId, where: str) -> RemoteShards:
    """Return the files of the training split of a data set. None of them is downloaded.

    The list of a commit is requested once and stored; off line the stored list serves.
    """
    client = hub_client(id, where)
    note = _list_file(client, id)
    with one_at_a_time(note, id):
        stored = _read_list(note, id)
        if stored is not None and (id.is_pinned or stored[1] == job_of_ranks() is not None):
            return stored[0]
        try:
            listing = list_files(client, id)
        except Unreachable as error:
            if stored is not None:
                return stored[0]
            raise TesseraError(
                f"{id} cannot be listed, and {HUBS[id.hub]} cannot be asked: {error}",
                where=where,
                fix="a run that streams needs its hub, at least for the first time; data.stream=false reads a copy of "
                "the full set, which `tessera download` makes",
                code="hub.not-reachable",
            ) from None
        shards = RemoteShards(id.at(listing.commit), _records(id, listing, where))
        record = {"commit": listing.commit, "job": job_of_ranks(), "files": [asdict(file) for file in shards.files]}
        for file in {note, _list_file(client, shards.id)}:
            replace_file(file, json.dumps(record).encode())
        return shards


@contextmanager
def held_shard(id: HubId, file: RemoteFile, where: str) -> Iterator[None]:
    """Protect a file of a data set from `trim` inside the block, also if it is downloaded there."""
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written: nothing is removed from it either
            path = _folder(hub_client(id, where), id) / file.name
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
    folder = _folder(client, id)
    path = folder / file.name
    with one_at_a_time(path.with_name(path.name + ".part"), id):
        copy = client.cached(id)
        for place in (folder, *([] if copy is None else [copy[0]])):
            if is_there(place, file):
                return place / file.name
        for wait in (*waits, None):
            try:
                if (variable := offline_variable()) is not None:
                    what = f"{file.name} of {id} is not on this machine, and {variable} is set"
                    raise TesseraError(
                        what,
                        where=where,
                        fix="run it once with a network, or unset the variable",
                        code="hub.not-reachable",
                    )
                incoming = folder / "incoming"
                download_files(client, id, str(id.revision), [file], incoming, where)
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


def _folder(client: HubClient, id: HubId) -> Path:
    return client.cache / NOTES / "stream" / f"{id.hub}--{id.name.replace('/', '--')}" / str(id.revision)


def _records(id: HubId, listing: Listing, where: str) -> tuple[RemoteFile, ...]:
    """Return the files of records; raise if the data set has images or videos beside them."""
    names = set(data_files([file.name for file in listing.files], id, "train").files)
    media = sorted(name for name in names if suffix_of(name) not in RECORD_SUFFIXES)
    if media:
        raise TesseraError(
            f"{id} has media in files of their own ({few_names(media, 3)}), which cannot be streamed",
            where=where,
            fix="data.stream=false downloads them before the run; Parquet and tar files have their media inside",
            code="hub.media-not-streamable",
        )
    return tuple(sorted((file for file in listing.files if file.name in names), key=lambda file: file.name))


def _list_file(client: HubClient, id: HubId) -> Path:
    return client.cache / NOTES / f"shards-{hashlib.sha256(str(id).encode()).hexdigest()[:32]}.json"


def _read_list(note: Path, id: HubId) -> tuple[RemoteShards, str | None] | None:
    try:
        record = json.loads(note.read_text(encoding="utf-8"))
        files = tuple(RemoteFile(**file) for file in record["files"])
        return RemoteShards(id.at(str(record["commit"])), files), record["job"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
