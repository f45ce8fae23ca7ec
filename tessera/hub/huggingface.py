"""Download from Hugging Face by its own library, and explain its errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, first_line
from tessera.hub.download import Listing, RemoteFile, Unreachable
from tessera.weights.layouts import nearest_folder

_TIMEOUT_S = 15.0
_MODEL_FILES = ("config.json", "model_index.json", "adapter_config.json")  # every model has one of them


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
        # Read now, and not when the library was imported.
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        home = os.environ.get("HF_HOME")
        self._cache = os.environ.get("HF_HUB_CACHE") or (None if home is None else os.path.join(home, "hub"))

    @property
    def cache(self) -> Path:
        return Path(self._cache or self.library.constants.HF_HUB_CACHE).expanduser().absolute()

    def listing(self, id: HubId) -> Listing:
        api = self.library.HfApi(endpoint=self.endpoint)
        with self._explained(id):
            info = api.repo_info(
                id.name, repo_type=id.kind, revision=id.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
            files = []
            for file in info.siblings or []:
                size, sha256 = (file.size, None) if file.lfs is None else (file.lfs["size"], file.lfs["sha256"])
                if size is None:
                    raise ValueError(f"it does not list the size of {file.rfilename}")
                files.append(RemoteFile(file.rfilename, int(size), sha256, None if sha256 else file.blob_id))
        return Listing(str(info.sha or ""), tuple(files))

    def fetch(self, id: HubId, commit: str, names: Sequence[str], to: Path | None) -> Path:
        with self._explained(id):
            folder = self.library.snapshot_download(
                id.name,
                repo_type=id.kind,
                # A branch by its name: the library then stores its commit, for other programs off line.
                revision=commit if to is not None else id.revision,
                endpoint=self.endpoint,
                cache_dir=str(self.cache),
                local_dir=None if to is None else str(to),
                allow_patterns=[escaped(name) for name in names],
            )
        if to is None and Path(folder).name != commit:
            raise Unreachable(f"the revision became {Path(folder).name} during the download")
        return Path(folder)

    def cached(self, id: HubId) -> tuple[Path, str] | None:
        for file in _MODEL_FILES:
            name = f"{id.inside}/{file}" if id.inside else file
            path = self.library.try_to_load_from_cache(
                id.name, name, cache_dir=str(self.cache), revision=id.revision, repo_type=id.kind
            )
            if isinstance(path, str):
                folder = Path(path).parents[name.count("/")]
                return folder, folder.name
        repository = self.cache / f"{id.kind}s--{id.name.replace('/', '--')}"
        snapshot = repository / "snapshots" / str(id.revision)
        return (snapshot, str(id.revision)) if id.is_pinned and snapshot.is_dir() else None

    @contextmanager
    def _explained(self, id: HubId) -> Iterator[None]:
        """Raise errors of the library as `TesseraError` with a fix, or as `Unreachable`."""
        errors = self.library.errors
        try:
            yield
        except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, errors.EntryNotFoundError) as error:
            raise self._explanation(error, id) from None
        except (OSError, ValueError, RuntimeError) as error:
            raise Unreachable(first_line(error)[:300]) from None
        except (TypeError, LookupError, AttributeError) as error:  # the page of a login, or a mirror of something else
            problem = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise Unreachable(f"its answer is not one of a hub ({problem})") from None
        except Exception as error:  # of the library for connections, whose name differs between versions
            if not type(error).__module__.split(".")[0].startswith(("httpx", "httpcore", "requests", "urllib3")):
                raise
            raise Unreachable(first_line(error)[:300]) from None

    def _explanation(self, error: Any, id: HubId) -> Exception:
        errors, line = self.library.errors, first_line(error)[:300]
        page = f"{self.endpoint or 'https://huggingface.co'}/{'datasets/' if id.kind == 'dataset' else ''}{id.name}"
        what = "data set" if id.kind == "dataset" else "model"
        if isinstance(error, errors.GatedRepoError):
            return TesseraError(
                f"{id} is given only to people who have accepted its terms",
                where=self.where,
                fix=f"accept them at {page}, then log in with `hf auth login` or set HF_TOKEN",
                code="hub.terms-not-accepted",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return TesseraError(
                f"{id.name} has no revision {id.revision!r}",
                where=self.where,
                fix=f"look at {page}/tree/main",
                code="hub.no-such-revision",
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return TesseraError(
                (f"there is no folder {id.name} here, and " if id.looks_like_path else "")
                + f"Hugging Face has no {what} {id.name}, or it is private",
                where=self.where,
                nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
                fix=f"for a private one log in with `hf auth login` or set HF_TOKEN; for a {what} on this machine name "
                "a folder that exists",
                code="hub.no-such-repository",
            )
        if isinstance(error, errors.LocalEntryNotFoundError):
            return Unreachable(first_line(error.__cause__ or error))
        if isinstance(error, errors.EntryNotFoundError):
            return TesseraError(
                f"Hugging Face lists files of {id} that it does not have: {line}",
                where=self.where,
                fix=f"look at {page}, and name a commit that has its files, with @COMMIT behind the name",
                code="hub.no-such-files",
            )
        if error.response is not None and error.response.status_code in (401, 403):
            return TesseraError(
                f"Hugging Face refuses access to {id.name}: {line}",
                where=self.where,
                fix="log in with `hf auth login`, or set HF_TOKEN to a token that may read it",
                code="hub.no-permission",
            )
        return Unreachable(line)


def escaped(name: str) -> str:
    """Return a pattern that matches one name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
