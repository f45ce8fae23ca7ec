"""The task files of examples/lmms_eval: what lmms-eval reads from them, without lmms-eval."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

pq = pytest.importorskip("pyarrow.parquet")

SOURCE = Path(__file__).parents[2] / "examples" / "lmms_eval"
ROWS: list[dict[str, Any]] = [
    {
        "id": "two",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "a.png"},
                    {"type": "text", "text": "and"},
                    {"type": "image", "image": "b.png"},
                    {"type": "text", "text": "sum?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "17 "}]},
        ],
    },
    {"id": "none", "messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]},
]


def write_data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    for number, name in enumerate(("a.png", "b.png")):
        Image.new("RGB", (4 + number, 6), (number, 2, 3)).save(folder / name)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return data


def test_rows_become_messages_with_images_between_the_texts(tmp_path: Path) -> None:
    task = Path(shutil.copytree(SOURCE, tmp_path / "task"))
    runpy.run_path(str(task / "prepare.py"))["main"](write_data(tmp_path, ROWS))
    settings = yaml.load((task / "questions.yaml").read_text(), _Loader)
    two, none = pq.read_table(task / settings["dataset_kwargs"]["data_files"]["test"]).to_pylist()
    functions = runpy.run_path(str(task / "questions.py"))
    to_messages, score = (functions[settings[key]] for key in ("doc_to_messages", "process_results"))
    assert len(functions[settings["doc_to_visual"]](two)) == 2
    assert functions[settings["doc_to_text"]](two) == "Be brief.\nand\nsum?"
    system, user = to_messages(two)
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    parts = [part.get("text") or part["url"].size for part in user["content"]]
    assert parts == [(4, 6), "and", (5, 6), "sum?"]
    assert to_messages(none) == [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]
    assert (two[settings["doc_to_target"]], score(two, ["17"]), score(none, ["two"])) == (
        "17 ",
        {"exact_match": 1.0},
        {"exact_match": 0.0},
    )


def test_a_row_without_an_answer_is_named(tmp_path: Path) -> None:
    data = write_data(tmp_path, [{"id": "open", "messages": [{"role": "user", "content": "?"}]}])
    task = Path(shutil.copytree(SOURCE, tmp_path / "task"))
    with pytest.raises(SystemExit, match="open: the last message is not an answer"):
        runpy.run_path(str(task / "prepare.py"))["main"](data)


class _Loader(yaml.SafeLoader):
    """Read `!function questions.NAME` as NAME."""


def _function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node)).removeprefix("questions.")


_Loader.add_constructor("!function", _function)
