"""What a protocol contains, and evaluations of files and functions that do not behave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tessera.errors import printable
from tessera.evaluation.evaluate import evaluate
from tessera.evaluation.metrics.registry import metric_of
from tessera.evaluation.tasks.load import open_task
from tests.errors import raises
from tests.toys.chat_service import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("protocol") / "model", layers=4.0)


def test_other_media_or_other_code_of_a_metric_is_another_protocol(model: Path, tmp_path: Path) -> None:
    task, image = write_own_task(tmp_path)
    prints = [fingerprint_of(model, task, tmp_path / "first")]
    Image.new("RGB", (28, 28), "blue").save(image)
    prints.append(fingerprint_of(model, task, tmp_path / "second"))
    (tmp_path / "score.py").write_text("def same(answer, question):\n    return 0.5\n")
    prints.append(fingerprint_of(model, task, tmp_path / "third"))
    assert len(set(prints)) == 3


def fingerprint_of(model: Path, task: Path, out: Path) -> str:
    (result,) = evaluate(model, tasks=[str(task)], device="cpu", out=out, trust=True).results
    return result.fingerprint


def write_own_task(folder: Path) -> tuple[Path, Path]:
    """Write a task of one question with an image file and a metric of the user."""
    image = folder / "image.png"
    Image.new("RGB", (28, 28), "red").save(image)
    (folder / "score.py").write_text("def same(answer, question):\n    return 1.0\n")
    (folder / "rows.jsonl").write_text(json.dumps({"image": image.name, "question": "what?", "answer": "red"}) + "\n")
    task = {
        "name": "mine",
        "data": {"path": "rows.jsonl"},
        "columns": {"image_paths": "image"},
        "prompt": "{question}",
        "metric": "score.py:same",
        "max_new_tokens": 2,
    }
    path = folder / "mine.yaml"
    path.write_text(json.dumps(task))
    return path, image


@pytest.mark.parametrize("body", ["__import__('sys').exit(0)", "1e308"])
def test_a_metric_that_exits_or_overflows_is_reported(model: Path, tmp_path: Path, body: str) -> None:
    task, _ = write_own_task(tmp_path)
    (tmp_path / "score.py").write_text(f"def same(answer, question):\n    return {body}\n")
    with raises("evaluation.bad-metric-function"):
        fingerprint_of(model, task, tmp_path / "out")


def test_rows_that_no_condition_selects_are_named(tmp_path: Path) -> None:
    task, _ = write_own_task(tmp_path)
    task.write_text(task.read_text().replace('"data": {', '"data": {"where": {"kind": "x"}, '))
    with raises("evaluation.empty-table", "{'kind': 'x'}"):
        open_task(task, trust=True)


def test_damaged_results_are_reported_before_questions_are_answered(model: Path, tmp_path: Path) -> None:
    task, _ = write_own_task(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("{")
    with raises("environment.not-json", "delete this file"):
        fingerprint_of(model, task, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["results.json"]


def test_options_of_metrics_are_finite() -> None:
    with raises("evaluation.metric-option"):
        metric_of("numeric", {"tolerance": float("nan")})


def test_lines_for_a_terminal_have_no_escape_codes() -> None:
    assert printable("a\x1b[31m\u202eb\nc") == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b\nc"
