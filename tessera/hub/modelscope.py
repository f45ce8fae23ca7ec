"""Ask ModelScope by its own library, and tell its errors in our words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.core.errors import TesseraError, first_line
from tessera.core.hub_ids import HubId
from tessera.hub.download import Listing, RemoteFile, Unreachable
from tessera.hub.huggingface import escaped

_BRANCH = "master"


class ModelScope:
    """Fetch from ModelScope, or from the server that MODELSCOPE_ENDPOINT names."""

    def __init__(self, where: str) -> None:
        try:
            from modelscope_hub import HubApi
        except ModuleNotFoundError as error:
            raise TesseraError(
                "models and data sets of ModelScope are fetched by modelscope 1.38 or later, which is not installed "
                f"(no module {error.name})",
                where=where,
                fix="pip install -U modelscope",
            ) from None
        self.where = where
        self._api: Any = HubApi(endpoint=os.environ.get("MODELSCOPE_ENDPOINT") or None)

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser().absolute()

    def _folder(self, id: HubId) -> Path:
        """Return a folder for each commit: that of the library is one for each name, in which files are replaced."""
        return self.cache / "tessera" / f"{id.kind}s" / id.name / str(id.revision)

    def listing(self, id: HubId) -> Listing:
        revision = id.revision or _BRANCH
        try:
            found = self._api.legacy.list_repo_files(
                repo_id=id.name, repo_type=id.kind, revision=revision, recursive=True
            )
        except Exception as error:
            raise self._explained(error, id) from None
        files = [one for one in found if isinstance(one, dict) and one.get("Path") and one.get("Type") != "tree"]
        if not files:
            raise TesseraError(f"ModelScope has no files of {id}", where=self.where, fix="check name and revision")
        # A file tells the commit that changed it last; the newest of them is that of all.
        newest = max(files, key=lambda one: int(one.get("CommittedDate") or 0))
        commit = revision if id.is_pinned else str(newest.get("Revision") or revision)
        listed = [RemoteFile(str(one["Path"]), int(one.get("Size") or 0), one.get("Sha256") or None) for one in files]
        return Listing(commit, tuple(listed))

    def fetch(self, id: HubId, listing: Listing, names: Sequence[str], to: Path | None) -> Path:
        folder = to or self._folder(id.at(listing.commit))
        try:
            patterns = [escaped(name) for name in names]
            self._api.download_repo(
                id.name, id.kind, revision=listing.commit, local_dir=str(folder), allow_patterns=patterns
            )
        except Exception as error:
            raise self._explained(error, id) from None
        return folder

    def downloading_to(self, id: HubId, to: Path | None) -> Path:
        return to or self.cache / "tessera" / f"{id.kind}s" / id.name

    def kept(self, id: HubId) -> tuple[Path, str] | None:
        folder = self._folder(id)
        return (folder, str(id.revision)) if id.is_pinned and folder.is_dir() else None

    def _explained(self, error: Exception, id: HubId) -> Exception:
        """Return what to raise: a mistake in the name, or that nobody answers."""
        from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

        said = first_line(error)[:300]
        if isinstance(error, NotExistError):
            what, fix = f"ModelScope has no {id}, or it is private", "check name and revision, or `modelscope login`"
        elif isinstance(error, (AuthenticationError, PermissionDeniedError)):
            what, fix = f"ModelScope does not give {id}: {said}", "`modelscope login`, or set MODELSCOPE_API_TOKEN"
        else:
            return Unreachable(said) if isinstance(error, (HubError, OSError, ValueError, LookupError)) else error
        return TesseraError(what, where=self.where, fix=fix)
