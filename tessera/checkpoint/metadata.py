"""`tensors.json`: torch's checkpoint `Metadata` (which tensors, in which chunks, where each lies) as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tessera.checkpoint.safetensors_file import CODES
from tessera.core.errors import TesseraError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True)
class Place:
    """Where a chunk lies."""

    file: str
    key: str


def to_json(metadata: Metadata, places: dict[MetadataIndex, Place]) -> bytes:
    tensors: dict[str, Any] = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), "only tensors are stored"
        tensors[name] = {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": [
                {
                    "offsets": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "file": places[MetadataIndex(name, chunk.offsets)].file,
                    "key": places[MetadataIndex(name, chunk.offsets)].key,
                }
                for chunk in tensor.chunks
            ],
        }
    return json.dumps({"tensors": tensors}, indent=1).encode()


def from_json(text: bytes, where: str) -> Metadata:
    """The metadata back again; `storage_data` maps each chunk to its `Place`."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    try:
        for name, entry in json.loads(text)["tensors"].items():
            chunks = []
            for chunk in entry["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])))
                places[MetadataIndex(name, chunk["offsets"])] = Place(str(chunk["file"]), str(chunk["key"]))
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=_DTYPES[entry["dtype"]]), torch.Size(entry["shape"]), chunks
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TesseraError(f"not a table of tensors: {error!r}", where=where) from error
    return Metadata(tensors, storage_data=places)
