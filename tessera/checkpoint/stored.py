"""Read a checkpoint and verify its hashes in the same pass.

The manifest contains the SHA-256 of each file. Each tensor file is read in full by the rank that needs most of it: this
rank hashes all bytes and copies its own boxes at the same time. Other ranks read only their boxes. So no rank reads a
byte twice. The filled tensors are valid only after all hashes have been compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from tessera.checkpoint.files import (
    CHUNK_BYTES,
    CODES,
    DamagedFileError,
    FileRecord,
    Manifest,
    NewerFormatError,
    RecordedFile,
    box_slices,
    data_positions,
    open_safetensors,
    problems_in,
    read_box,
    read_manifest,
    stored_shape,
)
from tessera.checkpoint.state import parse_state
from tessera.checkpoint.storage import TABLE, parse_table
from tessera.errors import TesseraError, nearest
from tessera.runtime.collective import Ranks
from tessera.runtime.files import check_inside
from tessera.runtime.progress import WorkProgress

STATE = "state.json"
CONFIG = "config.yaml"
_SHOWN = 10  # at most this many problems are listed in a message


@dataclass(frozen=True)
class StoredCheckpoint:
    """Hold a checkpoint whose small files are loaded and verified. `fill` verifies the tensor files."""

    path: Path
    manifest: Manifest
    table: Metadata
    state: dict[str, Any]

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors in the checkpoint."""
        return {*self.table.state_dict_metadata}

    def fill(self, ranks: Ranks, tensors: Mapping[str, Tensor]) -> list[str]:
        """Fill tensors of any layout in place and verify all files; return descriptions of the damage.

        Every rank calls this. If files are damaged, the filled tensors contain arbitrary values.
        """
        ranks.on_all(lambda: self._check_fit(tensors))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        items: dict[str, list[ReadItem]] = defaultdict(list)

        def plan() -> dict[str, int]:
            planner.set_up_planner(dict(tensors), self.table)
            for item in planner.create_local_plan().items:
                items[self.table.storage_data[item.storage_index][0]].append(item)
            sizes = {name: [prod(i.lengths) * self._chunk(i)[0].itemsize for i in items[name]] for name in items}
            return {name: sum(of_file) for name, of_file in sizes.items()}

        needs = ranks.on_all(plan)
        records = {record.name: record for record in self.manifest.files}
        readers = _readers([r for r in self.manifest.files if r.name not in (TABLE, STATE, CONFIG)], needs)

        def read() -> tuple[list[str], TesseraError | None]:
            here = [name for name in dict.fromkeys([*readers, *items]) if items[name] or readers[name] == ranks.rank]
            size = sum(records[n].size if readers[n] == ranks.rank else needs[ranks.rank][n] for n in here)
            problems: list[str] = []
            failure: TesseraError | None = None
            with WorkProgress("loading the checkpoint", size) as progress:
                for name in here:
                    try:
                        if readers[name] == ranks.rank:
                            self._read_in_order(records[name], items[name], planner)
                            progress.count(records[name].size)
                        else:
                            self._read_boxes(name, items[name], planner)
                            progress.count(needs[ranks.rank][name])
                    except DamagedFileError as error:
                        problems.append(str(error))
                    except TesseraError as error:
                        # The header is wrong: hash the file to find out whether it is damaged.
                        altered = problems_in(self.path, [records[name]])
                        problems += altered
                        failure = failure if altered or failure else error
            return problems, failure

        outcomes = ranks.on_all(read)
        problems = [problem for of_rank, _ in outcomes for problem in of_rank]
        if not problems:
            for _, failure in outcomes:
                if failure is not None:
                    raise failure
        return list(dict.fromkeys(problems))

    def _chunk(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of the stored chunk that an item reads from."""
        stored = self.table.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata), "only tensors are stored"
        shape = next(tuple(c.sizes) for c in stored.chunks if c.offsets == item.storage_index.offset)
        return stored.properties.dtype, shape

    def _read_boxes(self, name: str, items: Sequence[ReadItem], planner: DefaultLoadPlanner) -> None:
        """Read this rank's boxes from a file that another rank hashes."""
        with open_safetensors(self.path / name) as file:
            for item in items:
                key = self.table.storage_data[item.storage_index][1]
                source = read_box(file, key, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(source)

    def _read_in_order(self, record: FileRecord, items: Sequence[ReadItem], planner: DefaultLoadPlanner) -> None:
        """Read a file from the first to the last byte, hash it, and copy this rank's boxes."""
        path = self.path / record.name
        boxes: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            boxes[self.table.storage_data[item.storage_index][1]].append(item)
        with RecordedFile(path, record) as file:
            positions = self._checked_positions(path, boxes) if boxes else {}
            for key in sorted(boxes, key=lambda key: positions[key]):
                file.skip(positions[key] - file.position)
                targets = [(i.storage_offsets, i.lengths, planner.resolve_tensor(i).detach()) for i in boxes[key]]
                _copy_rows(file, *self._chunk(boxes[key][0]), targets)
            file.finish()

    def _checked_positions(self, path: Path, boxes: Mapping[str, list[ReadItem]]) -> dict[str, int]:
        """Return the positions of all tensors in a file. Raise unless the chunks in `boxes` match `tensors.json`."""
        with open_safetensors(path) as header:
            names = {*header.keys()}
            for key, items in boxes.items():
                dtype, shape = self._chunk(items[0])
                wrong = key not in names or header.get_slice(key).get_dtype() != CODES.get(dtype)
                if wrong or stored_shape(header, key) != shape:
                    raise TesseraError(
                        f"{key} has another shape or dtype in this file than in {TABLE}",
                        where=str(path),
                        code="checkpoint.damaged-table",
                    )
        return data_positions(path)

    def _check_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise unless the checkpoint has every tensor with the same shape, and the manifest lists all tensor files."""
        stored = self.table.state_dict_metadata
        problems: list[str] = []
        for name, tensor in tensors.items():
            entry: Any = stored.get(name)
            if entry is None:
                near = nearest(name, stored)
                problems.append(f"{name} is not in the checkpoint" + (f" (it has {near})" if near else ""))
            elif entry.size != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} here, {list(entry.size)} in the checkpoint")
        if problems:
            more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            raise TesseraError(
                "the checkpoint does not fit this model:\n    " + "\n    ".join([*problems[:_SHOWN], *more]),
                where=str(self.path),
                fix="use the recipe of the checkpoint: config.yaml in its folder",
                code="checkpoint.model-mismatch",
            )
        files = {record.name for record in self.manifest.files}
        if unlisted := [file for file, _ in self.table.storage_data.values() if file not in files]:
            raise TesseraError(
                f"{TABLE} names the file {unlisted[0]!r}, which the manifest does not list",
                where=str(self.path / TABLE),
                code="checkpoint.damaged-manifest",
            )


def open_checkpoint(ranks: Ranks, path: Path, step: int | None = None) -> tuple[StoredCheckpoint | None, list[str]]:
    """Read and verify the small files of a checkpoint; return it, or None and descriptions of the damage.

    Every rank calls this. `step`: the step in the folder name, which must be that of the manifest.
    """
    contents: dict[str, bytes] = {}
    manifests: list[Manifest] = []

    def read() -> list[str]:
        try:
            manifest = read_manifest(path)
        except NewerFormatError:
            raise
        except TesseraError as error:
            return [error.what] if ranks.rank == 0 else []
        manifests.append(manifest)
        if ranks.rank == 0:
            for record in manifest.files:
                check_inside(path / record.name, path)
        problems = []
        if step not in (None, manifest.step):
            problems.append(f"its manifest is that of step {manifest.step}")
        records = {record.name: record for record in manifest.files}
        for name in (TABLE, STATE, CONFIG) if ranks.rank == 0 else (TABLE,):
            if name not in records:
                problems.append(f"its manifest does not list {name}")
                continue
            try:
                with RecordedFile(path / name, records[name]) as file:
                    contents[name] = bytes(file.read(records[name].size))
                    file.finish()
            except DamagedFileError as error:
                problems.append(str(error))
        return problems

    if problems := [problem for of_rank in ranks.on_all(read) for problem in of_rank]:
        return None, list(dict.fromkeys(problems))
    table = parse_table(contents[TABLE], str(path / TABLE))
    state = ranks.on_rank0(lambda: parse_state(contents[STATE], str(path / STATE)))
    return StoredCheckpoint(path, manifests[0], table, state), []


def _readers(records: Sequence[FileRecord], needs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return for each file the rank that reads and hashes it: the rank that needs most of its bytes."""
    readers: dict[str, int] = {}
    loads = [0] * len(needs)
    for record in records:
        readers[record.name] = max(range(len(needs)), key=lambda rank: (needs[rank].get(record.name, 0), -loads[rank]))
        loads[readers[record.name]] += record.size
    return readers


def _copy_rows(
    file: RecordedFile,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    targets: Sequence[tuple[Sequence[int], Sequence[int], Tensor]],
) -> None:
    """Read a stored tensor in blocks of rows, and copy boxes of it to `targets`: (offsets, sizes, destination)."""
    if 0 in shape:
        return
    rows, *others = shape or (1,)
    size = prod(others) * dtype.itemsize
    step = max(1, CHUNK_BYTES // size)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        block = torch.frombuffer(file.read(count * size), dtype=dtype).view(count, *others)
        for offsets, sizes, target in targets:
            first, length = (offsets[0], sizes[0]) if shape else (0, 1)
            low, high = max(start, first), min(start + count, first + length)
            if low < high:
                inside = block[low - start : high - start]
                inside = inside[(slice(None), *box_slices(offsets[1:], sizes[1:]))]
                (target if shape else target.view(1))[low - first : high - first].copy_(inside)
