"""The record of an export: what each tensor and each file beside the weights was when the folder was published.

`tessera_export.json` lies in the folder; readers of other libraries pass over it. For every tensor it has type, shape,
a hash of its bytes, and what became of the tensor of that name in the base, the folder that the weights came from. A
folder can be checked against its record, and against the base alone: names, shapes and types.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import hash_file, open_safetensors, package_version, read_box, write_file
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.publish import MARK
from tessera.core.errors import TesseraError, nearest
from tessera.core.files import read_json_mapping
from tessera.core.layouts import detect_layout, folder_layout
from tessera.core.weightmap import WeightMap

FORMAT = "tessera-export"
VERSION = 2  # 1 had no tensors and no files
_MAX_BYTES = 256 << 20
_THREADS = 4  # hashing and reading release the interpreter
# Files that change what a folder means to its readers, so that one which was added later is told.
_READ_BY_OTHERS = (".json", ".jinja", ".model", ".safetensors", ".tiktoken")
SAME_NAMES = WeightMap((), same_names=True)
_FEW = 64
_log = logging.getLogger("tessera")
_SAME, _CHANGED, _NEW = "same", "changed", "new"


@dataclass(frozen=True)
class ExportedTensor:
    """State type (as safetensors spell it), shape and hash of a stored tensor, and what it is to the base."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str = ""  # none: only names, shapes and types are known
    base: str | None = None


@dataclass(frozen=True)
class ExportedFile:
    """State the hash of a file beside the weights, and what it is to the one in the base."""

    sha256: str
    base: str | None = None


@dataclass(frozen=True)
class ExportRecord:
    """Hold what `tessera_export.json` says."""

    base: str | None
    tensors: Mapping[str, ExportedTensor]
    files: Mapping[str, ExportedFile]
    not_exported: Sequence[str] = ()  # tensors of the base

    def summary(self) -> str:
        """Return one line that counts tensors by what they are to the base."""
        text = f"{len(self.tensors)} tensors"
        if self.base is None:
            return text
        counts = {word: sum(one.base == word for one in self.tensors.values()) for word in (_SAME, _CHANGED, _NEW)}
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        left = f"; {len(self.not_exported)} of it are not exported" if self.not_exported else ""
        return f"{text}, beside {self.base}: {told}{left}"


# ---------------------------------------------------------------------------------------------- writing


def write_record(folder: Path, base: Path | None = None, weight_map: WeightMap = SAME_NAMES) -> ExportRecord:
    """Read a finished folder, note everything in it, and return the record.

    `base`: the folder that the weights came from. `weight_map` knows the names that folders spell in several ways.
    """
    tensors, unreadable = _hashed(folder)
    if unreadable:
        raise TesseraError(f"what was written cannot be read: {unreadable[0]}", where=str(folder))
    files = {name: ExportedFile(hash_file(folder / name).sha256) for name in _other_files(folder)}
    record = ExportRecord(None, tensors, files)
    if base is not None and base.is_dir():
        try:
            record = _beside(record, folder, base, weight_map.canonical)
        except TesseraError as error:  # it was read once; whatever became of it since is no fault of the export
            _log.warning("the record does not say what changed since %s: %s", base, error.what)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "tessera": package_version("tessera-mm"),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "base": record.base,
        "not_exported": list(record.not_exported),
    }
    tables = [f' "files": {_lines(record.files)}', f' "tensors": {_lines(record.tensors)}']
    write_file(folder / MARK, (",\n".join([json.dumps(head, indent=1)[:-2], *tables]) + "\n}\n").encode())
    return record


def _lines(table: Mapping[str, ExportedTensor | ExportedFile]) -> str:
    """Return a table with one row a line: there are thousands."""
    rows = {
        name: {key: value for key, value in asdict(one).items() if value is not None} for name, one in table.items()
    }
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n }"


def _beside(record: ExportRecord, folder: Path, base: Path, canonical: Callable[[str], str]) -> ExportRecord:
    files = {
        name: replace(
            one, base=_NEW if not (base / name).is_file() else _word(hash_file(base / name).sha256 == one.sha256)
        )
        for name, one in record.files.items()
    }
    name = _name_of(base)
    layout = detect_layout(base)
    if layout is None or not any(base.glob("*.safetensors")):
        return replace(record, base=name, files=files)
    with FolderTensors(base) as old, FolderTensors(folder) as new:
        known = {canonical(key): key for key in old.shapes}
        tensors = {
            key: replace(one, base=_status(key, known.get(canonical(key)), old, new) if key in new.shapes else _NEW)
            for key, one in record.tensors.items()
        }
        kept = {canonical(key) for key in new.shapes}
    return ExportRecord(name, tensors, files, [key for one, key in known.items() if one not in kept])


def _status(key: str, old_key: str | None, old: FolderTensors, new: FolderTensors) -> str:
    if old_key is None:
        return _NEW
    shape = new.shapes[key]
    if (old.shapes[old_key], old.kinds[old_key]) != (shape, new.kinds[key]):
        return _CHANGED
    # A trained tensor differs in its first row: only what is the same is read whole.
    first = ([0] * len(shape), (1, *shape[1:]))
    boxes = [first, None] if shape and shape[0] > 1 else [None]
    return _word(all(_equal(old.read(old_key, *(box or ())), new.read(key, *(box or ()))) for box in boxes))


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bytes(one), _bytes(other))  # as bytes: a NaN is the same as itself


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _word(same: bool) -> str:
    return _SAME if same else _CHANGED


