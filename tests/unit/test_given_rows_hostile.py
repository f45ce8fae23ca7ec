"""Rows in memory that hold odd things."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.data.media.images import to_rgb
from tessera.training.given_rows import GivenRows, are_rows
from tests.errors import raises


def row(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}], **more}


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    GivenRows.of(list(rows), None).write(tmp_path)
    return tmp_path / "data"


@pytest.mark.parametrize(("mode", "value"), [("F", 0.5), ("I", 40000), ("I;16B", 40000)])
def test_deep_images_are_kept_as_those_of_a_file_are_read(tmp_path: Path, mode: str, value: float) -> None:
    image = Image.new(mode, (4, 4), value)
    file = next((written(tmp_path, row(images=[image])) / "media").iterdir())
    with Image.open(file) as image:
        assert to_rgb(image).getpixel((0, 0)) == to_rgb(image).getpixel((0, 0)) not in [(0, 0, 0), (255, 255, 255)]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    folder = written(tmp_path, row(weight=np.float32(0.5), count=np.int64(3), good=np.bool_(True)))
    assert '"weight": 0.5, "count": 3, "good": true' in (folder / "train.jsonl").read_text(encoding="utf-8")


def circle() -> dict[str, Any]:
    record = row()
    record["self"] = record
    return record


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        (row("half \ud800"), "data.invalid-unicode"),
        (row(count=10**5000), "data.row-not-storable"),
        (circle(), "data.nested-too-deeply"),
        (row(images=[Image.new("RGB", (0, 0))]), "media.unreadable-image"),
        (row(when=datetime.date(2026, 1, 1)), "data.value-not-storable"),
    ],
)
def test_what_no_row_can_keep_is_told(tmp_path: Path, odd: dict[str, Any], error: str) -> None:
    with raises(error):
        written(tmp_path, row(), odd)


def test_a_table_by_columns_is_no_list_of_rows() -> None:
    class Columns:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, name: str) -> list[int]:
            return {"question": [1]}[name]

    assert not are_rows(Columns())
