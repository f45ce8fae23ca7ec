"""Read and write folders of `torch.distributed.checkpoint` without unpickling.

A folder has a pickled file `.metadata`, and `.distcp` files. Each part of a tensor in a `.distcp` file is an archive of
`torch.save`. `pickles.describe` decodes the metadata, `torch_files` the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import CODES
from tessera.checkpoint.legacy.pickles import LARGEST_PICKLE, Described, Name, describe
from tessera.checkpoint.legacy.torch_files import MOST_AXES, StoredTensor, read_torch_archive
from tessera.checkpoint.legacy.torch_plan import ALIGNMENT, PickleWriter, plan_torch_file
from tessera.checkpoint.parts import TensorInParts, TensorPart, check_cover
from tessera.errors import TesseraError, first_line
from tessera.runtime.files import check_inside, open_regular
from tessera.runtime.torch_internals import DCP_LAYOUT, DCP_MEMORY_FORMAT, DCP_STORAGE_INFO, DCP_STORAGE_PREFIX
from tessera.weights.file_plan import FilePlan, FolderPlan, Place, PlannedTensor

METADATA = ".metadata"
_PACKAGE = "torch.distributed.checkpoint"
_NAMES = frozenset(
    (
        *(f"{_PACKAGE}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_PACKAGE}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(".".join(name) for name in (DCP_MEMORY_FORMAT, DCP_STORAGE_INFO, DCP_STORAGE_PREFIX, DCP_LAYOUT)),
        *(f"{_PACKAGE}.metadata.ChunkStorageMetadata", f"{_PACKAGE}.filesystem.SerializationFormat"),
        *("torch.Size", "pathlib.PosixPath", "pathlib.WindowsPath", "collections.OrderedDict"),
    )
)
_DTYPES = {str(dtype): dtype for dtype in CODES}


@dataclass(frozen=True)
class _Part(TensorPart):
    start: int
    length: int


@dataclass(frozen=True)
class DcpTensor(TensorInParts[_Part]):
    """Read a tensor of a DCP folder from its parts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]

    def open_part(self, part: _Part) -> Callable[[Sequence[int], Sequence[int]], Tensor]:
        return self.stored_part(part).read

    def stored_part(self, part: _Part) -> StoredTensor:
        """Return the tensor that the file of a part contains; raise if dtype or shape differ from the metadata."""
        with open_regular(part.file) as opened:
            stored = read_torch_archive(opened, part.file, part.start, part.length)
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != (self.dtype, part.sizes):
            raise TesseraError(
                f"a part of {self.name!r} has another dtype or shape in this file than in {METADATA}",
                where=str(part.file),
                code="checkpoint.dcp-part-differs",
            )
        stored.check_size()
        return stored


