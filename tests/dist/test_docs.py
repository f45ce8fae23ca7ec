"""The recipes that the how-tos show are run, so that they cannot rot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.training.run import train
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fit-it-into-memory.md"


def run(rank: int, world: int, recipe: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in train(recipe).metrics if row["kind"] == "train"]


@pytest.mark.slow  # that its keys are real and its layouts train is tested elsewhere, and fast
def test_the_recipe_of_the_memory_page_trains(tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## A recipe to begin with")[1]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    recipe = chat_recipe(write_chat_set(tmp_path / "data"), tmp_path / "runs") | yaml.safe_load(block[1])
    losses = run_ranks(run, 2, recipe)[0]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
