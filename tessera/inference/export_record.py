"""The record of an export: the SHA-256 of each file.

It is `tessera_export.json` in the exported folder; readers of other libraries ignore it. A folder can be checked
against its record, and against the folder that its weights came from. Somebody who changes a folder on purpose can
change the record as well.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tessera.checkpoint.files import hash_file, package_version, write_file
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.publish import MARK
from tessera.errors import TesseraError
from tessera.runtime.files import read_json_mapping
from tessera.weights.map import WeightMap

FORMAT = "tessera-export"
VERSION = 5
_READABLE = (4, VERSION)  # earlier records have no checksums of weight files
_MAX_BYTES = 256 << 20
_THREADS = 4  # hashing and reading release the interpreter
_WEIGHTS = ".safetensors"
# Files that readers of a folder use, so that one which was added later is reported.
_READ_BY_OTHERS = (".json", ".jinja", ".model", _WEIGHTS, ".tiktoken")
SAME_NAMES = WeightMap((), same_names=True)


@dataclass(frozen=True)
class ExportedTensor:
    """State the type (as safetensors spell it) and the shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExportedFile:
    """State the hash of a file, and of a file beside the weights how it relates to the base: same, changed or new."""

    sha256: str
    base: str | None = None


@dataclass(frozen=True)
class ExportRecord:
    """Hold the content of `tessera_export.json`. `base`: the name of the folder that the weights came from."""

    base: str | None
    files: Mapping[str, ExportedFile]

    def summary(self) -> str:
        """Return the number of files."""
        return f"{len(self.files)} files"


def write_record(folder: Path, base: Path | None = None) -> ExportRecord:
    """Write the record of a finished folder, and return it. `base`: the folder that the weights came from."""
    base = base if base is not None and base.is_dir() else None
    names = _files_in(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda name: hash_file(folder / name).sha256, names)
        files = {
            name: ExportedFile(sha256, _word(name, sha256, base)) for name, sha256 in zip(names, hashes, strict=True)
        }
    record = ExportRecord(None if base is None else _name_of(base), files)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "tessera": package_version("tessera-mm"),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **asdict(record),
    }
    write_file(folder / MARK, (json.dumps(content, indent=1) + "\n").encode())
    return record


def _word(name: str, sha256: str, base: Path | None) -> str | None:
    """Return how a file relates to that of the base: same, changed or new. Weights are not compared."""
    if base is None or name.endswith(_WEIGHTS):
        return None
    if not (base / name).is_file():
        return "new"
    return "same" if hash_file(base / name).sha256 == sha256 else "changed"


def _name_of(base: Path) -> str:
    """Return the name of a folder without its path on this machine; of a cache of downloads, the model's."""
    path = base.absolute()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/") + f"@{path.name}"
    return path.name


def _files_in(folder: Path) -> list[str]:
    """Return the names of all files but the record itself and hidden ones."""
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(".") and name != MARK]


# ---------------------------------------------------------------------------------------------- checking


def read_record(folder: Path) -> ExportRecord | None:
    """Return the record of a folder; None if it has none, or one of an old release."""
    path = folder / MARK
    if not path.exists():
        return None
    content = read_json_mapping(path, _MAX_BYTES)
    if content.get("version") in range(1, _READABLE[0]):
        return None
    try:
        if content["format"] != FORMAT or content["version"] not in _READABLE:
            raise ValueError(f"format {content['format']} version {content['version']}")
        files = {name: ExportedFile(entry["sha256"], entry.get("base")) for name, entry in content["files"].items()}
        return ExportRecord(content["base"], files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TesseraError(
            f"not a record of an export: {error!r}", where=str(path), code="output.bad-export-record"
        ) from None


def changes_since(folder: Path, record: ExportRecord) -> list[str]:
    """Return all differences of a folder from its record, in words."""
    problems, present = [], _files_in(folder)
    for name, entry in record.files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif hash_file(folder / name).sha256 != entry.sha256:
            problems.append(f"{name} has been changed")
    added = [name for name in present if name not in record.files and name.endswith(_READ_BY_OTHERS)]
    return problems + [f"{name} was not there when the folder was written" for name in added]


def differences_from(folder: Path, base: Path, weight_map: WeightMap, types: bool = True) -> list[str]:
    """Return the differences in names, shapes and types of tensors from another folder of the same model, in words.

    Tensors that the model has no use for, or has under another name, are no difference; nor are stacked experts in the
    transposed order that transformers 5 saves: their shape shows which one it is.
    """
    expected, verb = _stored(base, weight_map), f"is in {_name_of(base)}"
    try:
        tensors = _stored(folder, weight_map)
    except TesseraError as error:
        return [f"{Path(error.where or folder).name}: {error.what}"]
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        wanted = expected.get(name)
        if wanted is None:
            problems.append(f"{name} is not a tensor that {verb}")
        elif tensor.shape != wanted.shape:
            problems.append(f"{name} has the shape {list(tensor.shape)}, {verb} as {list(wanted.shape)}")
        elif tensor.dtype != wanted.dtype and types:
            problems.append(f"{name} is stored as {tensor.dtype}, {verb} as {wanted.dtype}")
    return problems


def _stored(folder: Path, weight_map: WeightMap) -> dict[str, ExportedTensor]:
    with FolderTensors(folder) as stored:
        names = {weight_map.canonical(name): name for name in stored.shapes}
        used = {name: key for name, key in names.items() if not weight_map.skips(name)}
        shapes = {name: weight_map.shape_written(name, stored.shapes[key]) for name, key in used.items()}
        return {name: ExportedTensor(stored.kinds[key], shapes[name]) for name, key in used.items()}
