"""A checkpoint knows nothing of the layout that wrote it: any other goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.checkpoint_pairs import LAYOUTS, PAIRS, place, run

NEXT = list(zip(LAYOUTS, [*list(LAYOUTS)[1:], next(iter(LAYOUTS))], strict=True))  # a circle through all six


def check(pairs: list[tuple[str, str]], folder: Path) -> None:
    losses = run(pairs, folder)
    assert {pair: worst for pair, worst in losses.items() if worst > 1e-5} == {}


@pytest.mark.slow  # test_checkpoint_reshard does the same with one tensor
def test_six_layouts_in_a_circle(tmp_path: Path) -> None:
    check(NEXT, tmp_path)
    names = set()
    for source, target in NEXT:
        (table,) = (place(tmp_path, source, target) / "chat" / "checkpoints").glob("step-*2/tensors.json")
        names.add(tuple(sorted(json.loads(table.read_text())["tensors"])))
    assert len(names) == 1  # the same in every file, whoever wrote it


@pytest.mark.slow
def test_all_36_pairs(tmp_path: Path) -> None:
    check([pair for pair in PAIRS if pair not in NEXT], tmp_path)
