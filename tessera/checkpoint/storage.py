"""Torch's distributed checkpoint planners over our files: any layout is written, any other reads it back.

Torch decides which rank writes which chunk and which boxes of which chunks a rank needs. Here those become one
safetensors file per writing rank and slices of such files. Only tensors pass, so nothing is ever pickled.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tessera.checkpoint import metadata as tensor_table
from tessera.checkpoint.files import Fault, FileRecord, no_fault, write_file
from tessera.checkpoint.metadata import Place
from tessera.checkpoint.ranks import Failure, Ranks, raise_together
from tessera.checkpoint.safetensors_file import Entry, SafetensorsStream, open_safetensors, read_box, storage_order
from tessera.core.errors import TesseraError, nearest

TABLE = "tensors.json"


@dataclass(frozen=True)
class _Written:
    place: Place
    file: FileRecord


class ShardWriter(StorageWriter):
    """Writes each rank's share into `folder`. Afterwards, on rank 0, `records` describes every file written."""

    def __init__(self, folder: Path, fault: Fault = no_fault) -> None:
        self._folder = folder
        self._fault = fault
        self.records: list[FileRecord] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"shard-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name: str = plan.storage_data
        items = {_key(item): item for item in plan.items}
        entries = storage_order([_entry(key, item) for key, item in items.items()])
        stream = SafetensorsStream(self._folder / name, entries, fault=self._fault)
        try:
            stream.open()
            for entry in entries:
                tensor = planner.resolve_data(items[entry.key])
                assert isinstance(tensor, Tensor)
                stream.put(entry.key, tensor)
            record = stream.close()
        except BaseException:
            stream.abandon()
            raise
        return [WriteResult(items[e.key].index, e.nbytes, _Written(Place(name, e.key), record)) for e in entries]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for share in results for result in share}
        places = {index: w.place for index, w in written.items()}
        files = {w.file.name: w.file for w in written.values()}
        table = write_file(self._folder / TABLE, tensor_table.to_json(metadata, places), self._fault)
        self.records = [*(files[name] for name in sorted(files)), table]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


class ShardReader(StorageReader):
    """Reads from `folder` the boxes that this rank needs and no others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[MetadataIndex, Place] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_table(self._folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._places[item.storage_index].file].append(item)
        for name, items in by_file.items():
            if Path(name).name != name:
                raise TesseraError(f"a file outside of the checkpoint: {name!r}", where=str(self._folder / TABLE))
            with open_safetensors(self._folder / name) as file:
                for item in items:
                    source = read_box(file, self._places[item.storage_index].key, item.storage_offsets, item.lengths)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / TABLE).is_file()


def save_tensors(tensors: Mapping[str, Tensor], writer: ShardWriter) -> None:
    """Every rank's share, then the table; a failure of any rank is raised on all of them."""
    _refuse_other_things(tensors)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _together():
        dcp_save(dict(tensors), storage_writer=writer, planner=planner, no_dist=Ranks.current().alone)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills the given tensors in place from a checkpoint written in any layout."""
    _refuse_other_things(tensors)
    Ranks.current().each(lambda: check_fit(folder, tensors))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _together():
        dcp_load(dict(tensors), storage_reader=ShardReader(folder), planner=planner, no_dist=Ranks.current().alone)


def read_table(folder: Path) -> Metadata:
    path = folder / TABLE
    try:
        return tensor_table.from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise TesseraError(f"cannot be read: {error.strerror}", where=str(path)) from error


def check_fit(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every tensor asked for is there, whole, in its shape."""
    stored = read_table(folder).state_dict_metadata
    problems: list[str] = []
    for name, tensor in tensors.items():
        there: Any = stored.get(name)
        if there is None:
            near = nearest(name, stored)
            problems.append(f"{name} is not in the checkpoint" + (f" (it has {near})" if near else ""))
        elif there.size != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)} here, {list(there.size)} in the checkpoint")
        elif sum(prod(chunk.sizes) for chunk in there.chunks) != prod(there.size):
            problems.append(f"{name} is stored with holes")
    if problems:
        shown = [*problems[:10], *([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        raise TesseraError(
            "the checkpoint does not fit this model:\n    " + "\n    ".join(shown),
            where=str(folder),
            fix="use the configuration that the checkpoint was written with (config.yaml in its folder)",
        )


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of the whole tensors, not of this rank's part."""
    _refuse_other_things(tensors)
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def _refuse_other_things(tensors: Mapping[str, Any]) -> None:
    for name, value in tensors.items():
        assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}; only tensors are stored here"


def _key(item: WriteItem) -> str:
    assert item.tensor_data is not None, "only tensors are stored"
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def _entry(key: str, item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    return Entry(key, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))


class _together:
    """Torch gathers failures of all ranks into a `CheckpointException`; here they become the one error that fits."""

    def __enter__(self) -> None:
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        # Working without a process group is meant, not forgotten.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # So are ranks that have other names: the stages of a pipeline.
        warnings.filterwarnings("ignore", message="Detected mismatched keys")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._quiet.__exit__(kind, error, trace)
        if isinstance(error, CheckpointException):
            raise_together([Failure.of(cause, rank) for rank, (cause, _) in error.failures.items()])
