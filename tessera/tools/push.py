"""Publish a model or adapters on Hugging Face or ModelScope, with a card."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from tessera.checkpoint.publish import MARK
from tessera.config.hub_ids import Hub, HubId, is_hub_id, parse_hub_id
from tessera.config.saved_recipe import read_saved
from tessera.errors import TesseraError, few_names, first_line
from tessera.hub.clients import MODELSCOPE_BRANCH, HuggingFace, ModelScope, Unreachable
from tessera.hub.download import say
from tessera.hub.files import MODEL_SUFFIXES, is_plain, suffix_of
from tessera.inference.export_record import changes_since, read_record
from tessera.lora.exchange import is_adapters
from tessera.runtime.files import check_inside, read_json_mapping
from tessera.runtime.progress import human_bytes
from tessera.tools.download import named_repository
from tessera.tools.model_card import Library, model_card
from tessera.weights.layouts import DiffusersFolder, detect_layout

WHERE = "tessera push"
CARD = "README.md"
_ADAPTERS = "adapter_config.json"
_BASE = "base_model_name_or_path"
_MODELSCOPE = "https://www.modelscope.cn"
_MORE = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", CARD)


@dataclass(frozen=True)
class Pushed:
    """Describe files that were sent to the hub, or that a dry run would send."""

    id: HubId
    files: dict[str, int]  # name -> size in bytes
    left_out: tuple[str, ...]
    card: str | None  # the generated model card; None: the folder contains a README.md
    url: str | None  # URL of the repository; None: dry run

    def lines(self) -> list[str]:
        done = f"{self.url}" if self.url else f"would go to {self.id.name}"
        out = [f"{done}: {len(self.files)} files, {human_bytes(sum(self.files.values()))}"]
        if self.url is None:
            out += [f"  {name}  {human_bytes(size)}" for name, size in sorted(self.files.items())]
            if self.left_out:
                out.append(f"  left out: {few_names(self.left_out)}")
            if self.card is not None:
                out += ["", self.card]
        return out


def push(
    source: str | Path,
    id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    base: str | None = None,
    message: str | None = None,
) -> Pushed:
    """Publish a run's export, a Hugging Face or diffusers folder, or PEFT adapters, under `id` (org/name).

    A model card is generated from the run, unless the folder or the repository has a README.md. `private`: create a
    private repository. `dry_run`: send nothing, and return the list of files. `base`: org/name of the base model; None:
    that of the run or of the adapters. `message`: commit message.
    """
    named = named_repository(id, "model", None, WHERE)
    if named.kind != "model" or named.revision is not None or named.inside:
        raise TesseraError(
            f"{named} is not the name of a model repository",
            where=WHERE,
            fix="use org/name (Hugging Face) or ms://org/name (ModelScope)",
            code="hub.not-a-name",
        )
    folder, run = _folder_of(Path(source))
    began = base or _known_base(folder, run, named.hub)
    contents, left_out = _contents(folder, began)
    card = None
    if CARD not in contents:
        card = model_card(named.name, _library(folder), run, began)
    sizes = {name: len(it) if isinstance(it, bytes) else it.stat().st_size for name, it in contents.items()}
    if card is not None:
        sizes[CARD] = len(card.encode())
    planned = Pushed(named, sizes, left_out, card, None)
    if dry_run:
        return planned
    return _send(planned, contents, private, message or "Add the model")


def _folder_of(source: Path) -> tuple[Path, Path | None]:
    """Return the folder to publish, and its run folder if it has one."""
    if (source / "config.yaml").is_file() and detect_layout(source) is None:
        exports = [source / name for name in ("hf", "adapter") if (source / name).is_dir()]
        if len(exports) > 1:
            raise TesseraError(
                "this run has two exports, a model and adapters",
                where=str(source),
                allowed=exports,
                fix="name the export to push",
                code="hub.two-exports",
            )
        if not exports:
            raise TesseraError(
                "this run has no export",
                where=str(source),
                fix=f"tessera convert {source} FOLDER (or with --adapters), then tessera push FOLDER ID",
                code="hub.nothing-exported",
            )
        return exports[0], source
    if not source.is_dir() or (detect_layout(source) is None and not is_adapters(source)):
        raise TesseraError(
            "this folder contains neither a model nor adapters",
            where=str(source),
            allowed=["a run", "a Hugging Face or diffusers folder", "PEFT adapters"],
            code="hub.nothing-to-push",
        )
    above = source.absolute().parent
    return source, above if (above / "config.yaml").is_file() else None


def _library(folder: Path) -> Library:
    if is_adapters(folder):
        return "peft"
    return "diffusers" if DiffusersFolder.detect(folder) else "transformers"


def _known_base(folder: Path, run: Path | None, hub: Hub) -> str | None:
    """Return org/name of the base model if it was downloaded from `hub`, to which the model is pushed; else None."""
    candidates: list[str] = []
    if run is not None:
        model = read_saved(run / "config.yaml").get("model")
        section = model if isinstance(model, dict) else {}
        candidates += [str(section[key]) for key in ("hub_id", "path") if section.get(key)]
    if (folder / _ADAPTERS).is_file():
        candidates.append(str(read_json_mapping(folder / _ADAPTERS).get(_BASE) or ""))
    for candidate in candidates:
        if is_hub_id(candidate):
            id = parse_hub_id(candidate, "model", WHERE)
            if id.hub == hub:
                return id.name
        note = Path(candidate) / ".tessera" / "download.json"  # `tessera download --to` writes it
        if candidate and note.is_file():
            name = read_json_mapping(note).get("name")
            return str(name) if name else None
    return None


def _contents(folder: Path, base: str | None) -> tuple[dict[str, Path | bytes], tuple[str, ...]]:
    """Return the files to send (name -> path, or bytes for a rewritten file), and the names of other files."""
    record = read_record(folder) if not is_adapters(folder) else None
    problems = [] if record is None else [change for change in changes_since(folder, record) if CARD not in change]
    if problems:
        raise TesseraError(
            f"the folder was changed after its export: {problems[0]}",
            where=str(folder),
            fix=f"export the model again, or remove {folder / MARK} if you meant to change the folder",
            code="output.changed-after-export",
        )
    contents: dict[str, Path | bytes] = {}
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        if not is_plain(name) or name == MARK or (suffix_of(name) not in MODEL_SUFFIXES and name not in _MORE):
            left_out.append(name)
            continue
        check_inside(path, folder)
        contents[name] = path
    if _ADAPTERS in contents:
        contents[_ADAPTERS] = _with_public_base(folder / _ADAPTERS, base)
    return contents, tuple(left_out)


def _with_public_base(path: Path, base: str | None) -> bytes:
    """Return adapter_config.json with a base model on the hub instead of a local path."""
    said = read_json_mapping(path)
    named = str(said.get(_BASE) or "")
    if base is None:
        if named.count("/") != 1 or Path(named).exists() or named.startswith(("/", ".")):
            raise TesseraError(
                f"the base model of the adapters is {named or 'not named'!r}, which is not a name on the hub",
                where=str(path),
                fix="name the base model on the hub: --base org/name",
                code="adapter.base-without-name",
            )
        base = named
    return (json.dumps({**said, _BASE: base}, indent=2) + "\n").encode()


def _send(planned: Pushed, contents: Mapping[str, Path | bytes], private: bool, message: str) -> Pushed:
    """Create the repository if it does not exist, and send a folder of exactly these files."""
    name, card = planned.id.name, planned.card
    open_repository = _open_modelscope if planned.id.hub == "ms" else _open_hugging_face
    try:
        with open_repository(name, private) as repository:
            if private and not repository.is_private:
                raise TesseraError(
                    f"the repository {name} exists and is public",
                    where="--private",
                    fix="push to another name, or make the repository private on its web page",
                    code="hub.repository-is-public",
                )
            if card is not None and CARD in repository.files:
                say(f"{name} has a model card already, which is kept")
                card = None
            say(f"{name}: sending {len(planned.files)} files, {human_bytes(sum(planned.files.values()))}")
            with tempfile.TemporaryDirectory(prefix="tessera-push-") as folder:
                _stage(Path(folder), {**contents, **({} if card is None else {CARD: card.encode()})})
                repository.send(folder, message)
            return replace(planned, card=card, url=repository.url)
    except (Unreachable, OSError, ValueError) as error:
        raise TesseraError(
            f"the upload failed: {first_line(error)[:300]}",
            where=WHERE,
            fix="run the command again; files that arrived are not sent again",
            code="hub.push-broke-off",
        ) from None


def _stage(folder: Path, contents: Mapping[str, Path | bytes]) -> None:
    """Fill a folder with links to the files, so that the libraries of the hubs can send the folder unchanged."""
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.symlink_to(content.absolute())


@dataclass(frozen=True)
class _Repository:
    url: str
    is_private: bool
    files: Collection[str]  # names of the files in the repository
    send: Callable[[str, str], object]  # (folder, commit message)


@contextmanager
def _open_hugging_face(name: str, private: bool) -> Iterator[_Repository]:
    """Create the repository if it does not exist, and yield it. Explain errors of the hub in the `with` block."""
    client = HuggingFace(WHERE)
    library = client.library
    token = library.get_token()
    if token is None:
        raise TesseraError(
            "no token for Hugging Face was found",
            where=WHERE,
            fix="run hf auth login, or set HF_TOKEN to a token with write permission",
            code="hub.not-logged-in",
        )
    api = library.HfApi(endpoint=client.endpoint, token=token)

    def send(folder: str, message: str) -> None:
        """Send all files in one commit, so that a killed upload adds nothing."""
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        added = [
            library.CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(path))
            for file, path in zip(names, paths, strict=True)
        ]
        api.create_commit(name, added, commit_message=message)

    try:
        url = str(api.create_repo(name, private=private or None, exist_ok=True))
        info = api.repo_info(name)
        files = {file.rfilename for file in info.siblings or []}
        yield _Repository(url, bool(info.private), files, send)
    except library.errors.HfHubHTTPError as error:
        what = f"Hugging Face refused the upload: {first_line(error)[:300]}"
        if error.response is not None and error.response.status_code in (401, 403):
            fix = "create a token with write permission for this repository"
            raise TesseraError(what, where=WHERE, fix=fix, code="hub.token-cannot-write") from None
        raise TesseraError(what, where=WHERE, fix="try again", code="hub.push-refused") from None


@contextmanager
def _open_modelscope(name: str, private: bool) -> Iterator[_Repository]:
    """Create the repository if it does not exist, and yield it. Explain errors of the hub in the `with` block."""
    client = ModelScope(WHERE)
    from modelscope_hub.constants import Visibility

    api = client.api

    def send(folder: str, message: str) -> None:
        with _quiet():
            api.upload_folder(name, "model", folder, commit_message=message, use_cache=False, disable_tqdm=True)

    with client.explained(name):
        api.whoami()
        if not api.repo_exists(name, "model"):
            api.create_repo(name, "model", visibility="private" if private else "public")
        about = api.get_repo(name, "model")
        is_private = bool(about.private) or about.visibility == Visibility.PRIVATE
        files = {file["Path"] for file in client.entries(name, "model", MODELSCOPE_BRANCH)}
        url = f"{(client.endpoint or _MODELSCOPE).rstrip('/')}/models/{name}"
        yield _Repository(url, is_private, files, send)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the output of ModelScope's library. Errors are still raised."""
    logger = logging.getLogger("modelscope_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logger.setLevel(level)
