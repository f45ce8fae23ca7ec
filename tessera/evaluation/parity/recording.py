"""Define the files of a recording, and read and write them.

A recording is a folder: `recording.json`, and for each rank `rank-N.json` (what was recorded, with statistics) and
`rank-N.safetensors` (the kept elements). It holds no code and no pickle, so recordings of other machines, torch
versions or trainers can be compared. A folder is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from tessera.checkpoint.files import DTYPES, open_safetensors, remove_folder
from tessera.errors import TesseraError
from tessera.runtime.files import finite_json, read_bytes, read_json_mapping
from tessera.version import __version__

FORMAT, VERSION = "tessera-recording", 1
INDEX = "recording.json"
MOST_RANKS = 65536
_MAX_JSON = 1 << 30
# data: a batch tensor; weight: before the step; output: of a module; output_gradient: of that output;
# gradient: of a parameter; update: change of a parameter by the optimizer; direction: of an update, to explain it
Moment = Literal["data", "weight", "output", "output_gradient", "gradient", "direction", "update"]


@dataclass
class TensorEntry:
    """Describe one tensor of one rank: its identity, its statistics, and the effect of rounding on it."""

    step: int
    moment: Moment
    name: str  # name of a module or parameter in the unsharded model
    dtype: str
    shape: list[int]  # shape on this rank
    order: float = 0.0  # position in the order of execution
    rows: str = ""  # rows of the data set in the micro-batch; empty for parameters
    call: int = 0  # index of the module's call in this micro-batch
    part: int = 0  # index of the tensor among those that the module returned
    stage: int = 0  # pipeline stage
    whole: list[int] | None = None  # shape of the unsharded tensor if it is known
    offsets: list[int] | None = None  # position of this shard in the unsharded tensor
    max: float = 0.0
    min: float = 0.0
    mean: float = 0.0
    norm: float = 0.0
    not_finite: int = 0
    requires_grad: bool = False
    lr: float | None = None  # learning rate of an update
    # Change of the tensor if every weight is changed by one rounding; None: not measured.
    moved_max: float | None = None
    moved_rms: float | None = None
    moved_norm: float | None = None
    key: str | None = None  # key in the safetensors file; None: statistics only
    stride: int = 1  # every stride-th slice of the first dimension is recorded

    @property
    def identity(self) -> tuple[int, str, str, int, int]:
        """Return the fields that two entries must share to be compared."""
        return self.step, self.moment, self.name, self.call, self.part


@dataclass
class RecordedBatch:
    """Describe the samples of one micro-batch. `bounds`: bounds of its samples in the packed row."""

    step: int
    rows: str
    samples: list[str]
    bounds: list[int] = field(default_factory=list)


@dataclass
class StepNumbers:
    """Hold the scalars of a step. `moved`: the effect of rounding on some of them."""

    step: int
    values: dict[str, float]
    counts: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)


@dataclass
class RankRecord:
    """Hold what one rank recorded. `position`: its index on each mesh axis. `split`: how cp ranks split sequences."""

    rank: int
    position: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    split: list[int] | None = None  # arguments of `SequenceSharding`: ring, ulysses, unit
    # Encoder whose input is split over ranks -> (batch tensor with the order of its elements, position of this rank).
    encoders: dict[str, tuple[str, int]] = field(default_factory=dict)
    compute: str = "F32"
    # Module -> its attributes that are plain numbers: eps, scales, dropout, whether it trains.
    settings: dict[str, dict[str, bool | int | float]] = field(default_factory=dict)
    entries: list[TensorEntry] = field(default_factory=list)
    batches: list[RecordedBatch] = field(default_factory=list)
    steps: list[StepNumbers] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict, repr=False)  # tensors by key; not in the JSON file


@dataclass
class Recording:
    """Hold a recording: its ranks, and the program that made it."""

    label: str
    ranks: list[RankRecord]
    made_by: dict[str, str] = field(default_factory=dict)
    # Name of a module or parameter in this recording -> its name in the recording to compare, if it differs.
    pairs: dict[str, str] = field(default_factory=dict)

    @property
    def compute(self) -> str:
        return self.ranks[0].compute if self.ranks else "F32"


_RANK = TypeAdapter(RankRecord)


def write_rank(record: RankRecord, folder: Path) -> None:
    """Write the two files of a rank. Other processes can read them after `publish`."""
    content = dataclasses.asdict(dataclasses.replace(record, tensors={}))
    del content["tensors"]
    tensors = {key: tensor.contiguous() for key, tensor in record.tensors.items()}
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # pydantic reads "nan" and "inf" as numbers
        (folder / f"rank-{record.rank}.json").write_text(json.dumps(finite_json(content)), encoding="utf-8")
        save_file(tensors, _tensors_of(folder, record.rank))


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TesseraError(
            f"the recording cannot be written: {reason}",
            where=str(folder),
            fix="free space on the disk, or name another folder with --out",
            code="parity.recording-not-writable",
        ) from None


def _tensors_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def unfinished(folder: Path) -> Path:
    """Return the temporary folder in which a recording is written before `publish` renames it."""
    return folder.with_name(f"{folder.name}~recording")


def check_target(folder: Path) -> None:
    """Raise if the folder of a new recording exists already."""
    if folder.exists() or folder.is_symlink():
        raise TesseraError(
            "this folder exists already",
            where=str(folder),
            fix="name another folder, or remove this one",
            code="parity.folder-exists",
        )


def publish(folder: Path, label: str, ranks: int, made_by: Mapping[str, str], pairs: Mapping[str, str]) -> None:
    """Complete a recording after all ranks have written their files: list the ranks, and rename the folder."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "label": label,
        "ranks": ranks,
        "made_by": {"tessera": __version__, "torch": torch.version.__version__, **made_by},
        "pairs": dict(pairs),
    }
    part = unfinished(folder)
    with _writing(folder):
        (part / INDEX).write_text(json.dumps(content, indent=1), encoding="utf-8")
        check_target(folder)
        os.rename(part, folder)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Return a context in which no other process of this machine records into a folder.

    Files of a killed process are removed at the start, and unpublished files at the end.
    """
    check_target(folder)
    part = unfinished(folder)
    with _writing(folder):
        part.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has just published or removed the folder
            raise _in_use(folder) from None
    try:
        if not _locked(handle, part):
            raise _in_use(folder)
        try:
            with _writing(folder):
                for path in part.iterdir():
                    path.unlink()
            yield
        finally:
            if _is_at(part, handle):  # after `publish` the folder has another name
                remove_folder(part)
    finally:
        os.close(handle)


def _in_use(folder: Path) -> TesseraError:
    return TesseraError(
        "another process records into this folder",
        where=str(folder),
        fix="name another folder, or wait for the end of that process",
        code="parity.folder-in-use",
    )


def _locked(handle: int, folder: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return _is_at(folder, handle)


def _is_at(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(handle))
    except FileNotFoundError:
        return False


def write_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording whose ranks are all in this process."""
    with claimed(folder):
        for record in recording.ranks:
            write_rank(record, unfinished(folder))
        publish(folder, recording.label, len(recording.ranks), recording.made_by, recording.pairs)
    return folder


