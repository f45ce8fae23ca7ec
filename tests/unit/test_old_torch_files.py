"""Files of torch before 1.6 are read without a pickle being executed."""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.checkpoint.legacy.old_torch_files import is_old_torch_file, read_old_torch_file
from tessera.checkpoint.legacy.torch_files import StoredTensor
from tessera.errors import TesseraError
from tests.errors import raises


def content() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): (torch.rand(3, 5) * 9).to(kind) for kind in kinds}
    tensors |= {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 4),
    }
    return tensors


def save(path: Path, value: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    tensors = content()
    path = save(tmp_path / "old.pth", OrderedDict(tensors))
    assert is_old_torch_file(path)
    read = read_old_torch_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert isinstance(read[name], StoredTensor)
        value = read[name].read()
        assert value.dtype == tensor.dtype
        assert torch.equal(value, tensor), name
    torch.save(tensors, tmp_path / "new.pth")
    assert not is_old_torch_file(tmp_path / "new.pth")


class Poison:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "old.pth", {"w": torch.ones(2), "poison": Poison()})
    with raises("checkpoint.forbidden-pickle"):
        read_old_torch_file(path)
    assert not Path("executed").exists()


def test_damaged_files_are_sentences(tmp_path: Path) -> None:
    whole = save(tmp_path / "old.pth", content()).read_bytes()
    for length in (20, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.pth").write_bytes(whole[:length])
        with pytest.raises(TesseraError):
            read_old_torch_file(tmp_path / "cut.pth")
    chance = random.Random(0)
    for _ in range(300):
        content_bytes = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            content_bytes[chance.randrange(15, len(whole))] = chance.randrange(256)
        (tmp_path / "changed.pth").write_bytes(content_bytes)
        try:
            read = read_old_torch_file(tmp_path / "changed.pth")
            if isinstance(read, dict):
                [value.read() for value in read.values() if isinstance(value, StoredTensor)]
        except TesseraError:
            continue
