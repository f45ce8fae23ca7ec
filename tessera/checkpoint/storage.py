"""Save sharded tensors with torch's distributed checkpoint planner, so that any other layout can load them.

Torch's planner decides which rank writes which chunk. Each rank writes its chunks to one safetensors file, and rank 0
writes `tensors.json`, which lists every chunk. Only tensors are stored, so nothing is pickled.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from tessera.checkpoint.files import CODES, MAX_MANIFEST_BYTES, Fault, FileRecord, write_safetensors
from tessera.checkpoint.parts import KeyedPart, SplitTensor, check_cover
from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera.runtime.collective import Ranks
from tessera.runtime.files import read_bytes
from tessera.runtime.torch_internals import foreach_copy_

TABLE = "tensors.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_log = logging.getLogger("tessera")
_MARGIN, _LEFT_FREE = 1.1, 1 << 30  # copy on the device if 1.1 times the bytes of the copies + 1 GiB are free


# ---------------------------------------------------------------------------------------------- writing


class TensorSave:
    """Write the chunks of a checkpoint that the planner assigned to this rank."""

    def __init__(self, file: str, chunks: dict[str, Tensor]) -> None:
        self.file = file
        self.chunks = chunks

    def copy_chunks(self) -> None:
        """Replace the tensors by copies, so that training can continue while the copies are written.

        Copies stay on the device if it has enough free memory: that is fast, and the background thread moves them to
        the host. Otherwise the copies are made in host memory.
        """
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for key, chunk in self.chunks.items():
            groups[chunk.device, chunk.dtype][key] = chunk.detach()
        for (device, _), chunks in groups.items():
            copies = _copies(chunks)
            if copies is None:
                _log.debug("not enough free memory on %s: tensors are copied to host memory", device)
                copies = {key: chunk.to("cpu", copy=True) for key, chunk in chunks.items()}
            self.chunks |= copies

    def host_bytes(self) -> int:
        """Return the bytes of host memory that copies of this rank's chunks need at most."""
        return sum(chunk.nbytes for chunk in self.chunks.values())

    def write(self, folder: Path, fault: Fault) -> list[FileRecord]:
        """Write this rank's chunks to one file. Return a list with its record; an empty list if there are no chunks."""
        return [write_safetensors(folder / self.file, self.chunks, fault)] if self.chunks else []


def _copies(chunks: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Copy tensors on their device. All have the same device and dtype. Return None if the device has too little free
    memory.

    All copies share one allocation, because thousands of allocations take longer than the copying.
    """
    first = next(iter(chunks.values()))
    size = sum(chunk.nbytes for chunk in chunks.values())
    if first.device.type != "cpu" and devices.free_memory(first.device) <= _MARGIN * size + _LEFT_FREE:
        return None
    try:
        buffer = first.new_empty(sum(chunk.numel() for chunk in chunks.values()))
    except torch.OutOfMemoryError:
        return None
    parts = buffer.split([chunk.numel() for chunk in chunks.values()])
    copies = {key: part.view(chunk.shape) for (key, chunk), part in zip(chunks.items(), parts, strict=True)}
    foreach_copy_(list(copies.values()), list(chunks.values()))
    return copies


@dataclass(frozen=True)
class SaveLayout:
    """Hold which chunks of the checkpoint's tensors this rank writes. It holds until names, shapes or dtypes change."""

    rank: int
    planner: DefaultSavePlanner
    plan: SavePlan
    table: bytes | None  # content of `tensors.json` on rank 0; None on other ranks
    described: Mapping[str, tuple[torch.Size, torch.dtype]]  # tensor name -> shape and dtype

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the layout was planned for tensors of these names, shapes and dtypes."""
        return self.described == _described(tensors)

    def save_of(self, tensors: Mapping[str, Tensor]) -> TensorSave:
        """Return this rank's chunks of the tensors. Nothing is copied or written yet."""
        self.planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=self.rank == 0)
        chunks: dict[str, Tensor] = {}
        for item in self.plan.items:
            chunk = self.planner.resolve_data(item)
            assert isinstance(chunk, Tensor), "only tensors are stored"
            chunks[_key(item)] = chunk
        return TensorSave(_shard_file(self.rank), chunks)


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def plan_save(ranks: Ranks, tensors: Mapping[str, Tensor]) -> SaveLayout:
    """Plan which chunks of the tensors this rank writes. Every rank calls this."""
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values()), "only tensors are stored"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def local_plan() -> SavePlan:
        planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=ranks.rank == 0)
        return planner.create_local_plan()

    def global_plan(local_plans: list[SavePlan]) -> list[tuple[SavePlan, bytes | None]]:
        plans, metadata = planner.create_global_plan(local_plans)
        locations = {
            item.index: (_shard_file(rank), _key(item)) for rank, plan in enumerate(plans) for item in plan.items
        }
        table = _table_to_json(metadata, locations)
        return [(plan, table if rank == 0 else None) for rank, plan in enumerate(plans)]

    plan, table = ranks.through_rank0(local_plan, global_plan)
    return SaveLayout(ranks.rank, planner, planner.finish_plan(plan), table, _described(tensors))


