"""Ask Hugging Face by its own library, and tell its errors in our words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId
from tessera.errors import TesseraError, first_line
from tessera.hub.bounded import bounded, remove_oversized
from tessera.hub.download import Listing, RemoteFile, Unreachable
from tessera.weights.layouts import nearest_folder

_TIMEOUT_S = 15.0
_MARKS = ("config.json", "model_index.json", "adapter_config.json")  # one of them is in every model


def library(where: str) -> Any:
    """Return huggingface_hub, or raise how to install it."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError:
        raise TesseraError(
            "models and data sets of Hugging Face are fetched by huggingface_hub, which is not installed",
            where=where,
            fix="pip install 'tessera-mm[hf]'",
        ) from None
    return huggingface_hub


class HuggingFace:
    """Fetch from Hugging Face, or from the server that HF_ENDPOINT names."""

    def __init__(self, where: str) -> None:
        self.library = library(where)
        self.where = where
        # Read now, and not when the library was imported.
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        home = os.environ.get("HF_HOME")
        self._cache = os.environ.get("HF_HUB_CACHE") or (None if home is None else os.path.join(home, "hub"))

    @property
    def cache(self) -> Path:
        return Path(self._cache or self.library.constants.HF_HUB_CACHE).expanduser().absolute()

    def _repository(self, id: HubId) -> Path:
        return self.cache / f"{id.kind}s--{id.name.replace('/', '--')}"

    def listing(self, id: HubId) -> Listing:
        api = self.library.HfApi(endpoint=self.endpoint)
        with self._explained(id):
            info = api.repo_info(
                id.name, repo_type=id.kind, revision=id.revision, files_metadata=True, timeout=_TIMEOUT_S
            )
            files = []
            for one in info.siblings or []:
                large = one.lfs
                sha256 = None if large is None else large["sha256"]
                size = one.size if large is None else large["size"]
                if size is None:
                    raise ValueError(f"it does not say how large {one.rfilename} is")
                git_sha1 = None if large is not None else one.blob_id
                files.append(RemoteFile(one.rfilename, int(size), sha256, git_sha1))
        return Listing(str(info.sha or ""), tuple(files))

    def fetch(self, id: HubId, listing: Listing, names: Sequence[str], to: Path | None) -> Path:
        largest = max((file.size for file in listing.files if file.name in set(names)), default=0)
        place = self.downloading_to(id, to)
        with self._explained(id), self._own_progress(), self._bounded(largest, place):
            folder = Path(
                self.library.snapshot_download(
                    id.name,
                    repo_type=id.kind,
                    revision=id.revision,  # a branch as it is written: the library then notes which commit it is
                    endpoint=self.endpoint,
                    cache_dir=str(self.cache),
                    local_dir=None if to is None else str(to),
                    allow_patterns=[escaped(name) for name in names],
                )
            )
        if to is None and folder.name != listing.commit:
            raise TesseraError(
                f"{id} was changed while it was downloaded: {listing.commit} became {folder.name}",
                where=self.where,
                fix="run the command again",
            )
        return folder

    def downloading_to(self, id: HubId, to: Path | None) -> Path:
        return to if to is not None else self._repository(id) / "blobs"

    def kept(self, id: HubId) -> tuple[Path, str] | None:
        for mark in _MARKS:
            name = f"{id.inside}/{mark}" if id.inside else mark
            found = self.library.try_to_load_from_cache(
                id.name, name, cache_dir=str(self.cache), revision=id.revision, repo_type=id.kind
            )
            if isinstance(found, str):
                folder = Path(found).parents[name.count("/")]
                return folder, folder.name
        snapshot = self._repository(id) / "snapshots" / str(id.revision)
        return (snapshot, str(id.revision)) if id.is_pinned and snapshot.is_dir() else None

    @contextmanager
    def _bounded(self, largest: int, place: Path) -> Iterator[None]:
        try:
            with bounded(self.library.get_session(), largest, place, self.where):
                yield
        except TesseraError:
            remove_oversized(place, largest)
            raise

    @contextmanager
    def _own_progress(self) -> Iterator[None]:
        utils = self.library.utils
        if utils.are_progress_bars_disabled():
            yield
            return
        utils.disable_progress_bars()
        try:
            yield
        finally:
            utils.enable_progress_bars()

    @contextmanager
    def _explained(self, id: HubId) -> Iterator[None]:
        errors = self.library.errors
        page = f"{self.endpoint or 'https://huggingface.co'}/{'datasets/' if id.kind == 'dataset' else ''}{id.name}"
        what = "data set" if id.kind == "dataset" else "model"
        try:
            yield
        except errors.GatedRepoError:
            raise TesseraError(
                f"{id} is given only to people who have accepted its terms",
                where=self.where,
                fix=f"accept them at {page}, then log in with `hf auth login` or set HF_TOKEN",
            ) from None
        except errors.RevisionNotFoundError:
            raise TesseraError(
                f"{id.name} has no revision {id.revision!r}", where=self.where, fix=f"look at {page}/tree/main"
            ) from None
        except errors.RepositoryNotFoundError:
            raise TesseraError(
                (f"there is no folder {id.name} here, and " if id.looks_like_path else "")
                + f"Hugging Face has no {what} {id.name}, or it is private",
                where=self.where,
                nearest=nearest_folder(Path(id.name)) if id.looks_like_path else None,
                fix=f"for a private one log in with `hf auth login` or set HF_TOKEN; for a {what} on this machine name "
                "a folder that exists",
            ) from None
        except errors.LocalEntryNotFoundError as error:
            raise Unreachable(first_line(error.__cause__ or error)) from None
        except errors.EntryNotFoundError as error:
            raise TesseraError(
                f"Hugging Face lists files of {id} that it does not have: {first_line(error)[:200]}",
                where=self.where,
                fix=f"look at {page}, and name a commit that has its files, with @COMMIT behind the name",
            ) from None
        except errors.HfHubHTTPError as error:
            if error.response is not None and error.response.status_code in (401, 403):
                raise TesseraError(
                    f"Hugging Face does not give {id.name}: {first_line(error)[:200]}",
                    where=self.where,
                    fix="log in with `hf auth login`, or set HF_TOKEN to a token that may read it",
                ) from None
            raise Unreachable(first_line(error)[:300]) from None
        except TesseraError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise Unreachable(f"{first_line(error)[:300]}") from None
        except (TypeError, LookupError, AttributeError) as error:  # a page to log in, or a mirror of something else
            said = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise Unreachable(f"its answer is not one of a hub ({said})") from None
        except Exception as error:  # of the library for connections, whose name differs between versions
            if not type(error).__module__.split(".")[0].startswith(("httpx", "httpcore", "requests", "urllib3")):
                raise
            raise Unreachable(first_line(error)[:300]) from None


def escaped(name: str) -> str:
    """Return a pattern that matches one name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
