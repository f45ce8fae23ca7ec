"""The record of an export: the SHA-256 of each file, and the names, types and shapes of tensors.

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
from typing import Any

from tessera.checkpoint.files import hash_file, open_safetensors, package_version, stored_shape, write_file
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.publish import MARK
from tessera.errors import TesseraError, nearest
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import folder_layout
from tessera.weights.map import WeightMap

FORMAT = "tessera-export"
VERSION = 4
_WITHOUT_WEIGHTS = (2, 3)  # versions that had checksums of tensors in place of those of weight files
_MAX_BYTES = 256 << 20
_THREADS = 4  # hashing and reading release the interpreter
_WEIGHTS = ".safetensors"
# Files that readers of a folder use, so that one which was added later is reported.
_READ_BY_OTHERS = (".json", ".jinja", ".model", _WEIGHTS, ".tiktoken")
SAME_NAMES = WeightMap((), same_names=True)
_FEW = 64


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
    tensors: Mapping[str, ExportedTensor]
    files: Mapping[str, ExportedFile]
    version: int = VERSION

    def summary(self) -> str:
        """Return one line that counts tensors and files."""
        old = self.version in _WITHOUT_WEIGHTS
        note = "; the record is of an older release, and the bytes of weights are not checked" if old else ""
        return f"{len(self.tensors)} tensors, {len(self.files)} files{note}"


def write_record(folder: Path, base: Path | None = None) -> ExportRecord:
    """Write the record of a finished folder, and return it. `base`: the folder that the weights came from."""
    tensors, problems = _tensors_in(folder)
    if problems:
        raise TesseraError(
            f"the written files cannot be read: {problems[0]}", where=str(folder), code="output.export-unreadable"
        )
    base = base if base is not None and base.is_dir() else None
    names = _files_in(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda name: hash_file(folder / name).sha256, names)
        files = {
            name: ExportedFile(sha256, _word(name, sha256, base)) for name, sha256 in zip(names, hashes, strict=True)
        }
    record = ExportRecord(None if base is None else _name_of(base), tensors, files)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "tessera": package_version("tessera-mm"),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "base": record.base,
    }
    tables = [f' "files": {_lines(record.files)}', f' "tensors": {_lines(record.tensors)}']
    write_file(folder / MARK, (",\n".join([json.dumps(head, indent=1)[:-2], *tables]) + "\n}\n").encode())
    return record


def _lines(table: Mapping[str, ExportedTensor | ExportedFile]) -> str:
    """Return a table with one row a line: there are thousands."""
    rows = {name: {k: v for k, v in asdict(entry).items() if v is not None} for name, entry in table.items()}
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n }"


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


def _tensors_in(folder: Path) -> tuple[dict[str, ExportedTensor], list[str]]:
    """Return the tensors of a folder as they are stored, and descriptions of files that cannot be read."""
    problems: list[str] = []
    try:
        paths = folder_layout(folder).weight_files()
    except TesseraError as error:
        problems.append(error.what)
        paths = sorted(folder.glob(f"*{_WEIGHTS}"))
    tensors: dict[str, ExportedTensor] = {}
    for path in paths:
        try:
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = ExportedTensor(str(file.get_slice(name).get_dtype()), stored_shape(file, name))
        except TesseraError as error:
            problems.append(f"{path.name}: {error.what}")
    return dict(sorted(tensors.items())), problems


# ---------------------------------------------------------------------------------------------- checking


def read_record(folder: Path) -> ExportRecord | None:
    """Return the record of a folder; None if it has none, or the empty one of an old release."""
    path = folder / MARK
    if not path.exists():
        return None
    content = read_json_mapping(path, _MAX_BYTES)
    if content.get("version") == 1:
        return None
    try:
        version = content["version"]
        if content["format"] != FORMAT or version not in (VERSION, *_WITHOUT_WEIGHTS):
            raise ValueError(f"format {content['format']} version {version}")
        tensors = {
            name: ExportedTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in content["tensors"].items()
        }
        files = {name: ExportedFile(entry["sha256"], entry.get("base")) for name, entry in content["files"].items()}
        return ExportRecord(content["base"], tensors, files, version)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TesseraError(
            f"not a record of an export: {error!r}", where=str(path), code="output.bad-export-record"
        ) from None


def changes_since(folder: Path, record: ExportRecord) -> list[str]:
    """Return all differences of a folder from its record, in words."""
    tensors, problems = _tensors_in(folder)
    problems += tensor_differences(tensors, record.tensors, "was written")
    present = _files_in(folder)
    for name, entry in record.files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif hash_file(folder / name).sha256 != entry.sha256:
            problems.append(f"{name} has been changed")
    if record.version in _WITHOUT_WEIGHTS:
        present = [name for name in present if not name.endswith(_WEIGHTS)]
    added = [name for name in present if name not in record.files and name.endswith(_READ_BY_OTHERS)]
    return problems + [f"{name} was not there when the folder was written" for name in added]


def differences_from(folder: Path, base: Path, weight_map: WeightMap, types: bool = True) -> list[str]:
    """Return the differences in names, shapes and types of tensors from another folder of the same model, in words.

    Tensors that the model has no use for, or has under another name, are no difference; nor are stacked experts in the
    transposed order that transformers 5 saves: their shape shows which one it is.
    """
    wanted = _stored(base, weight_map)
    try:
        return tensor_differences(_stored(folder, weight_map), wanted, f"is in {_name_of(base)}", types)
    except TesseraError as error:
        return [f"{Path(error.where or folder).name}: {error.what}"]


def _stored(folder: Path, weight_map: WeightMap) -> dict[str, ExportedTensor]:
    with FolderTensors(folder) as stored:
        names = {weight_map.canonical(name): name for name in stored.shapes}
        used = {name: key for name, key in names.items() if not weight_map.skips(name)}
        shapes = {name: weight_map.shape_written(name, stored.shapes[key]) for name, key in used.items()}
        return {name: ExportedTensor(stored.kinds[key], shapes[name]) for name, key in used.items()}


def tensor_differences(
    tensors: Mapping[str, ExportedTensor], expected: Mapping[str, ExportedTensor], verb: str, types: bool = True
) -> list[str]:
    """Return the differences of two tables of tensors. `verb`: of the expected one, such as "was written"."""
    problems = []
    extra = {name: entry for name, entry in tensors.items() if name not in expected}
    few = len(extra) <= _FEW  # of another model nothing was renamed
    for name, wanted in expected.items():
        entry: Any = tensors.get(name)
        if entry is None:
            near = nearest(name, [other for other, tensor in extra.items() if tensor == wanted] if few else [])
            if near is not None:
                del extra[near]
            problems.append(f"{name} is missing" + ("" if near is None else f"; {near} may be it, renamed"))
        elif entry.shape != wanted.shape:
            turned = " (transposed?)" if sorted(entry.shape) == sorted(wanted.shape) else ""
            problems.append(f"{name} has the shape {list(entry.shape)}, {verb} as {list(wanted.shape)}{turned}")
        elif entry.dtype != wanted.dtype and types:
            problems.append(f"{name} is stored as {entry.dtype}, {verb} as {wanted.dtype}")
    return problems + [f"{name} is not a tensor that {verb}" for name in extra]
