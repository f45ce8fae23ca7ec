"""Tensors in parts, and the checksum of what is written of them."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.runtime.crc32 import crc32
from tessera.runtime.libc import begin_write_back, same_bytes
from tessera.weights import rows as tensor_rows
from tessera.weights.operations import (
    Concat,
    GroupedRows,
    Identity,
    Operation,
    Stack,
    StoredTwice,
    TensorChunk,
    foreign_rows,
    native_rows,
)
from tessera.weights.rows import TensorRows


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_parts_are_the_bytes_of_the_whole(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_rows, "_CHUNK", chunk)
    whole = torch.randn(12, 10).to(torch.bfloat16)
    whole[3, 3] = float("nan")
    cases = [
        (TensorRows((whole[:5], whole[5:6], whole[6:])), whole),
        (TensorRows((whole[:5], whole[5:])).rows(3, 6), whole[3:9]),
        (TensorRows((whole[:5], whole[5:])).narrow(1, 4, 3), whole[:, 4:7]),
        (TensorRows.of(whole.t()), whole.t()),
        (TensorRows.of(torch.tensor(3)), torch.tensor(3)),
        (TensorRows.of(whole).rows(4, 0), whole[:0]),
    ]
    for rows, expected in cases:
        assert (rows.shape, rows.dtype) == (tuple(expected.shape), expected.dtype)
        data = expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert b"".join(part.tobytes() for part in rows.chunks()) == data
        assert rows.same_bits(expected)
        checksum = 0
        for part in rows.chunks():
            checksum = crc32(part, checksum)
        assert checksum == zlib.crc32(data)
        if expected.numel():
            changed = expected.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[-1] += 1
            assert not rows.same_bits(changed)
    assert not cases[0][0].same_bits(whole.float())
    assert not cases[0][0].same_bits(whole.view(10, 12))
    assert TensorRows((whole, whole.float())).dtype is None


OPERATIONS: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "identity": (Identity(), [(6, 4)]),
    "stored twice": (StoredTwice(), [(6, 4), (6, 4)]),
    "rows of several": (Concat((2, 4)), [(2, 3), (4, 3)]),
    "columns of several": (Concat((2, 4), dim=1), [(3, 2), (3, 4)]),
    "experts": (Stack(), [(2, 3), (2, 3)]),
    "half": (TensorChunk(1, 2), [(6, 2)]),
    "columns": (TensorChunk(1, 2, dim=1), [(6, 4)]),
    "keys by head": (GroupedRows(1, 3, rows=(2, 1, 1)), [(8, 3)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_are_what_an_operation_makes_of_whole_tensors(name: str) -> None:
    op, shapes = OPERATIONS[name]
    whole = [torch.randn(shape) for shape in shapes]
    if isinstance(op, StoredTwice):
        whole[1] = whole[0]
    parts = [TensorRows((tensor[:1], tensor[1:])) for tensor in whole]
    native = op.to_native(whole)
    assert torch.equal(native_rows(op, parts).whole(), native)
    if isinstance(op, TensorChunk):
        return  # one chunk makes no foreign tensor
    foreign = foreign_rows(op, TensorRows((native[:1], native[1:])))
    assert [rows.shape for rows in foreign] == shapes
    assert all(torch.equal(rows.whole(), tensor) for rows, tensor in zip(foreign, whole, strict=True))


def test_bytes_are_the_same_or_not(tmp_path: Path) -> None:
    data = np.arange(1000, dtype=np.uint8)
    other = data.copy()
    assert same_bytes(data, other)
    assert not same_bytes(data, other[:-1])
    assert same_bytes(data[:0], other[:0])
    other[-1] ^= 1
    assert not same_bytes(data, other)
    with (tmp_path / "file").open("wb") as file:
        file.write(data.tobytes())
        file.flush()
        begin_write_back(file.fileno(), 0, 1000)
        begin_write_back(file.fileno(), 0, 1 << 62)  # nothing that is wrong with it is an error
    assert (tmp_path / "file").read_bytes() == data.tobytes()
