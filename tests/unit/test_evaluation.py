"""Evaluations use one engine for all questions: the answers are those of each question alone, in order."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tessera
from tessera.engine.engine import Engine
from tessera.evaluation.answers import read_answers
from tessera.evaluation.benchmark import BenchmarkQuestion
from tessera.evaluation.evaluate import evaluate, held_out_sources
from tessera.evaluation.run import EvaluationOptions, evaluate_tasks
from tessera.evaluation.tasks.load import open_task
from tessera.inference import answering
from tessera.inference.questions import Question, questions
from tests.errors import raises
from tests.toys.chat_service import write_model
from tests.toys.chat_set import write_chat_set


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluation") / "model", layers=4.0)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that an evaluation starts."""
    started: list[Engine] = []

    class Counted(Engine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(answering, "Engine", Counted)
    return started


def test_one_engine_answers_all_samples_as_each_alone(model: Path, tmp_path: Path, engines: list[Engine]) -> None:
    data = write_chat_set(tmp_path, samples=9) / "train.jsonl"
    with data.open("a") as file:
        file.write('{"messages": []}\n')
    evaluation = evaluate(model, data=data, max_new_tokens=5, batch=2, device="cpu", out=tmp_path / "out")
    loaded, processor = tessera.load(model, device="cpu")
    samples = [q for q in questions(held_out_sources(model, data, None, None)) if isinstance(q, Question)]
    alone = [loaded.generate(processor.prompt([question.prompt()]), 5) for question in samples]
    (result,) = evaluation.results
    rows = read_answers(result.answers)
    assert [row["answer"] for row in rows[:9]] == alone
    assert [row["id"] for row in rows[:9]] == [question.sample.id for question in samples]
    assert (result.unusable, "unusable" in rows[9], result.units) == (1, True, 9)
    assert len(set(alone)) > 5, alone
    (engine,) = engines
    assert engine.limits.rows == 2
    # Together: two at once would need as many steps for each pair as its longer answer has tokens.
    assert engine.stats().steps < 9 * 5
    assert result.cost is not None
    assert result.cost.new_tokens == sum(row["new_tokens"] for row in rows[:9]) > 9
    assert result.cost.prompt_tokens > 9 * 10


def test_questions_without_their_image_do_not_count_and_are_reported(model: Path, tmp_path: Path) -> None:
    data = write_chat_set(tmp_path, samples=3) / "train.jsonl"
    (tmp_path / "pictures/2-1.png").unlink()
    (tmp_path / "pictures/1-0.png").write_bytes((tmp_path / "pictures/1-0.png").read_bytes()[:60])
    (result,) = evaluate(model, data=data, max_new_tokens=2, device="cpu", out=tmp_path / "out").results
    assert (result.questions, result.unusable) == (1, 2)
    codes = [row["unusable"]["code"] for row in read_answers(result.answers) if "unusable" in row]
    assert codes == ["media.damaged-file", "media.no-such-file"]
    assert "2 questions could not be asked" in "\n".join(result.lines())


def test_nothing_is_left_if_no_question_can_be_asked(model: Path, tmp_path: Path) -> None:
    data = write_chat_set(tmp_path, samples=2) / "train.jsonl"
    data.write_text(data.read_text().splitlines()[1] + "\n")  # the other one has no image
    shutil.rmtree(tmp_path / "pictures")
    with raises("evaluation.no-usable-sample"):
        evaluate(model, data=data, max_new_tokens=2, device="cpu", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_table(folder: Path, rows: int = 5) -> Path:
    """Write a table with the columns of ChartQA, of which row 3 has the image of row 0."""
    lines = ["index\tquestion\tanswer\timage"]
    for number in range(rows):
        buffer = io.BytesIO()
        Image.new("RGB", (24 + 4 * number, 24), (50 * number % 255, 80, 200)).save(buffer, "PNG")
        image = base64.b64encode(buffer.getvalue()).decode() if number != 3 else "0"
        lines.append(f"{number}\twhat is {number}\tred\t{image}")
    table = folder / "ChartQA_TEST.tsv"
    table.write_text("\n".join(lines) + "\n")
    return table


def test_a_table_is_scored_in_order_with_one_engine(model: Path, tmp_path: Path, engines: list[Engine]) -> None:
    table = write_table(tmp_path)
    loaded, processor = tessera.load(model, device="cpu")
    benchmark = open_task("chartqa", data=table)
    (result,) = evaluate_tasks(
        loaded,
        processor,
        [benchmark],
        tmp_path / "out",
        EvaluationOptions(max_samples=4, max_new_tokens=5, batch=3),
        name="toy",
        weights="1",
    )
    alone = []
    for _, question in benchmark.questions(range(4)):
        assert isinstance(question, BenchmarkQuestion)
        alone.append(loaded.generate(processor.prompt([(question.sample, tmp_path)]), 5))
    rows = read_answers(result.answers)
    assert [row["answer"] for row in rows] == alone
    assert [row["id"] for row in rows] == ["0", "1", "2", "3"]
    assert len(engines) == 1
    again = evaluate(model, data=table, max_samples=4, max_new_tokens=5, device="cpu", out=tmp_path / "again")
    assert [row["answer"] for row in read_answers(again.results[0].answers)] == alone
    assert again.results[0].title == "chartqa:vlmevalkit"
    assert again.results[0].fingerprint == result.fingerprint
