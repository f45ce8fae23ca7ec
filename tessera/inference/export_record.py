"""The file `tessera_export.json` in an exported folder: the SHA-256 of every file.

It reveals accidental changes after the export. It is not signed, so it does not protect against intended changes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tessera.checkpoint.files import hash_file, write_file
from tessera.checkpoint.publish import MARK
from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping
from tessera.version import __version__

FORMAT = "tessera-export"
VERSION = 5
_READABLE = (4, VERSION)  # earlier records have no checksums of weight files
_MAX_BYTES = 256 << 20
_THREADS = 4  # hashing and reading release the GIL
# Suffixes of files that libraries load. An added file with such a suffix is reported.
_READ_BY_OTHERS = (".json", ".jinja", ".model", ".safetensors", ".tiktoken")


@dataclass(frozen=True)
class ExportRecord:
    """Hold the content of `tessera_export.json`. `base`: name of the base model."""

    base: str | None
    files: Mapping[str, str]  # name -> SHA-256


def write_record(folder: Path, base: Path | None = None) -> ExportRecord:
    """Write the record of a finished folder, and return it. `base`: folder of the base model."""
    names = _files_in(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda name: hash_file(folder / name).sha256, names)
        files = dict(zip(names, hashes, strict=True))
    record = ExportRecord(None if base is None or not base.is_dir() else _name_of(base), files)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "tessera": __version__,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **asdict(record),
    }
    write_file(folder / MARK, (json.dumps(content, indent=1) + "\n").encode())
    return record


def _name_of(base: Path) -> str:
    """Return the name of a folder without its local path; for a download cache, the name of the model."""
    path = base.absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/") + f"@{path.name}"
    return path.name


def _files_in(folder: Path) -> list[str]:
    """Return the names of all files except the record and hidden files."""
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(".") and name != MARK]


def read_record(folder: Path) -> ExportRecord | None:
    """Return the record of a folder; None if there is none, or if an old release wrote it."""
    path = folder / MARK
    if not path.exists():
        return None
    content = read_json_mapping(path, _MAX_BYTES)
    if content.get("version") in range(1, _READABLE[0]):
        return None
    try:
        if content["format"] != FORMAT or content["version"] not in _READABLE:
            raise ValueError(f"format {content['format']} version {content['version']}")
        files = {name: hash if isinstance(hash, str) else hash["sha256"] for name, hash in content["files"].items()}
        return ExportRecord(content["base"], files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TesseraError(
            f"the file is not a valid export record: {error!r}", where=str(path), code="output.bad-export-record"
        ) from None


def changes_since(folder: Path, record: ExportRecord) -> list[str]:
    """Return descriptions of missing and changed files of an export, and of added files that libraries load."""
    problems, present = [], _files_in(folder)
    for name, sha256 in record.files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif hash_file(folder / name).sha256 != sha256:
            problems.append(f"{name} has been changed")
    added = [name for name in present if name not in record.files and name.endswith(_READ_BY_OTHERS)]
    return problems + [f"{name} was not there when the folder was written" for name in added]