def _table_to_json(metadata: Metadata, locations: Mapping[MetadataIndex, tuple[str, str]]) -> bytes:
    tensors: dict[str, Any] = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), "only tensors are stored"
        chunks = []
        for chunk in tensor.chunks:
            file, key = locations[MetadataIndex(name, chunk.offsets)]
            chunks.append({"offsets": list(chunk.offsets), "shape": list(chunk.sizes), "file": file, "key": key})
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return json.dumps({"tensors": tensors}, indent=1).encode()


def _shard_file(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def _key(item: WriteItem) -> str:
    assert item.tensor_data is not None, "only tensors are stored"
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the tensors without sharding."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


# ---------------------------------------------------------------------------------------------- reading


def read_table(folder: Path) -> Metadata:
    """Read `tensors.json` of a checkpoint; see `parse_table`."""
    return parse_table(read_bytes(folder / TABLE, MAX_MANIFEST_BYTES), str(folder / TABLE))


def parse_table(data: bytes, where: str) -> Metadata:
    """Parse the bytes of `tensors.json`: the shape, dtype and chunks of each tensor.

    `storage_data` of the result maps each chunk to its file and its key in the file.
    """
    tensors: dict[str, Any] = {}
    locations: dict[MetadataIndex, tuple[str, str]] = {}
    try:
        for name, entry in json.loads(data)["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                if not len(chunk["offsets"]) == len(chunk["shape"]) == len(entry["shape"]):
                    raise ValueError(f"a chunk of {name} has another number of dimensions than the tensor")
                file = str(chunk["file"])
                if Path(file).name != file:
                    raise ValueError(f"a chunk is in a file outside of the checkpoint: {file!r}")
                chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])))
                locations[MetadataIndex(name, chunk["offsets"])] = file, str(chunk["key"])
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
            check_cover(name, tuple(tensors[name].size), boxes, where)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise TesseraError(f"{TABLE} is damaged: {error!r}", where=where, code="checkpoint.damaged-table") from error
    return Metadata(tensors, storage_data=locations)


def split_tensors(folder: Path) -> dict[str, SplitTensor]:
    """Return dtype, shape and location of a checkpoint's tensors, by name. Only `tensors.json` is read, no data."""
    table = read_table(folder)
    tensors: dict[str, SplitTensor] = {}
    for name, stored in table.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), "only tensors are stored"
        parts = []
        for chunk in stored.chunks:
            file, key = table.storage_data[MetadataIndex(name, chunk.offsets)]
            parts.append(KeyedPart(tuple(chunk.offsets), tuple(chunk.sizes), folder / file, key))
        tensors[name] = SplitTensor(stored.properties.dtype, tuple(stored.size), tuple(parts))
    return tensors
