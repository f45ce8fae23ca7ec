"""Download a model or a data set from a hub, before a run or for a machine without a network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tessera.config.hub_ids import HubId, RepoKind, find_hub_id, parse_hub_id
from tessera.errors import TesseraError
from tessera.hub.download import Wanted, fetch

WHERE = "tessera download"


def download(
    id: str,
    to: str | Path | None = None,
    *,
    revision: str | None = None,
    include: Sequence[str] = (),
    data: bool = False,
) -> Path:
    """Download a model, or a data set if `data` is True, and return its folder.

    `id`: hf://org/name or ms://org/name, optionally with @revision. org/name alone means Hugging Face. `to`: a folder
    to write; None: the cache of the hub's library, which recipes with the same id use. `include`: patterns of files,
    such as "*.json"; the default is all files that training reads, and all files of a data set with `to`.

    Weights are downloaded as safetensors only, and code is not downloaded. An interrupted download is continued. Every
    file is compared with the hash on the hub.
    """
    named = named_repository(id, "dataset" if data else "model", revision, WHERE)
    whole_set = named.kind == "dataset" and not named.inside and not include
    if not whole_set or to is not None:
        wanted = Wanted(include=("*",) if whole_set else tuple(include))
        return fetch(named, WHERE, to=None if to is None else Path(to), wanted=wanted).folder
    fetched = fetch(named, WHERE, wanted=Wanted(split="train"))
    with suppress(TesseraError):  # many data sets have no held-out split
        fetch(fetched.id, WHERE, wanted=Wanted(split="eval"))
    return fetched.folder


def named_repository(id: str, kind: RepoKind, revision: str | None, where: str) -> HubId:
    """Return the hub id that a command names. `org/name` alone means Hugging Face, even if such a local path exists."""
    hub_id = find_hub_id(id, kind, where) or parse_hub_id(f"hf://{id}", kind, where)
    if revision is None:
        return hub_id
    if hub_id.revision not in (None, revision):
        raise TesseraError(
            f"{id} contains another revision than --revision {revision}",
            where=where,
            fix="leave one of them out",
            code="hub.two-revisions",
        )
    return hub_id.at(revision)