def _name_of(base: Path) -> str:
    """Return the name of a folder, and not where it lies on this machine; of a cache of downloads, the model's."""
    real = base.absolute()
    if real.parent.name == "snapshots":
        return real.parent.parent.name.removeprefix("models--").replace("--", "/") + f"@{real.name}"
    return real.name


def _other_files(folder: Path) -> list[str]:
    """Return the names of all files but weights, the record itself and hidden ones."""
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in found if not name.startswith(".") and name != MARK and not name.endswith(".safetensors")]


def _hashed(folder: Path) -> tuple[dict[str, ExportedTensor], list[str]]:
    """Return the tensors of a folder as they are stored, and what is wrong with files that cannot be read."""
    problems: list[str] = []
    try:
        paths = folder_layout(folder).weight_files()
    except TesseraError as error:
        problems.append(error.what)
        paths = sorted(folder.glob("*.safetensors"))
    found: dict[str, ExportedTensor] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for path in paths:
            try:
                with open_safetensors(path) as file:
                    names = list(file.keys())
                    found |= zip(names, pool.map(lambda name, file=file: _hash(file, name), names), strict=True)
            except TesseraError as error:
                problems.append(f"{path.name}: {error.what}")
    return found, problems


def _hash(file: Any, name: str) -> ExportedTensor:
    view = file.get_slice(name)
    shape = tuple(view.get_shape())
    data = _bytes(read_box(file, name, [0] * len(shape), shape))
    return ExportedTensor(str(view.get_dtype()), shape, hashlib.sha256(data.numpy().data).hexdigest())


# ---------------------------------------------------------------------------------------------- checking


def read_record(folder: Path) -> ExportRecord | None:
    """Return the record of a folder; None if it has none, or one of an old release that says nothing."""
    path = folder / MARK
    if not path.exists():
        return None
    content = read_json_mapping(path, _MAX_BYTES)
    if content.get("version") == 1:
        return None
    try:
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"format {content['format']} version {content['version']}")
        tensors = {
            name: ExportedTensor(one["dtype"], tuple(one["shape"]), one["sha256"], one.get("base"))
            for name, one in content["tensors"].items()
        }
        files = {name: ExportedFile(one["sha256"], one.get("base")) for name, one in content["files"].items()}
        return ExportRecord(content["base"], tensors, files, content["not_exported"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TesseraError(f"not a record of an export: {error!r}", where=str(path)) from None


def changes_since(folder: Path, record: ExportRecord) -> list[str]:
    """Return everything in a folder that is not as its record says, in words."""
    found, problems = _hashed(folder)
    problems += tensor_differences(found, record.tensors, "was written")
    present = _other_files(folder)
    for name, one in record.files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif hash_file(folder / name).sha256 != one.sha256:
            problems.append(f"{name} has been changed")
    added = [name for name in present if name not in record.files and name.endswith(_READ_BY_OTHERS)]
    return problems + [f"{name} was not there when the folder was written" for name in added]


def differences_from(folder: Path, base: Path, weight_map: WeightMap, types: bool = True) -> list[str]:
    """Return what differs in names, shapes and types of tensors from another folder of the same model, in words.

    Tensors that the model has no use for, or has under another name, are no difference.
    """
    wanted = _stored(base, weight_map)
    try:
        return tensor_differences(_stored(folder, weight_map), wanted, f"is in {_name_of(base)}", types)
    except TesseraError as error:
        return [f"{Path(error.where or folder).name}: {error.what}"]


def _stored(folder: Path, weight_map: WeightMap) -> dict[str, ExportedTensor]:
    with FolderTensors(folder) as stored:
        known = {weight_map.canonical(name): name for name in stored.shapes}
        used = {name: key for name, key in known.items() if not weight_map.skips(name)}
        return {name: ExportedTensor(stored.kinds[key], stored.shapes[key]) for name, key in used.items()}


def tensor_differences(
    found: Mapping[str, ExportedTensor], expected: Mapping[str, ExportedTensor], verb: str, types: bool = True
) -> list[str]:
    """Return the differences of two tables of tensors. `verb`: what the expected one says, such as "was written"."""
    problems = []
    extra = {name: one for name, one in found.items() if name not in expected}
    few = len(extra) <= _FEW  # of another model nothing was renamed
    for name, wanted in expected.items():
        one = found.get(name)
        if one is None:
            alike = [other for other, has in extra.items() if replace(has, base=wanted.base) == wanted] if few else []
            near = alike[0] if wanted.sha256 and alike else nearest(name, alike)
            if near is not None:
                del extra[near]
            problems.append(f"{name} is missing" + ("" if near is None else f"; {near} may be it, renamed"))
        elif one.shape != wanted.shape:
            turned = " (transposed?)" if sorted(one.shape) == sorted(wanted.shape) else ""
            problems.append(f"{name} has the shape {list(one.shape)}, {verb} as {list(wanted.shape)}{turned}")
        elif one.dtype != wanted.dtype and types:
            problems.append(f"{name} is stored as {one.dtype}, {verb} as {wanted.dtype}")
        elif one.sha256 != wanted.sha256:
            problems.append(f"{name} has other bytes than {verb.replace('was', 'were')}")
    return problems + [f"{name} is not a tensor that {verb}" for name in extra]
