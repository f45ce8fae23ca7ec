"""The notebook of `examples/`: its cells run in order, and end with a model that answers and a folder that loads."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import tessera

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return cells


def test_the_notebook_holds_no_outputs_and_no_path_of_a_machine() -> None:
    for cell in cells():
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert "/home/" not in "".join(cell["source"])
    assert json.loads(NOTEBOOK.read_text(encoding="utf-8"))["nbformat"] == 4


@pytest.mark.slow  # 20 seconds
def test_every_cell_of_the_notebook_runs_and_what_a_cell_ends_with_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names: dict[str, Any] = {"__name__": "__main__"}
    tables = 0
    for number, cell in enumerate(cells()):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"cell {number}")
        names["shown"] = None
        if isinstance(tree.body[-1], ast.Expr):  # the value that a notebook shows
            last = tree.body[-1]
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("shown", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(tree), f"cell {number}", "exec"), names)
        value = names["shown"]
        assert len(repr(value)) < 500
        tables += isinstance(value, tessera.Run) and "<table" in value._repr_html_()
    assert tables == 1
    assert names["score"].score >= 0.9
    again, _ = tessera.load(names["folder"], device="cpu")
    assert again.chat("Which color is this?", names["square"]("red", names["chance"]), max_new_tokens=8) == "red"
