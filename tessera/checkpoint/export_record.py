"""The record of an export: what each tensor and each file beside the weights was when the folder was published.

`tessera_export.json` lies in the folder; readers of other libraries pass over it. For every tensor it has type, shape,
a checksum of its bytes, and what became of the tensor of that name in the base, the folder that the weights came from.
A folder can be checked against its record, and against the base alone: names, shapes and types.

The checksum is a CRC-32: it finds what disks and people change by mistake, and is summed while tensors are written. The
record lies beside the weights, so nothing in it could show that somebody changed both on purpose.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tessera.checkpoint.files import (
    CODES,
    DTYPES,
    data_positions,
    hash_file,
    open_safetensors,
    package_version,
    stored_shape,
    write_file,
)
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.planned_folder import Scratch, read_at
from tessera.checkpoint.publish import MARK
from tessera.errors import TesseraError, nearest
from tessera.runtime.crc32 import crc32
from tessera.runtime.files import read_json_mapping
from tessera.runtime.libc import same_bytes
from tessera.runtime.progress import WorkProgress
from tessera.weights.file_plan import Extent, map_elements
from tessera.weights.layouts import detect_layout, folder_layout
from tessera.weights.map import WeightMap
from tessera.weights.rows import Bytes, TensorRows

FORMAT = "tessera-export"
VERSION = 3  # 1 had no tensors and no files, 2 had a SHA-256 of each tensor
_HASHED = 2
_MAX_BYTES = 256 << 20
_THREADS = 4  # hashing and reading release the interpreter
# Files that change what a folder means to its readers, so that one which was added later is reported.
_READ_BY_OTHERS = (".json", ".jinja", ".model", ".safetensors", ".tiktoken")
SAME_NAMES = WeightMap((), same_names=True)
_FEW = 64
_log = logging.getLogger("tessera")
_SAME, _CHANGED, _NEW = "same", "changed", "new"


@dataclass(frozen=True)
class ExportedTensor:
    """State type (as safetensors spell it), shape and checksum of a stored tensor, and what it is to the base."""

    dtype: str
    shape: tuple[int, ...]
    crc32: str = ""  # none: only names, shapes and types are known; of records of version 2, the SHA-256
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
    version: int = VERSION

    def summary(self) -> str:
        """Return one line that counts tensors by what they are to the base."""
        text = f"{len(self.tensors)} tensors"
        counts = {word: sum(one.base == word for one in self.tensors.values()) for word in (_SAME, _CHANGED, _NEW)}
        counted = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        left = f"; {len(self.not_exported)} of it are not exported" if self.not_exported else ""
        return f"{text}, compared with {self.base}: {counted}{left}" if counted else text


# ---------------------------------------------------------------------------------------------- writing


class TensorNotes:
    """Note tensors while they are written, chunk by chunk. Use it as a context: files of the base stay open inside.

    `base`: the folder that the weights came from. `weight_map` knows the names that folders spell in several ways.
    """

    def __init__(self, base: Path | None = None, weight_map: WeightMap = SAME_NAMES) -> None:
        self.tensors: dict[str, ExportedTensor] = {}
        self.base = base if base is not None and base.is_dir() else None
        self._old: _Base | None = None
        if self.base is not None and detect_layout(self.base) is not None and any(self.base.glob("*.safetensors")):
            try:
                self._old = _Base(self.base, weight_map.canonical)
            except TesseraError as error:  # it was read once; what became of it since is no fault of the export
                _log.warning("the record does not say what changed since %s: %s", self.base, error.what)

    def __enter__(self) -> TensorNotes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            self._old.__exit__()

    def begin(self, name: str, kind: str, shape: tuple[int, ...]) -> TensorNote:
        """Return what takes the chunks of one tensor, in order; its `close` notes it. Threads may note several."""
        there = None if self._old is None else self._old.find(name, kind, shape)
        return TensorNote(self, name, ExportedTensor(kind, shape), there)

    def add(self, name: str, kind: str, tensor: Tensor) -> None:
        """Note a whole tensor."""
        note = self.begin(name, kind, tuple(tensor.shape))
        for chunk in TensorRows.of(tensor).chunks():
            note(chunk)
        note.close()

    def not_exported(self) -> list[str]:
        """Return the names of tensors that the base alone has."""
        return [] if self._old is None else self._old.besides(self.tensors)


class TensorNote:
    """Sum the chunks of one tensor, and compare them with the tensor of the base as long as they are the same."""

    def __init__(self, notes: TensorNotes, name: str, tensor: ExportedTensor, there: _Stored | str | None) -> None:
        self._notes, self._name, self._tensor, self._there = notes, name, tensor, there
        self._checksum = self._at = 0

    def __call__(self, chunk: Bytes) -> None:
        self._checksum = crc32(chunk, self._checksum)
        if isinstance(self._there, _Stored) and not self._there.has(chunk, self._at):
            self._there = _CHANGED
        self._at += len(chunk)

    def close(self) -> None:
        base = _SAME if isinstance(self._there, _Stored) else self._there
        self._notes.tensors[self._name] = replace(self._tensor, crc32=f"{self._checksum:08x}", base=base)


def write_record(
    folder: Path, base: Path | None = None, weight_map: WeightMap = SAME_NAMES, notes: TensorNotes | None = None
) -> ExportRecord:
    """Note everything in a finished folder, and return the record.

    `notes`: those of its tensors, if they were made while it was written; `base` and `weight_map` are theirs then.
    Otherwise, see `TensorNotes`.
    """
    with contextlib.nullcontext(notes) if notes is not None else TensorNotes(base, weight_map) as made:
        if notes is None:
            _, unreadable = _each_tensor(folder, made.add)
            if unreadable:
                raise TesseraError(f"what was written cannot be read: {unreadable[0]}", where=str(folder))
        tensors = {name: made.tensors[name] for name in sorted(made.tensors)}
        base, left = made.base, made.not_exported()
    files = {name: _file_record(folder, base, name) for name in _other_files(folder)}
    record = ExportRecord(None if base is None else _name_of(base), tensors, files, left)
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


class _Stored:
    """Compare chunks with a tensor of the base, in memory or in its file."""

    def __init__(self, where: Extent | Tensor, handle: int, scratch: Scratch) -> None:
        self._where, self._handle, self._scratch = where, handle, scratch

    def has(self, chunk: Bytes, at: int) -> bool:
        if isinstance(self._where, Tensor):
            return same_bytes(chunk, _bytes(self._where).numpy()[at : at + len(chunk)])
        there = self._scratch.of_size(len(chunk))
        return read_at(self._handle, there, self._where.offset + at) and same_bytes(chunk, there)


class _Base:
    """Find the tensors of the folder that exported ones came from. Use it as a context: its files stay open."""

    def __init__(self, folder: Path, canonical: Callable[[str], str]) -> None:
        self._stored, self._canonical = FolderTensors(folder), canonical
        self._known = {canonical(name): name for name in self._stored.shapes}
        self._scratch = Scratch()
        self._handles: dict[Path, int] = {}
        self._one_reads = threading.Lock()  # weights in fewer bits are computed, and the last one is kept

    def __exit__(self, *_: object) -> None:
        self._stored.__exit__()
        for handle in self._handles.values():
            os.close(handle)

    def find(self, name: str, kind: str, shape: tuple[int, ...]) -> _Stored | str:
        """Return the tensor that another one is compared with, or what is known of it without reading."""
        key = self._known.get(self._canonical(name))
        if key is None:
            return _NEW
        if (self._stored.shapes[key], self._stored.kinds[key]) != (shape, kind):
            return _CHANGED
        extent = self._stored.extent(key)
        with self._one_reads:
            if extent is None or CODES[extent.plan.dtype] != kind:  # it is computed from what lies there
                return _Stored(self._stored.read(key), -1, self._scratch)
            if extent.file not in self._handles:
                self._handles[extent.file] = os.open(extent.file, os.O_RDONLY | os.O_CLOEXEC)
            return _Stored(extent, self._handles[extent.file], self._scratch)

    def besides(self, exported: Collection[str]) -> list[str]:
        """Return the names of tensors that are here alone."""
        there = {self._canonical(name) for name in exported}
        return [key for name, key in self._known.items() if name not in there]


def _file_record(folder: Path, base: Path | None, name: str) -> ExportedFile:
    found = hash_file(folder / name).sha256
    if base is None:
        return ExportedFile(found)
    return ExportedFile(found, _word(hash_file(base / name).sha256 == found) if (base / name).is_file() else _NEW)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # as bytes a NaN is the same as itself


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


T = TypeVar("T")


def _each_tensor(folder: Path, work: Callable[[str, str, Tensor], T]) -> tuple[dict[str, T], list[str]]:
    """Return what `work` makes of the tensors of a folder as they are stored (name, type, tensor), by their names, and
    what is wrong with files that cannot be read."""
    problems: list[str] = []
    try:
        paths = folder_layout(folder).weight_files()
    except TesseraError as error:
        problems.append(error.what)
        paths = sorted(folder.glob("*.safetensors"))
    found: dict[str, T] = {}
    whole = sum(path.stat().st_size for path in paths if path.is_file())
    with WorkProgress("reading what is stored", whole) as progress, ThreadPoolExecutor(_THREADS) as pool:
        for path in paths:
            try:
                with open_safetensors(path) as file:
                    names, positions = list(file.keys()), data_positions(path)
                    read = functools.partial(_read, path, file, positions)
                    made = pool.map(lambda name, read=read: work(name, *read(name)), names)
                    for name, one in zip(names, made, strict=True):
                        found[name] = one
                        progress.count(path.stat().st_size // len(names))
            except TesseraError as error:
                problems.append(f"{path.name}: {error.what}")
    return found, problems


def _read(path: Path, file: Any, positions: Mapping[str, int], name: str) -> tuple[str, Tensor]:
    shape, kind = stored_shape(file, name), str(file.get_slice(name).get_dtype())
    if kind in DTYPES:  # its own pages alone: those that the whole file maps would stay in memory
        return kind, map_elements(path, positions[name], math.prod(shape), DTYPES[kind]).view(shape)
    return kind, file.get_tensor(name)


def _summed(version: int, name: str, kind: str, tensor: Tensor) -> ExportedTensor:
    """Return a tensor with the checksum that records of a version have."""
    data = _bytes(tensor).numpy().data
    checksum = hashlib.sha256(data).hexdigest() if version == _HASHED else f"{crc32(data):08x}"
    return ExportedTensor(kind, tuple(tensor.shape), checksum)


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
        version = content["version"]
        if content["format"] != FORMAT or version not in (VERSION, _HASHED):
            raise ValueError(f"format {content['format']} version {version}")
        checksum = "sha256" if version == _HASHED else "crc32"
        tensors = {
            name: ExportedTensor(one["dtype"], tuple(one["shape"]), one[checksum], one.get("base"))
            for name, one in content["tensors"].items()
        }
        files = {name: ExportedFile(one["sha256"], one.get("base")) for name, one in content["files"].items()}
        return ExportRecord(content["base"], tensors, files, content["not_exported"], version)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TesseraError(f"not a record of an export: {error!r}", where=str(path)) from None


def changes_since(folder: Path, record: ExportRecord) -> list[str]:
    """Return everything in a folder that is not as its record says, in words."""
    found, problems = _each_tensor(folder, functools.partial(_summed, record.version))
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

    Tensors that the model has no use for, or has under another name, are no difference; nor are stacked experts that
    lie the other way, as transformers 5 saves them: their shape says which way it is.
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
        shapes = {name: weight_map.shape_written(name, stored.shapes[key]) for name, key in used.items()}
        return {name: ExportedTensor(stored.kinds[key], shapes[name]) for name, key in used.items()}


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
            near = alike[0] if wanted.crc32 and alike else nearest(name, alike)
            if near is not None:
                del extra[near]
            problems.append(f"{name} is missing" + ("" if near is None else f"; {near} may be it, renamed"))
        elif one.shape != wanted.shape:
            turned = " (transposed?)" if sorted(one.shape) == sorted(wanted.shape) else ""
            problems.append(f"{name} has the shape {list(one.shape)}, {verb} as {list(wanted.shape)}{turned}")
        elif one.dtype != wanted.dtype and types:
            problems.append(f"{name} is stored as {one.dtype}, {verb} as {wanted.dtype}")
        elif one.crc32 != wanted.crc32:
            problems.append(f"{name} has other bytes than {verb.replace('was', 'were')}")
    return problems + [f"{name} is not a tensor that {verb}" for name in extra]
