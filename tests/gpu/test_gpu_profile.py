"""A profile on an accelerator: torch's table has the ranges of modules with the time of their kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tessera
from tests.toys.chat_set import chat_recipe, write_chat_set

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_the_table_has_modules_and_kernels(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "data")
    recipe = chat_recipe(data, tmp_path / "out", device="auto", steps=8)
    recipe["profile"] = {"steps": [5, 7]}
    recipe["checkpoint"] = {"at_end": False}
    recipe["precision"] = {"compute": "bfloat16"}
    folder = tessera.train(recipe).folder / "profile"
    table = (folder / "table.txt").read_text()
    assert "forward of text.layers.*.attn" in table
    assert "phase: updating weights" in table
    assert "gemm" in table.lower() or "nvjet" in table.lower()
    assert (folder / "memory.pickle").stat().st_size > 0
