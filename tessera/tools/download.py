"""Download a model or a data set from a hub ahead of a run, or for a machine without a network."""

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
    """Download a model, or with `data` a data set, and return the folder that it lies in.

    `id`: hf://org/name or ms://org/name, also with @revision; org/name alone is one of Hugging Face. `to`: a folder to
    write; None: the cache of the hub's library, where a recipe that names the same id finds it. `include`: patterns of
    files, such as "*.json"; default: all that a run reads, and of a data set all files that can be read.

    Weights come as safetensors alone, and no code. A download that broke off goes on; every file is compared with the
    hash that the hub lists.
    """
    named = named_repository(id, "dataset" if data else "model", revision, WHERE)
    whole_set = named.kind == "dataset" and not named.inside and not include
    if not whole_set or to is not None:
        wanted = Wanted(include=("*",) if whole_set else tuple(include))
        return fetch(named, WHERE, to=None if to is None else Path(to), wanted=wanted).folder
    fetched = fetch(named, WHERE, wanted=Wanted(split="train"))
    with suppress(TesseraError):  # many sets have no held-out files
        fetch(fetched.id, WHERE, wanted=Wanted(split="eval"))
    return fetched.folder


def named_repository(id: str, kind: RepoKind, revision: str | None, where: str) -> HubId:
    """Return what a command names on a hub; `org/name` alone is one of Hugging Face, whatever lies here."""
    hub_id = find_hub_id(id, kind, where) or parse_hub_id(f"hf://{id}", kind, where)
    if revision is None:
        return hub_id
    if hub_id.revision not in (None, revision):
        raise TesseraError(
            f"{id} names another revision than {revision!r}",
            where=where,
            fix="leave one of them out",
            code="hub.two-revisions",
        )
    return hub_id.at(revision)
