"""Evaluations that measure nothing say so, two in one folder do not mix, and copies of a file are the same data."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tessera.errors import TesseraError
from tessera.evaluation import evaluate as evaluate_module
from tessera.evaluation.comparison import compare_results
from tessera.evaluation.evaluate import Evaluation, evaluate
from tessera.evaluation.protocol import ModelIdentity
from tessera.evaluation.run import protocol_of
from tessera.evaluation.tasks import load as tasks_module
from tessera.evaluation.tasks.load import open_task, read_task
from tessera.runtime.files import read_jsonl
from tessera.runtime.folder_lock import FolderLock
from tests.errors import raises
from tests.toys.chat_service import write_model
from tests.toys.chat_set import write_chat_set
from tests.unit.test_evaluation import write_table


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("limits") / "model", layers=4.0)


def with_config(model: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """Copy a model folder with other values in one of its JSON files."""
    shutil.copytree(model, target)
    data = json.loads((target / file).read_text())
    inner = data["text_config"] if "text_config" in data and file == "config.json" else data
    inner |= changes
    if inner is not data:
        data |= {key: value for key, value in changes.items() if key in data}
    (target / file).write_text(json.dumps(data))
    return target


def write_words(folder: Path, *questions: str) -> Path:
    """Write a task file with questions of text."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": q, "answer": "red"}) + "\n" for q in questions))
    task = folder / "words.yaml"
    task.write_text("name: words\ndata: {path: rows.jsonl}\nprompt: '{question}'\nmetric: f1\nmax_new_tokens: 64\n")
    return task


def run(model: Path, task: Path, out: Path, **options: Any) -> Evaluation:
    return evaluate(model, tasks=str(task), device="cpu", out=out, **options)


def test_a_prompt_beyond_the_context_is_a_failed_question_with_its_reason(model: Path, tmp_path: Path) -> None:
    small = with_config(model, tmp_path / "small", max_position_embeddings=60)
    evaluation = run(small, write_words(tmp_path, "red?", "x" * 500, "blue?"), tmp_path / "out")
    (result,) = evaluation.results
    rows = [*read_jsonl(result.answers)]
    assert [row.get("error", {}).get("code") for row in rows] == [None, "generation.prompt-too-long", None]
    assert rows[1]["answer"] == ""
    assert all(row["prompt_tokens"] + row["new_tokens"] <= 60 for row in rows)
    text = "\n".join(result.lines())
    assert "over 3 questions (1 without an answer)" in text
    assert "the context of this model has 60 tokens" in text
    assert "the context of this model has 60 tokens" in evaluation.report.read_text()


def test_an_evaluation_without_any_answer_is_an_error_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    small = with_config(model, tmp_path / "small", max_position_embeddings=20)
    task = write_words(tmp_path, "x" * 500, "y" * 500)
    with raises("evaluation.nothing-answered", "20 tokens"):
        run(small, task, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_remains_of_a_model_that_cannot_be_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TesseraError("no memory", code="memory.too-large")

    task = write_words(tmp_path, "red?")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "load", fail)
        with raises("memory.too-large"):
            run(model, task, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(model, task, tmp_path / "out", max_new_tokens=2)
    before = sorted((tmp_path / "out").iterdir())
    with monkeypatch.context() as patch:  # answers of an earlier evaluation remain
        patch.setattr(evaluate_module, "load", fail)
        with raises("memory.too-large"):
            run(model, task, tmp_path / "out", max_new_tokens=2, overwrite=True)
    assert sorted((tmp_path / "out").iterdir()) == before


def test_a_folder_is_refused_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(evaluate_module, "load", never)
    task = write_words(tmp_path, "red?")
    (tmp_path / "file").write_text("")
    with raises("output.not-writable", "--out"):
        run(model, task, tmp_path / "file" / "out")
    (tmp_path / "out").mkdir()
    lock = FolderLock(tmp_path / "out")
    lock.acquire()  # as another evaluation does
    with raises("output.in-use", "another process"):
        run(model, task, tmp_path / "out")
    lock.release()
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".lock"]


