"""Training on a list of rows: the same as on a file of them, kept by the run, and refused where it cannot be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tessera
from tessera.training.given_rows import are_rows, as_records
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=9)


def rows_of(data: Path, opened: bool) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    for row in rows:
        for part in row["messages"][0]["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(data / part["image"]) if opened else data / part["image"]
    return rows


def recipe_of(data: Path, out: Path, steps: int = 2) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=steps)
    recipe["data"] |= {"train": [], "eval": []}
    return recipe


def losses(run: tessera.Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def test_a_list_of_rows_trains_as_its_file_does_and_resumes_from_the_folder_alone(data: Path, tmp_path: Path) -> None:
    from_file = tessera.train(chat_recipe(data, tmp_path / "file", steps=3))
    run = tessera.train(recipe_of(data, tmp_path / "rows", 2), dataset=rows_of(data, opened=True))
    assert losses(run) == losses(from_file)[:2]
    moved = tmp_path / "moved"
    run.folder.rename(moved)
    assert losses(tessera.resume(moved, {"train.steps": 3})) == losses(from_file)
    assert "has changed" not in (moved / "logs/rank-00000.log").read_text()
    with raises("data.rows-at-resume"):
        tessera.resume(moved, dataset=rows_of(data, opened=True))


def test_rows_name_files_anywhere_relative_to_the_working_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(data, opened=False)[:4]
    monkeypatch.chdir(data)
    rows[1]["messages"][0]["content"][0]["image"] = "pictures/1-0.png"
    run = tessera.train(recipe_of(data, tmp_path, 1), dataset=rows, eval_dataset=rows[:2])
    lines = [json.loads(line) for line in (run.folder / "data/train.jsonl").read_text().splitlines()]
    assert lines[1]["messages"][0]["content"][0]["image"] == str(data / "pictures/1-0.png")
    assert not (run.folder / "quarantine.jsonl").exists()
    assert [row for row in run.metrics if row["kind"] == "eval"]


class PandasLike:
    """Behave as a DataFrame of pandas where rows are asked for; a column is its name, and no row has a number."""

    columns, iloc = ("text", "score"), None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: object) -> None:
        raise KeyError(key)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"text": "a", "score": float("nan")}, {"text": "b", "score": 2.0}]


def test_tables_in_memory_are_lists_of_rows() -> None:
    rows = as_records(PandasLike())
    assert rows == [{"text": "a"}, {"text": "b", "score": 2.0}]
    assert are_rows(rows)
    plain = [{"text": "a", "score": None}]
    assert as_records(plain) is plain
    arrow = pytest.importorskip("pyarrow")
    records = as_records(arrow.table({"text": ["a", "b"], "score": [None, 2.0]}))
    assert records == [{"text": "a"}, {"text": "b", "score": 2.0}]


class WrongColumns(PandasLike):
    columns = ("Message", "score")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        return [{"Message": "a", "score": 1.0}, {"Message": "b", "score": 2.0}]


class Numbers(PandasLike):
    columns = ("x", "y")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        return [{"id": "a", "x": 1.0, "y": 2.0}]


class FirstCellEmpty(PandasLike):
    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        return [{"text": None, "score": 1.0}, {"text": "b", "score": 2.0}]


def test_a_table_with_other_columns_is_told_which_it_has_and_needs(data: Path, tmp_path: Path) -> None:
    with raises("data.unknown-columns") as caught:
        tessera.train(recipe_of(data, tmp_path), dataset=WrongColumns())
    assert caught.value.where == "dataset=..."
    assert caught.value.nearest == "messages"
    assert "rename(columns={'Message': 'messages'})" in str(caught.value)
    assert len(as_records(Numbers())) == 1  # for a model of the user's own
    assert are_rows(as_records(FirstCellEmpty()))


def test_what_cannot_be_a_row_is_named_with_its_place(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data, tmp_path)
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    for bad, where in (
        (3, "data.row-no-mapping"),
        ({"messages": [{"role": "user", "content": {1, 2}}]}, "data.value-not-storable"),
        ({**good, "score": float("nan")}, "data.number-not-finite"),
    ):
        with raises(where):
            tessera.train(recipe, dataset=[good, bad])
    recipe["data"]["kind"] = "generation"
    with raises("data.kind-not-in-memory"):
        tessera.train(recipe, dataset=[good])
