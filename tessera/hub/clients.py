"""Call the libraries of Hugging Face and ModelScope: list a repository, download files, explain errors."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, first_line
from tessera.weights.layouts import nearest_folder

_TIMEOUT_S = 15.0
MODELSCOPE_BRANCH = "master"


@dataclass(frozen=True)
class RemoteFile:
    """Describe a file on a hub."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None  # git's hash of a small file, which also covers its size


@dataclass(frozen=True)
class Listing:
    """Hold the files of a repository at one commit."""

    commit: str
    files: tuple[RemoteFile, ...]


class Unreachable(Exception):
    """Report that a hub could not be reached. The text of the exception is the reason."""


class HuggingFace:
    """Download from Hugging Face, or from the server that HF_ENDPOINT names."""

    def __init__(self, where: str) -> None:
        try:
            import huggingface_hub.constants
            import huggingface_hub.errors
        except ModuleNotFoundError:
            raise TesseraError(
                "models and data sets of Hugging Face are downloaded by huggingface_hub, which is not installed",
                where=where,
                fix="pip install 'tessera-mm[hf]'",
                code="environment.no-huggingface-hub",
            ) from None
        self.library: Any = huggingface_hub
        self.where = where
        # Read the variables at each call: the library reads them only once, when it is imported.
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        home = os.environ.get("HF_HOME")
        self._cache = os.environ.get("HF_HUB_CACHE") or (None if home is None else os.path.join(home, "hub"))

    @property
    def cache(self) -> Path:
        return Path(self._cache or self.library.constants.HF_HUB_CACHE).expanduser().absolute()

    def listing(self, id: HubId) -> Listing:
        """Return the list of files of a repository and its commit."""
        api = self.library.HfApi(endpoint=self.endpoint)
        with self._explained(id):
            info = api.repo_info(
                id.name, repo_type=id.kind, revision=id.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
            files = []
            for file in info.siblings or []:
                size, sha256 = (file.size, None) if file.lfs is None else (file.lfs["size"], file.lfs["sha256"])
                if size is None:
                    raise ValueError(f"the hub's list of files has no size for {file.rfilename}")
                files.append(RemoteFile(file.rfilename, int(size), sha256, None if sha256 else file.blob_id))
        return Listing(str(info.sha or ""), tuple(files))

    def fetch(self, id: HubId, commit: str, names: Sequence[str], to: Path | None) -> Path:
        """Download files, or resume their download, and return the folder of the repository."""
        with self._explained(id):
            folder = self.library.snapshot_download(
                id.name,
                repo_type=id.kind,
                # With a branch, the library also stores the branch's commit in its cache, for off-line programs.
                revision=commit if to is not None else id.revision,
                endpoint=self.endpoint,
                cache_dir=str(self.cache),
                local_dir=None if to is None else str(to),
                allow_patterns=[glob.escape(name) for name in names],
            )
        if to is None and Path(folder).name != commit:
            raise Unreachable(f"the revision became {Path(folder).name} during the download")
        return Path(folder)

    def cached(self, id: HubId) -> Path | None:
        """Return the cache folder of a revision, whose name is the commit. The folder may be incomplete."""
        repository = self.cache / f"{id.kind}s--{id.name.replace('/', '--')}"
        commit = id.revision
        if not id.is_pinned:
            try:
                commit = (repository / "refs" / (id.revision or "main")).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeError):
                return None
        snapshot = repository / "snapshots" / str(commit)
        return snapshot if snapshot.is_dir() else None

    @contextmanager
    def _explained(self, id: HubId) -> Iterator[None]:
        """Raise every error of the library as `TesseraError` with a fix, or as `Unreachable`."""
        try:
            yield
        except Exception as error:  # the classes of connection errors differ between versions of the library
            raise self._explanation(error, id) from None

    def _explanation(self, error: Exception, id: HubId) -> Exception:
        errors, line = self.library.errors, first_line(error)[:300]
        page = f"{self.endpoint or 'https://huggingface.co'}/{'datasets/' if id.kind == 'dataset' else ''}{id.name}"
        kind = "data set" if id.kind == "dataset" else "model"
        path = f"there is no folder {id.name} here, and " if id.looks_like_path else ""
        login = "log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            what = f"{id} is given only to people who have accepted its terms"
            fix = f"accept them at {page}, then {login}"
            return TesseraError(what, where=self.where, fix=fix, code="hub.terms-not-accepted")
        if isinstance(error, errors.RevisionNotFoundError):
            what, fix = f"{id.name} has no revision {id.revision!r}", f"look at {page}/tree/main"
            return TesseraError(what, where=self.where, fix=fix, code="hub.no-such-revision")
        if isinstance(error, errors.RepositoryNotFoundError):
            what = f"{path}Hugging Face has no {kind} {id.name}, or it is private"
            fix = f"for a private one {login}; for a {kind} on this machine name a folder that exists"
            near = nearest_folder(Path(id.name)) if path else None
            return TesseraError(what, where=self.where, nearest=near, fix=fix, code="hub.no-such-repository")
        if isinstance(error, errors.LocalEntryNotFoundError):
            return Unreachable(first_line(error.__cause__ or error))
        if isinstance(error, errors.EntryNotFoundError):
            what = f"Hugging Face lists files of {id} that it does not have: {line}"
            fix = f"look at {page}, and name a commit that has its files, with @COMMIT behind the name"
            return TesseraError(what, where=self.where, fix=fix, code="hub.no-such-files")
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            what = f"Hugging Face refuses access to {id.name}: {line}"
            return TesseraError(what, where=self.where, fix=login, code="hub.no-permission")
        return Unreachable(line if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {line}")


class ModelScope:
    """Download from ModelScope, or from the server that MODELSCOPE_ENDPOINT names."""

    def __init__(self, where: str) -> None:
        try:
            from modelscope_hub import HubApi
        except ModuleNotFoundError as error:
            raise TesseraError(
                "models and data sets of ModelScope are downloaded by modelscope 1.38 or later, which is not installed "
                f"(no module {error.name})",
                where=where,
                fix="pip install -U modelscope",
                code="environment.no-modelscope",
            ) from None
        self.where = where
        self.endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or None
        # Read the variable at each call. If it is not set, the library uses the token of `modelscope login`.
        token = os.environ.get("MODELSCOPE_API_TOKEN") or None
        self.api: Any = HubApi(endpoint=self.endpoint, token=token)

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser().absolute()

    def _folder(self, id: HubId) -> Path:
        """Return a folder per commit. In modelscope's default folder a new commit overwrites files of the old one."""
        return self.cache / "tessera" / f"{id.kind}s" / id.name / str(id.revision)

    def listing(self, id: HubId) -> Listing:
        revision = id.revision or MODELSCOPE_BRANCH
        with self.explained(str(id)):
            files = self.entries(id.name, id.kind, revision)
        if not files:
            raise TesseraError(
                f"ModelScope has no files of {id}",
                where=self.where,
                fix="check name and revision",
                code="hub.no-such-repository",
            )
        # ModelScope lists for each file the last commit that changed it. The newest of them is the repository's commit.
        newest = max(files, key=lambda file: int(file.get("CommittedDate") or 0))
        commit = revision if id.is_pinned else str(newest.get("Revision") or revision)
        listed = [(str(file["Path"]), int(file.get("Size") or 0), file.get("Sha256") or None) for file in files]
        return Listing(commit, tuple(RemoteFile(*file) for file in listed))

    def entries(self, name: str, kind: str, revision: str) -> list[dict[str, Any]]:
        """Return the files of a repository as dicts of ModelScope's API."""
        entries = self.api.legacy.list_repo_files(repo_id=name, repo_type=kind, revision=revision, recursive=True)
        return [
            entry for entry in entries if isinstance(entry, dict) and entry.get("Path") and entry.get("Type") != "tree"
        ]

    def fetch(self, id: HubId, commit: str, names: Sequence[str], to: Path | None) -> Path:
        folder = to or self._folder(id.at(commit))
        patterns = [glob.escape(name) for name in names]
        with self.explained(str(id)):
            self.api.download_repo(id.name, id.kind, revision=commit, local_dir=str(folder), allow_patterns=patterns)
        return folder

    def cached(self, id: HubId) -> Path | None:
        folder = self._folder(id)
        return folder if id.is_pinned and folder.is_dir() else None

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Raise errors of the library as `TesseraError` with a fix, or as `Unreachable`."""
        from modelscope_hub.errors import AuthenticationError, NotExistError, PermissionDeniedError

        try:
            yield
        except TesseraError:
            raise
        except NotExistError:
            what, fix = f"ModelScope has no {name}, or it is private", "check name and revision, or `modelscope login`"
            raise TesseraError(what, where=self.where, fix=fix, code="hub.no-such-repository") from None
        except AuthenticationError:
            what = "nobody is logged in to ModelScope, or the token is not valid"
            fix = "`modelscope login`, or set MODELSCOPE_API_TOKEN"
            raise TesseraError(what, where=self.where, fix=fix, code="hub.not-logged-in") from None
        except PermissionDeniedError as error:
            what = f"ModelScope refuses access to {name}: {first_line(error)[:300]}"
            fix = "check the name and the rights of the token: `modelscope login`, or set MODELSCOPE_API_TOKEN"
            raise TesseraError(what, where=self.where, fix=fix, code="hub.no-permission") from None
        except Exception as error:
            raise Unreachable(first_line(error)[:300]) from None


HubClient = HuggingFace | ModelScope


def hub_client(id: HubId, where: str) -> HubClient:
    return ModelScope(where) if id.hub == "ms" else HuggingFace(where)