def test_copies_of_a_file_under_other_names_are_the_same_data(model: Path, tmp_path: Path) -> None:
    chats = write_chat_set(tmp_path / "chats", samples=2) / "train.jsonl"
    copy = Path(shutil.copy(chats, chats.with_name("other.jsonl")))
    table = write_table(tmp_path, 2)
    renamed = Path(shutil.copy(table, tmp_path / "mine.tsv"))
    folders = [tmp_path / "first", tmp_path / "second"]
    for out, data in zip(folders, (chats, copy), strict=True):
        evaluate(model, data=data, device="cpu", out=out, max_new_tokens=2)
    (comparison,) = compare_results(*folders)
    assert comparison.test is not None
    assert comparison.differences == []
    results = [json.loads((out / "results.json").read_text()) for out in folders]
    assert results[0]["train"]["fingerprint"] == results[1]["other"]["fingerprint"]
    assert results[1]["other"]["protocol"]["task"]["data"]["source"] == "other.jsonl"
    identity = ModelIdentity("m", "w", {})
    tables = [open_task("chartqa:vlmevalkit", data=path) for path in (table, renamed)]
    for out, benchmark in zip((tmp_path / "a", tmp_path / "b"), tables, strict=True):
        protocol = protocol_of(benchmark, identity, 2, 4, benchmark.sampling, 1)
        out.mkdir()
        result = {"metric": "relaxed_accuracy", "score": 1.0, "questions": 2, "protocol": protocol, "answers": "a"}
        (out / "a").write_text('{"index": 0, "values": {"relaxed_accuracy": 1.0}}\n')
        (out / "results.json").write_text(json.dumps({benchmark.title: result}))
    (comparison,) = compare_results(tmp_path / "a", tmp_path / "b")
    assert comparison.differences == ["only 1 questions have a mark in both"]


def test_two_variants_of_a_task_are_compared_on_request(model: Path, tmp_path: Path) -> None:
    task = write_words(tmp_path, "red?", "blue?")
    task.write_text(task.read_text() + "variants: {brief: {prompt: 'Briefly: {question}'}}\n")
    folders = [tmp_path / "plain", tmp_path / "brief"]
    for out, name in zip(folders, (task, f"{task}:brief"), strict=True):
        evaluate(model, tasks=str(name), device="cpu", out=out, max_new_tokens=2)
    with raises("evaluation.not-comparable", "task.prompt"):
        compare_results(*folders)
    (comparison,) = compare_results(*folders, anyway=True)
    assert comparison.test is not None
    assert comparison.test.units == 2


def test_a_fingerprint_depends_on_pixels_and_type_but_not_on_the_batch(model: Path, tmp_path: Path) -> None:
    small = with_config(model, tmp_path / "small", "preprocessor_config.json", max_pixels=2048)
    half = Path(shutil.copytree(model, tmp_path / "half"))
    for file in half.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    task = write_words(tmp_path, "red?", "what is blue?", "tall?")
    plain, pixels, rounded, alone = (
        run(folder, task, tmp_path / f"out-{number}", max_new_tokens=4, batch=batch).results[0]
        for number, (folder, batch) in enumerate([(model, 64), (small, 64), (half, 64), (model, 1)])
    )
    assert pixels.protocol["processing"]["image"]["max_pixels"] == 2048
    assert rounded.protocol["processing"]["dtype"] == "bfloat16"
    assert len({plain.fingerprint, pixels.fingerprint, rounded.fingerprint}) == 3
    assert alone.fingerprint == plain.fingerprint
    assert alone.answers.read_bytes() == plain.answers.read_bytes()
    assert (plain.environment["batch"], alone.environment["batch"]) == ("64", "1")
    assert plain.environment["ranks"] == "1"


def test_a_batch_that_is_padded_is_part_of_the_protocol(tmp_path: Path) -> None:
    benchmark = open_task(write_words(tmp_path, "red?"))
    identity = ModelIdentity("m", "w", {}, padded=True)
    batches = [
        protocol_of(benchmark, each, 1, 4, benchmark.sampling, batch)["processing"]
        for each in (identity, dataclasses.replace(identity, padded=False))
        for batch in (1, 64)
    ]
    assert batches == [{"batch": 1}, {"batch": 64}, {}, {}]


def test_a_task_file_with_many_variants_is_read_once_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, count, checked = write_words(tmp_path, "red?"), 300, 0
    data = {f"v{number}": {"max_new_tokens": number + 1} for number in range(count)}
    task.write_text(task.read_text() + f"variants: {json.dumps(data)}\n")
    build = tasks_module.build

    def counted(section: Any, values: Any, where: str) -> Any:
        nonlocal checked
        checked += 1 + len(values.get("variants", {}))
        return build(section, values, where)

    monkeypatch.setattr(tasks_module, "build", counted)
    assert read_task(f"{task}:v7")[0].max_new_tokens == 8
    assert checked <= 4 * count
