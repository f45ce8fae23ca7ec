"""Download from ModelScope by its own library, publish on it, and explain its errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, first_line
from tessera.hub.download import Listing, RemoteFile, Unreachable
from tessera.hub.huggingface import escaped

_BRANCH = "master"
_PAGE = "https://www.modelscope.cn"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the report and the log of the library off the screen; its errors are raised."""
    logger = logging.getLogger("modelscope_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logger.setLevel(level)


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
        self._endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or None
        # Read now, and not when the library was imported; without it the library uses the token of a login.
        token = os.environ.get("MODELSCOPE_API_TOKEN") or None
        self._api: Any = HubApi(endpoint=self._endpoint, token=token)

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser().absolute()

    def _folder(self, id: HubId) -> Path:
        """Return a folder for a commit: the library has one for a name, in which it replaces files."""
        return self.cache / "tessera" / f"{id.kind}s" / id.name / str(id.revision)

    def listing(self, id: HubId) -> Listing:
        revision = id.revision or _BRANCH
        try:
            entries = self._api.legacy.list_repo_files(
                repo_id=id.name, repo_type=id.kind, revision=revision, recursive=True
            )
        except Exception as error:
            raise self._explained(error, id) from None
        files = [entry for entry in entries if isinstance(entry, dict) and entry.get("Path")]
        files = [file for file in files if file.get("Type") != "tree"]
        if not files:
            raise TesseraError(
                f"ModelScope has no files of {id}",
                where=self.where,
                fix="check name and revision",
                code="hub.no-such-repository",
            )
        # A file has the commit that changed it last; the newest of these is the commit of the repository.
        newest = max(files, key=lambda file: int(file.get("CommittedDate") or 0))
        commit = revision if id.is_pinned else str(newest.get("Revision") or revision)
        listed = [(str(file["Path"]), int(file.get("Size") or 0), file.get("Sha256") or None) for file in files]
        return Listing(commit, tuple(RemoteFile(*file) for file in listed))

    def fetch(self, id: HubId, commit: str, names: Sequence[str], to: Path | None) -> Path:
        folder = to or self._folder(id.at(commit))
        try:
            patterns = [escaped(name) for name in names]
            self._api.download_repo(id.name, id.kind, revision=commit, local_dir=str(folder), allow_patterns=patterns)
        except Exception as error:
            raise self._explained(error, id) from None
        return folder

    def cached(self, id: HubId) -> tuple[Path, str] | None:
        folder = self._folder(id)
        return (folder, str(id.revision)) if id.is_pinned and folder.is_dir() else None

    def files_of(self, name: str) -> set[str] | None:
        """Return the names of the files of a model; None: there is no such model."""
        if not self._api.repo_exists(name, "model"):
            return None
        files = self._api.legacy.list_repo_files(repo_id=name, repo_type="model", revision=_BRANCH, recursive=True)
        return {str(file["Path"]) for file in files if isinstance(file, dict) and file.get("Path")}

    def publish(
        self, name: str, folder: Path, files: Mapping[str, Path | bytes], *, private: bool, message: str, card: str
    ) -> tuple[str, bool]:
        """Send files of a folder, and others as bytes, to a model; return its page, and whether `card` was sent too.

        A model that is not there is made. A card that it has already is kept: then `card` is not sent.
        """
        try:
            self._api.whoami()
            there = self.files_of(name)
            if there is None:
                self._api.create_repo(name, "model", visibility="private" if private else "public")
            elif private and not self._is_private(name):
                raise TesseraError(
                    f"{name} exists and is public",
                    where="--private",
                    fix="push to another name, or make it private there",
                    code="hub.repository-is-public",
                )
            written = bool(card) and "README.md" not in (there or set())
            contents = {path: content for path, content in files.items() if isinstance(content, bytes)}
            if written:
                contents["README.md"] = card.encode()
            with _quiet():
                self._api.upload_folder(
                    name,
                    "model",
                    str(folder),
                    commit_message=message,
                    allow_patterns=[escaped(path) for path in files if path not in contents],
                    use_cache=False,  # it would write a file of its own into the folder
                    disable_tqdm=True,
                )
                for path, content in contents.items():
                    self._api.upload_file(name, "model", content, path, commit_message=message, disable_tqdm=True)
        except TesseraError:
            raise
        except Exception as error:
            raise self._refusal(error, name) from None
        return f"{(self._endpoint or _PAGE).rstrip('/')}/models/{name}", written

    def _is_private(self, name: str) -> bool:
        from modelscope_hub.constants import Visibility

        repository = self._api.get_repo(name, "model")
        return bool(repository.private) or repository.visibility == Visibility.PRIVATE

    def _refusal(self, error: Exception, name: str) -> Exception:
        """Return the error of a push that failed."""
        from modelscope_hub.errors import AuthenticationError, HubError, PermissionDeniedError

        line = first_line(error)[:300]
        if isinstance(error, AuthenticationError):
            code, what = "hub.not-logged-in", "nobody is logged in to ModelScope, or the token is not valid"
            fix = "`modelscope login`, or set MODELSCOPE_API_TOKEN; --dry-run shows what would go"
        elif isinstance(error, PermissionDeniedError):
            code, what = "hub.no-permission", f"ModelScope refuses: {line}"
            fix = f"the token may not write to {name}: check name and rights"
        elif isinstance(error, (HubError, OSError, ValueError, LookupError)):
            code, what = "hub.push-broke-off", f"the push broke off: {line}"
            fix = "try again: files that are there are not sent twice"
        else:
            return error
        return TesseraError(what, where=self.where, fix=fix, code=code)

    def _explained(self, error: Exception, id: HubId) -> Exception:
        """Return the error of a download: a mistake in the name, or no answer."""
        from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError

        line = first_line(error)[:300]
        if isinstance(error, NotExistError):
            code, what = "hub.no-such-repository", f"ModelScope has no {id}, or it is private"
            fix = "check name and revision, or `modelscope login`"
        elif isinstance(error, (AuthenticationError, PermissionDeniedError)):
            code, what = "hub.no-permission", f"ModelScope does not give {id}: {line}"
            fix = "`modelscope login`, or set MODELSCOPE_API_TOKEN"
        else:
            return Unreachable(line) if isinstance(error, (HubError, OSError, ValueError, LookupError)) else error
        return TesseraError(what, where=self.where, fix=fix, code=code)
