"""Evaluations use one engine for all questions: the answers are those of each question alone, in order."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tessera
from tessera.engine.engine import Engine
from tessera.evaluation.benchmark import BenchmarkQuestion
from tessera.evaluation.benchmarks import benchmark_of, score_table
from tessera.evaluation.evaluate import evaluate, held_out_sources
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
    score = evaluate(model, data=data, max_new_tokens=5, batch=2, device="cpu")
    loaded, processor = tessera.load(model, device="cpu")
    samples = [q for q in questions(held_out_sources(model, data, None, None)) if isinstance(q, Question)]
    alone = [loaded.generate(processor.prompt([question.prompt()]), 5) for question in samples]
    assert [row["answer"] for row in score.rows] == alone
    assert [row["id"] for row in score.rows] == [question.sample.id for question in samples]
    assert score.skipped == 1
    assert len(set(alone)) > 5, alone
    (engine,) = engines
    assert engine.limits.rows == 2
    # Together: two at once would need as many steps for each pair as its longer answer has tokens.
    assert engine.stats().steps < 9 * 5


def test_a_sample_that_cannot_be_read_ends_the_evaluation(model: Path, tmp_path: Path) -> None:
    data = write_chat_set(tmp_path, samples=3) / "train.jsonl"
    (tmp_path / "pictures/2-1.png").unlink()
    with raises("media.no-such-file"):
        evaluate(model, data=data, max_new_tokens=2, device="cpu")


def test_a_table_is_scored_in_order_with_one_engine(model: Path, tmp_path: Path, engines: list[Engine]) -> None:
    lines = ["index\tquestion\tanswer\timage"]
    for number in range(5):
        buffer = io.BytesIO()
        Image.new("RGB", (24 + 4 * number, 24), (50 * number, 80, 200)).save(buffer, "PNG")
        image = base64.b64encode(buffer.getvalue()).decode() if number != 3 else "0"
        lines.append(f"{number}\twhat is {number}\tred\t{image}")
    table = tmp_path / "ChartQA_TEST.tsv"
    table.write_text("\n".join(lines) + "\n")
    loaded, processor = tessera.load(model, device="cpu")
    benchmark = benchmark_of("chartqa_test", table, "--data")
    records = score_table(loaded, processor, benchmark, max_samples=4, max_new_tokens=5, batch=3)
    alone = []
    for _, question in benchmark.questions(range(4)):
        assert isinstance(question, BenchmarkQuestion)
        alone.append(loaded.generate(processor.prompt([(question.sample, tmp_path)]), 5))
    assert [record["answer"] for record in records] == alone
    assert [record["index"] for record in records] == ["0", "1", "2", "3"]
    assert len(engines) == 1
