"""Read and write folders of torch.distributed.checkpoint over safetensors (torch's `HuggingFaceStorageWriter`).

    shard-00001-model-00001-of-00002.safetensors

A file holds parts of tensors under the names of the whole tensors. Its header says where each part begins; the shape of
a tensor is what its parts cover. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tessera.checkpoint.files import DTYPES, Entry, open_safetensors, plan_safetensors, storage_order, stored_shape
from tessera.checkpoint.legacy.dcp import METADATA, check_cover
from tessera.checkpoint.legacy.torch_files import MOST_AXES
from tessera.checkpoint.storage import KeyedPart, SplitTensor
from tessera.errors import TesseraError
from tessera.runtime.files import check_inside
from tessera.weights.file_plan import FolderPlan, PlannedTensor
from tessera.weights.layouts import CONFIG_FILE

_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_VERSION = {"DCP_VERSION": "1.0"}
_OF_A_RANK = "shard-*.safetensors"
FILE_BYTES = 5_000_000_000


def is_dcp_safetensors(folder: Path) -> bool:
    """Return whether a folder holds parts of tensors with their places.

    Torch notes places also in a Hugging Face folder that one rank wrote, whose tensors are whole.
    """
    if (folder / METADATA).is_file() or not folder.is_dir():
        return False
    pattern = _OF_A_RANK if (folder / CONFIG_FILE).is_file() else "*.safetensors"
    for path in sorted(folder.glob(pattern))[:1]:
        with suppress(TesseraError), open_safetensors(path) as file:  # whoever reads it says what is wrong with it
            return _PLACES in (file.metadata() or {})
    return False


def read_dcp_safetensors(folder: Path) -> dict[str, SplitTensor]:
    """Return the tensors of a folder by name."""
    parts: dict[str, list[KeyedPart]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_inside(path, folder)
        with open_safetensors(path) as file:
            places = _places(file, path)
            for name in file.keys():  # noqa: SIM118 - not a dict
                sizes, kind = stored_shape(file, name), file.get_slice(name).get_dtype()
                parts[name].append(KeyedPart(_offsets(places, name, len(sizes), path), sizes, path, name))
                if kind not in DTYPES or kinds.setdefault(name, kind) != kind:
                    raise TesseraError(
                        f"{name} is stored as {kind} here: not read, or not so elsewhere", where=str(path)
                    )
    found: dict[str, SplitTensor] = {}
    for name, given in parts.items():
        if len({len(part.sizes) for part in given}) > 1:
            raise TesseraError(f"the parts of {name} have different numbers of axes", where=str(folder))
        ends = zip(*([o + s for o, s in zip(part.offsets, part.sizes, strict=True)] for part in given), strict=True)
        shape = tuple(max(axis) for axis in ends)
        check_cover(name, shape, [(part.offsets, part.sizes) for part in given], str(folder))
        found[name] = SplitTensor(DTYPES[kinds[name]], shape, tuple(given))
    return found


def _places(file: Any, path: Path) -> Mapping[str, Any]:
    text = (file.metadata() or {}).get(_PLACES)
    try:
        places = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        places = None
    if not isinstance(places, dict):
        raise TesseraError(f"its header does not say where parts of tensors begin ({_PLACES})", where=str(path))
    return places


def _offsets(places: Mapping[str, Any], name: str, axes: int, path: Path) -> tuple[int, ...]:
    entry = places.get(name)
    offsets = entry.get(_OFFSETS) if isinstance(entry, dict) else None
    sound = isinstance(offsets, list) and len(offsets) == axes <= MOST_AXES
    if not sound or any(type(n) is not int or not 0 <= n < 1 << 60 for n in offsets or ()):
        raise TesseraError(f"its header does not say where its part of {name!r} begins", where=str(path))
    return tuple(offsets or ())


def plan_dcp_safetensors(
    plans: Mapping[str, PlannedTensor], prefix: str = "", file_bytes: int = FILE_BYTES
) -> FolderPlan:
    """Plan a folder that torch's `HuggingFaceStorageReader` loads, as a single rank would write it.

    `prefix` stands before the names in it.
    """
    shards: list[list[Entry]] = [[]]
    for entry in storage_order([Entry(prefix + name, plan.dtype, plan.shape) for name, plan in plans.items()]):
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + entry.nbytes > file_bytes:
            shards.append([])
        shards[-1].append(entry)
    files = {f"shard-00001-model-{n:05d}-of-{len(shards):05d}.safetensors": made for n, made in enumerate(shards, 1)}
    begin = {file: {entry.key: {_OFFSETS: [0] * len(entry.shape)} for entry in made} for file, made in files.items()}
    plan = plan_safetensors(files, {file: {_PLACES: json.dumps(places)} | _VERSION for file, places in begin.items()})
    return FolderPlan(plan.files, {name: plan.places[prefix + name] for name in plans})
