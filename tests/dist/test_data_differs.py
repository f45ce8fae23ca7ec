"""Ranks that read other data than the rest are named on all ranks, before a step is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import TesseraError
from tessera.training.run import train
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set


def refused(rank: int, world: int, recipe: dict[str, Any], folders: list[str]) -> str:
    """Train with the data of this rank's own folder, which the recipe names by a relative path."""
    os.chdir(folders[rank])
    with pytest.raises(TesseraError) as caught:
        train(recipe)
    return caught.value.what


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("difference", ["a word", "a sample", "no file"])
def test_ranks_with_other_data_are_named_on_all(difference: str, world: int, tmp_path: Path) -> None:
    folders = [str(write_chat_set(tmp_path / str(rank), samples=12)) for rank in range(world)]
    rows = tmp_path / str(world - 1) / "train.jsonl"
    if difference == "a word":
        text = rows.read_text()
        rows.write_text(text.replace('"content": "red', '"content": "old', 1))
        assert rows.read_text() != text
    elif difference == "a sample":
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    else:
        rows.unlink()
    recipe = chat_recipe(Path(), tmp_path / "out", steps=2, global_batch=world)
    answers = run_ranks(refused, world, recipe, folders, timeout=60)
    expected = "no such data file" if difference == "no file" else f"ranks have different data: rank {world - 1}"
    assert all(expected in answer for answer in answers), answers
