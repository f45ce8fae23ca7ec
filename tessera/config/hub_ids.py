"""Parse ids of models and data sets: `hf://org/name[@revision][/path]` (Hugging Face), `ms://...` (ModelScope)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from tessera.errors import TesseraError

Hub = Literal["hf", "ms"]
RepoKind = Literal["model", "dataset"]
HUBS: dict[str, str] = {"hf": "Hugging Face", "ms": "ModelScope"}
_SCHEME = re.compile(r"(hf|ms):/{1,2}(?=[^/])", re.IGNORECASE)  # one slash or two: `Path` turns hf:// into hf:/
_WORD = r"[A-Za-z0-9][\w.\-]{0,95}"
_NAME = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_PLAIN = re.compile(rf"{_WORD}/{_WORD}(?:@[\w.\-]+)?", re.ASCII)
_REVISION = re.compile(r"refs/(?:pr|convert)/[\w.\-]+|[^/@]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# A text with one of these suffixes is the path of a missing file, not a repository name.
_FILE = re.compile(r"\.(?:json|jsonl|parquet|csv|tsv|txt|tar|safetensors|bin|pt|pth|ya?ml|gguf)$", re.IGNORECASE)


@dataclass(frozen=True)
class HubId:
    """Identify a model or a data set on a hub."""

    hub: Hub
    kind: RepoKind
    name: str  # org/name
    revision: str | None = None  # branch, tag or commit; None: the default branch
    inside: str = ""  # path of a folder or file in the repository; for data sets also a glob pattern
    looks_like_path: bool = field(default=False, compare=False)  # written as org/name, which may also be a local path

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"{self.hub}://{kind}{self.name}{revision}" + (f"/{self.inside}" if self.inside else "")

    @property
    def is_pinned(self) -> bool:
        """Return whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubId:
        return replace(self, revision=revision)


def is_hub_id(value: str | Path) -> bool:
    """Return whether a text or path begins with `hf:` or `ms:`."""
    return _SCHEME.match(str(value)) is not None


def hub_spelling(value: str | Path) -> str:
    """Return a path as text. `Path` turns `hf://` into `hf:/`: the second slash is restored."""
    text = str(value)
    match = _SCHEME.match(text)
    return text if match is None else f"{match[1].lower()}://{text[match.end() :]}"


def parse_hub_id(value: str | Path, kind: RepoKind, where: str) -> HubId:
    """Parse an id with `hf://` or `ms://`. `kind`: its kind, unless it begins with `datasets/` or `models/`."""
    text = hub_spelling(value)
    hub, _, rest = text.partition("://")
    for prefix, named in (("datasets/", "dataset"), ("models/", "model")):
        if rest.startswith(prefix):
            rest, kind = rest.removeprefix(prefix), "dataset" if named == "dataset" else "model"
    name = _NAME.match(rest)
    revision, inside = None, ""
    if name is not None:
        suffix = rest[name.end() :]
        if suffix.startswith("@"):
            at = _REVISION.match(suffix, 1)
            revision, suffix = (None, suffix) if at is None else (unquote(at[0]), suffix[at.end() :])
        inside = suffix.removeprefix("/").rstrip("/") if not suffix or suffix.startswith("/") else "?"
    parts = inside.split("/")
    if name is None or ".." in name[0] or "?" in inside or ".." in parts or "\\" in inside or not rest.isprintable():
        raise TesseraError(
            f"this is not an id on {HUBS.get(hub, 'a hub')}: {text!r:.200}",
            where=where,
            fix=f"write {hub}://org/name, optionally followed by @REVISION and /PATH",
            code="hub.not-a-name",
        )
    return HubId("ms" if hub == "ms" else "hf", kind, name[0], revision, inside)


def plain_hub_id(path: Path, kind: RepoKind) -> HubId | None:
    """Return the Hugging Face id of a text like `org/name`; None for a local path.

    A text is a local path if it exists, or if its parent folder exists.
    """
    text = str(path)
    if _PLAIN.fullmatch(text) is None or _FILE.search(text) or path.exists() or path.parent.exists():
        return None
    name, _, revision = text.partition("@")
    return None if ".." in name else HubId("hf", kind, name, revision or None, looks_like_path=True)


def hub_hint(path: Path) -> str:
    """Return advice on `hf://` for a missing local path that looks like a model id; "" for any other path.

    A path below `runs`, the default folder of runs, is no model id."""
    text = str(path)
    if path.is_absolute() or path.exists() or text.startswith((".", "runs/")) or _FILE.search(text):
        return ""
    if _NAME.fullmatch(text) is None or ".." in text:
        return "a model on Hugging Face is named hf://org/name" if re.fullmatch(_WORD, text, re.ASCII) else ""
    return f"for a model on Hugging Face write hf://{text}, or fetch it with `tessera download hf://{text}`"


def find_hub_id(value: str | Path, kind: RepoKind, where: str) -> HubId | None:
    """Return the id of a model or data set on a hub, written as `hf://org/name`, `ms://org/name` or `org/name`.

    Return None if the value is a local path.
    """
    if is_hub_id(value):
        return parse_hub_id(value, kind, where)
    return plain_hub_id(Path(value), kind)
