"""Tensors in parts, and the checksum of what is written of them."""

from __future__ import annotations

import zlib

import pytest
import torch

from tessera.core import tensor_rows
from tessera.core.crc32 import crc32
from tessera.core.tensor_rows import TensorRows


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