def is_recording(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def read_recording(folder: Path) -> Recording:
    """Read a recording. Raise if a file is damaged, shortened, or does not fit the others."""
    index = folder / INDEX
    if not index.is_file():
        raise TesseraError(
            f"this is not a recording: {INDEX} is missing",
            where=str(folder),
            fix="`tessera record RECIPE --out FOLDER` makes one",
            code="parity.no-recording",
        )
    content = read_json_mapping(index)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise _damaged(index, f"its format is {content.get('format')} {content.get('version')}, not {FORMAT} {VERSION}")
    count, label = content.get("ranks"), content.get("label")
    made_by, pairs = content.get("made_by"), content.get("pairs")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MOST_RANKS:
        raise _damaged(index, "it states no valid number of ranks")
    if not isinstance(label, str) or not isinstance(made_by, dict) or not isinstance(pairs, dict):
        raise _damaged(index, "its fields have wrong types")
    if not all(isinstance(text, str) for text in (*made_by.values(), *pairs.values())):
        raise _damaged(index, "its fields have wrong types")
    return Recording(label, [_read_rank(folder, rank) for rank in range(count)], made_by, pairs)


def _read_rank(folder: Path, rank: int) -> RankRecord:
    path = folder / f"rank-{rank}.json"
    if not path.is_file():
        raise _damaged(path, "the file is missing")
    try:
        record = _RANK.validate_json(read_bytes(path, _MAX_JSON))
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if record.tensors or record.rank != rank:
        raise _damaged(path, "it describes another rank")
    stored = _tensors_of(folder, rank)
    if not stored.is_file():
        raise _damaged(stored, "the file is missing")
    with open_safetensors(stored) as file:
        keys = set(file.keys())
        for entry in record.entries:
            if entry.key is None:
                continue
            if entry.key not in keys:
                raise _damaged(stored, f"it lacks the tensor of {entry.name}")
            tensor = file.get_tensor(entry.key)
            if entry.stride < 1:
                raise _damaged(path, f"the stride of {entry.name} is {entry.stride}")
            if tensor.dtype != DTYPES.get(entry.dtype) or list(tensor.shape) != kept_shape(entry):
                raise _damaged(stored, f"the tensor of {entry.name} has another shape or type than in {path.name}")
            record.tensors[entry.key] = tensor
    return record


def kept_shape(entry: TensorEntry) -> list[int]:
    """Return the shape that a tensor has in the file: with a stride, only every `stride`-th row is stored."""
    if entry.stride <= 1 or not entry.shape:
        return entry.shape
    first = -(entry.offsets[0] if entry.offsets else 0) % entry.stride
    return [len(range(first, entry.shape[0], entry.stride)), *entry.shape[1:]]


def _damaged(path: Path, why: str) -> TesseraError:
    return TesseraError(
        f"the recording is damaged: {why}",
        where=str(path),
        fix="record again, or copy the folder again from its machine",
        code="parity.damaged-recording",
    )