def read_dcp(folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of a folder by name. Other entries (step counts, random states) are left out."""
    path = folder / METADATA
    check_inside(path, folder)
    with open_regular(path) as opened:
        data = opened.read(LARGEST_PICKLE + 1)
    try:
        return _tensors(folder, describe(data, _allowed, str(path)))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise TesseraError(
            f"{METADATA} is damaged: {first_line(error)}", where=str(path), code="checkpoint.dcp-metadata-unreadable"
        ) from None


def _allowed(name: Name) -> bool:
    return str(name) in _NAMES or str(name) in _DTYPES


def _tensors(folder: Path, metadata: Described) -> dict[str, DcpTensor]:
    # Keys have offsets as strings: a malicious file could choose tuples of numbers with equal hashes, which are slow.
    stored: dict[tuple[str, str], tuple[Path, int, int]] = {}
    files: dict[str, Path] = {}
    for index, info in metadata.state["storage_data"].items():
        if index.state.get("offset") is None:
            continue
        where = info.state
        if where.get("transform_descriptors"):
            raise TesseraError(
                f"{_text(index.state['fqn'])!r} is compressed, which is not supported",
                where=str(folder),
                code="checkpoint.dcp-compressed",
            )
        name = _text(where["relative_path"])
        if Path(name).name != name or name in (".", ".."):
            raise ValueError(f"the file {name!r} is outside of the folder")
        if name not in files:
            check_inside(folder / name, folder)
            files[name] = folder / name
        span = (files[name], _natural(where["offset"]), _natural(where["length"]))
        stored[_text(index.state["fqn"]), str(_size(index.state["offset"]))] = span
    tensors = {}
    for name, described in metadata.state["state_dict_metadata"].items():
        if described.name.name != "TensorStorageMetadata":
            continue
        properties = described.state["properties"].state
        dtype_name = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        if not isinstance(dtype_name, Name) or str(dtype_name) not in _DTYPES:
            raise ValueError(f"{_text(name)!r} has no supported dtype")
        dtype = _DTYPES[str(dtype_name)]
        chunks = [(_size(chunk.state["offsets"]), _size(chunk.state["sizes"])) for chunk in described.state["chunks"]]
        shape = _size(described.state["size"])
        check_cover(_text(name), shape, chunks, str(folder / METADATA))
        missing = [offsets for offsets, _ in chunks if (name, str(offsets)) not in stored]
        if missing:
            raise ValueError(f"no file contains the part of {name!r} at {missing[0]}")
        parts = tuple(_Part(offsets, sizes, *stored[name, str(offsets)]) for offsets, sizes in chunks)
        spans = sorted((part.file, part.start, part.start + part.length) for part in parts)
        if any(first[0] == second[0] and first[2] > second[1] for first, second in pairwise(spans)):
            raise ValueError(f"two parts of {name!r} overlap in the file")
        tensors[name] = DcpTensor(name, dtype, shape, parts)
    return tensors


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of a name")
    return value


def _size(described: Any) -> tuple[int, ...]:
    numbers = described.arguments[0] if isinstance(described, Described) else described
    if len(numbers) > MOST_AXES:
        raise ValueError(f"a shape with {len(numbers)} dimensions")
    return tuple(_natural(number) for number in numbers)


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 60:
        raise ValueError(f"{number if type(number) is int else type(number).__name__} instead of a size")
    return number


# ---------------------------------------------------------------------------------------------- writing


def plan_dcp(plans: Mapping[str, PlannedTensor], prefix: str = "") -> FolderPlan:
    """Plan a folder that `torch.distributed.checkpoint` can load. `prefix`: added to all tensor names."""
    name = "__0_0.distcp"
    spans: list[tuple[int, int]] = []
    pieces: list[tuple[int, bytes]] = []
    places: dict[str, list[Place]] = {}
    end = 0
    for key, plan in plans.items():
        start = end + -end % ALIGNMENT
        planned = plan_torch_file(plan, start)
        end = planned.end
        spans.append((start, end - start))
        pieces += planned.pieces
        places[key] = [Place(name, stored.offset, 0, stored.checksums) for stored in planned.tensors]
    named = {prefix + key: plan for key, plan in plans.items()}
    metadata = PickleWriter().dumps(_metadata(named, name, spans))
    files = {name: FilePlan(end, tuple(pieces)), METADATA: FilePlan.of_bytes(metadata)}
    return FolderPlan(files, places)


def _metadata(plans: Mapping[str, PlannedTensor], file: str, spans: list[tuple[int, int]]) -> Described:
    """Return the content of `.metadata` as torch pickles it."""

    def instance(name: str, state: Any) -> Described:
        return Described(Name(f"{_PACKAGE}.metadata", name), (), state, new=True)

    def size(numbers: Iterable[int]) -> Described:
        return Described(Name("torch", "Size"), (tuple(numbers),))

    strided = Described(Name(*DCP_LAYOUT), ("torch.strided",))
    usual_format = Described(Name(*DCP_MEMORY_FORMAT), (0,))
    tensors, stored = {}, {}
    for (name, plan), (start, length) in zip(plans.items(), spans, strict=True):
        dtype = Name("torch", str(plan.dtype).removeprefix("torch."))
        zeros = size(0 for _ in plan.shape)
        chunk = instance("ChunkStorageMetadata", {"offsets": zeros, "sizes": size(plan.shape)})
        properties = instance("TensorProperties", (dtype, strided, False, usual_format, False))
        state = {"properties": properties, "size": size(plan.shape), "chunks": [chunk]}
        tensors[name] = instance("TensorStorageMetadata", state)
        index = instance("MetadataIndex", {"fqn": name, "offset": zeros, "index": 0})
        where = {"relative_path": file, "offset": start, "length": length}
        stored[index] = Described(Name(*DCP_STORAGE_INFO), (), where, new=True)
    state = {"state_dict_metadata": tensors, "planner_data": {name: (name,) for name in plans}, "storage_data": stored}
    return instance("Metadata", state | {"storage_meta": None, "version": "1.0.0"})
