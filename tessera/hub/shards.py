"""Files of a data set on a hub, one by one: listed at a commit, and fetched when a run reaches them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
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
    job_of_ranks,
    known_download,
    offline_variable,
    one_at_a_time,
    sensible,
    write_note,
)
from tessera.hub.files import RECORD_SUFFIXES, DataFiles, data_files, suffix_of
from tessera.hub.progress import say
from tessera.hub.shard_cache import mark_of, note_fetched, note_of, trim
from tessera.runtime.files import replace_file
from tessera.runtime.locks import shared

_AGAIN_S = (1.0, 5.0, 30.0, 120.0)  # a hub that does not answer is asked again after so long


@dataclass(frozen=True)
class RemoteShards:
    """Hold the files of records of a data set, in the order of their names, at a commit."""

    id: HubId  # with the commit
    files: tuple[RemoteFile, ...]


def remote_shards(id: HubId, where: str) -> RemoteShards:
    """Return the files of the training split of a data set. Nothing of them is downloaded.

    The list is kept: for a commit the hub is asked once, and off line what was listed before serves.
    """
    client = hub_client(id, where)
    note = _list_file(client, id)
    with one_at_a_time(note, id):
        kept = _read_list(note, id)
        if kept is not None and (id.is_pinned or (job_of_ranks() is not None and kept[1] == job_of_ranks())):
            return kept[0]
        try:
            if (variable := offline_variable()) is not None:
                raise Unreachable(f"{variable} is set")
            listing = sensible(client.listing(id))
        except Unreachable as error:
            if kept is not None:
                return kept[0]
            raise TesseraError(
                f"{id} cannot be listed, and {HUBS[id.hub]} cannot be asked: {error}",
                where=where,
                fix="a run that streams needs its hub, at least for the first time; data.stream=false reads a copy of "
                "the whole set, which `tessera download` makes",
            ) from None
        found = RemoteShards(id.at(listing.commit), _records(id, listing, where))
        for file in {note, _list_file(client, found.id)}:
            said = {"commit": listing.commit, "job": job_of_ranks(), "files": [asdict(one) for one in found.files]}
            replace_file(file, json.dumps(said).encode())
        return found


@contextmanager
def held_shard(id: HubId, file: RemoteFile, where: str) -> Iterator[None]:
    """Keep a file of a data set from being removed for the time of the block, if it is there or once it is fetched."""
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written: nobody removes anything there either
            stack.enter_context(shared(mark_of(hub_client(id, where).cache, id, file)))
        yield


def fetch_shard(
    id: HubId, file: RemoteFile, where: str, waits: Sequence[float] = _AGAIN_S, keep_bytes: int | None = None
) -> Path:
    """Return where a file of a data set lies on this machine, fetched and verified now or before.

    `id`: with the commit. `keep_bytes`: of more fetched files than that, the oldest that nobody reads are removed when
    another one is fetched; see `held_shard`. A hub that does not answer is asked again some times: a run of days should
    survive that. One that refuses is not: a file that is gone, or a token that is no longer good, stays so.
    """
    client = hub_client(id, where)
    pinned = replace(id, inside=file.name)
    note = note_of(client.cache, pinned)
    with one_at_a_time(note, id):
        known = known_download(note, pinned)
        if known is not None:
            return known.path
        listing = Listing(str(id.revision), (file,))
        chosen = DataFiles((file.name,), file.name)
        for wait in (*waits, None):
            try:
                if (variable := offline_variable()) is not None:
                    what = f"{file.name} of {id} is not on this machine, and {variable} is set"
                    raise TesseraError(what, where=where, fix="run it once with a network, or unset the variable")
                began = time.time()
                fetched = download_files(client, pinned, listing, chosen, frozenset(), None, where)
                write_note(note, fetched, listing)
                mark = mark_of(client.cache, id, file)
                if mark.is_file():  # held by whoever reads the file
                    note_fetched(mark, fetched.path, began)
                if keep_bytes is not None:
                    trim(client.cache, keep_bytes)
                return fetched.path
            except BrokenDownload as error:
                if wait is None:
                    raise
                say(f"{error.what}; it is tried again in {wait:g} s")
                time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _records(id: HubId, listing: Listing, where: str) -> tuple[RemoteFile, ...]:
    """Return the files of records; raise where images or videos lie beside them."""
    names = set(data_files([file.name for file in listing.files], id, "train").files)
    beside = sorted(name for name in names if suffix_of(name) not in RECORD_SUFFIXES)
    if beside:
        raise TesseraError(
            f"{id} has media in files of their own ({few_names(beside, 3)}), which are not fetched one by one",
            where=where,
            fix="data.stream=false downloads them before the run; Parquet and tar files have their media inside",
        )
    return tuple(sorted((file for file in listing.files if file.name in names), key=lambda file: file.name))


def _list_file(client: HubClient, id: HubId) -> Path:
    return client.cache / NOTES / f"shards-{hashlib.sha256(str(id).encode()).hexdigest()[:32]}.json"


def _read_list(note: Path, id: HubId) -> tuple[RemoteShards, str | None] | None:
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        files = tuple(RemoteFile(**one) for one in said["files"])
        sensible(Listing(str(said["commit"]), files))
        return RemoteShards(id.at(str(said["commit"])), files), said["job"]
    except (OSError, ValueError, KeyError, TypeError, Unreachable):
        return None
