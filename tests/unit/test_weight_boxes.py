"""A rank reads the bytes of its own shards: operations of a weight map make any box of ours from boxes of theirs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tessera.checkpoint import hf
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.checkpoint.weights import TensorSource, fill
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import (
    ByBox,
    Concat,
    GroupByHead,
    GroupedRows,
    Identity,
    InterleavedToHalfRope,
    Operation,
    Reshape,
    Stack,
    TensorChunk,
    TransposeIfNeeded,
    can_read_boxes,
    shape_of,
)
from tessera.weights.rows import TensorRows
from tessera_compat.shards.form import EvenSplit

OPERATIONS: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "same": (Identity(), [(6, 8)]),
    "experts one by one": (Stack(), [(4, 6)] * 5),
    "experts turned": (TransposeIfNeeded(4, 6), [(5, 6, 4)]),
    "experts as ours": (TransposeIfNeeded(4, 6), [(5, 4, 6)]),
    "first half of turned experts": (TensorChunk(0, 2, 1, TransposeIfNeeded(8, 6)), [(5, 6, 8)]),
    "second half of turned experts": (TensorChunk(1, 2, 1, TransposeIfNeeded(8, 6)), [(5, 6, 8)]),
    "third of rows": (TensorChunk(2, 3, 0), [(12, 4)]),
    "heads of q, k and v": (GroupByHead(4), [(24, 3)]),
    "heads of q, k and v in three": (GroupByHead(4, separate=True), [(8, 3)] * 3),
    "first third of heads": (TensorChunk(0, 3, 0, GroupByHead(4)), [(24, 3)]),
    "keys of groups": (GroupedRows(1, 3, rows=(6, 2, 2)), [(30, 4)]),
    "queries of groups": (GroupedRows(0, 3, rows=(6, 2, 2)), [(30, 4)]),
    "pairs that are rotated": (InterleavedToHalfRope(8, 6), [(24, 3)]),
    "a bias": (GroupedRows(2, 3, rows=(6, 2, 2)), [(30,)]),
    "joined rows": (Concat((3, 5, 4)), [(3, 6), (5, 6), (4, 6)]),
    "joined columns": (Concat((3, 5), 1), [(2, 3), (2, 5)]),
}


class Files:
    """Tensors that count what is read of them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.tensors = {str(n): torch.randn(shape) for n, shape in enumerate(shapes)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.read_numbers = 0

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        piece = self.tensors[name][tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert tuple(piece.shape) == tuple(sizes), "never beyond the end"
        self.read_numbers += piece.numel()
        return piece


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_box_is_made_of_boxes_and_of_no_byte_more(name: str) -> None:
    op, shapes = OPERATIONS[name]
    files, chance = Files(shapes), random.Random(0)
    whole = op.to_native(list(files.tensors.values()))
    assert shape_of(op, shapes) == tuple(whole.shape)
    assert can_read_boxes(op)
    assert isinstance(op, ByBox)
    for _ in range(60):
        offsets = [chance.randrange(size) for size in whole.shape]
        sizes = [chance.randint(1, size - at) for size, at in zip(whole.shape, offsets, strict=True)]
        files.read_numbers = 0
        pieces = [files.read(str(number), o, s) for number, o, s in op.boxes(offsets, sizes, shapes)]
        box = op.join_boxes(pieces, offsets, sizes, shapes)
        assert torch.equal(box, whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])
        assert files.read_numbers == box.numel()


def test_what_mixes_everything_is_read_whole() -> None:
    assert not can_read_boxes(Reshape((2, 6), (2, 2, 3)))
    assert not can_read_boxes(TensorChunk(0, 2, 0, Reshape((2, 6), (2, 2, 3))))


@pytest.mark.parametrize(
    ("split", "shape"),
    [(EvenSplit(), (12, 5)), (EvenSplit(dim=1), (3, 8)), (EvenSplit(blocks=2), (16, 3)), (EvenSplit(units=5), (20, 3))],
    ids=str,
)
def test_a_box_of_what_tensor_ranks_divided_is_made_of_their_slices(split: EvenSplit, shape: tuple[int, int]) -> None:
    whole, chance = torch.randn(shape), random.Random(0)
    files = Files([])
    slices = [rows.whole() for rows in split.divide(TensorRows.of(whole), 2)]
    assert torch.equal(split.join(slices), whole)
    files.tensors = {str(rank): part for rank, part in enumerate(slices)}
    for _ in range(40):
        offsets = [chance.randrange(size) for size in shape]
        sizes = [chance.randint(1, size - at) for size, at in zip(shape, offsets, strict=True)]
        files.read_numbers = 0
        places = split.boxes(offsets, sizes, [tuple(part.shape) for part in slices])
        box = split.join_boxes([files.read(str(rank), at, size) for rank, at, size in places])
        assert torch.equal(box, whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))])
        assert files.read_numbers == box.numel()


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """The third of four ranks, whose partners are made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", ["experts one by one", "experts turned", "second half of turned experts"])
def test_a_rank_reads_its_own_experts_along_any_dimension(name: str, dim: int, four_ranks: Any) -> None:
    op, shapes = OPERATIONS[name]
    files = Files(shapes)
    whole = op.to_native(list(files.tensors.values()))
    target = distribute_tensor(torch.zeros_like(whole), four_ranks, [Shard(dim)], src_data_rank=None)
    fill(target, TensorSource("ours", tuple(files.tensors), op), files.shapes, files.read, "folder")
    mine = distribute_tensor(whole, four_ranks, [Shard(dim)], src_data_rank=None).to_local()
    assert torch.equal(target.to_local(), mine)
    assert files.read_numbers == mine.numel()
    assert 0 < mine.numel() < whole.numel()


def test_bytes_that_leave_the_files_of_a_moe_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, four_ranks: Any
) -> None:
    """Of 8 experts on 4 ranks: a quarter, and not all of them on every rank."""
    names = tuple(f"layers.{{i}}.experts.{n}.up.weight" for n in range(8))
    table = WeightMap((Rule("layers.{i}.experts.up", names, Stack()),))
    theirs = {
        f"layers.{layer}.experts.{n}.up.weight": torch.randn(16, 12)
        for layer, n in itertools.product(range(2), range(8))
    }
    save_file(theirs, tmp_path / "model.safetensors")
    tensors = {
        f"layers.{layer}.experts.up": distribute_tensor(
            torch.zeros(8, 16, 12), four_ranks, [Shard(0)], src_data_rank=None
        )
        for layer in range(2)
    }
    boxes: list[tuple[str, int]] = []
    plain = FolderTensors.read

    def counted(self: FolderTensors, key: str, *box: Sequence[int]) -> Tensor:
        piece = plain(self, key, *box)
        boxes.append((key, piece.numel() * piece.itemsize))
        return piece

    monkeypatch.setattr(FolderTensors, "read", counted)
    monkeypatch.setattr(hf.Ranks, "current", classmethod(lambda cls: cls(0, 1)))  # nobody answers here
    hf.load_folder(tmp_path, tensors, table)
    assert sum(size for _, size in boxes) == sum(tensor.to_local().numel() * 4 for tensor in tensors.values())
    assert {key for key, _ in boxes} == {f"layers.{layer}.experts.{n}.up.weight" for layer in range(2) for n in (4, 5)}
    for layer in range(2):
        for row, expert in enumerate((4, 5)):
            expected = theirs[f"layers.{layer}.experts.{expert}.up.weight"]
            assert torch.equal(tensors[f"layers.{layer}.experts.up"].to_local()[row], expected)
