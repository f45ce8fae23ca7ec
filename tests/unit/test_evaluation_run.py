"""Evaluations continue after a kill, run over ranks, refuse another protocol, and compare only what may be compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.evaluation.comparison import compare_results
from tessera.evaluation.evaluate import evaluate
from tessera.evaluation.page import write_comparison_page, write_evaluation_page
from tessera.evaluation.run import read_results
from tessera.runtime.files import read_jsonl
from tests.errors import raises
from tests.toys.chat_service import write_model
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.unit.test_evaluation import write_table

WAIT_S = 600  # never reached


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("run") / "model", layers=4.0)


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation of five questions."""
    folder = tmp_path_factory.mktemp("done")
    evaluate(model, data=write_table(folder), max_new_tokens=4, device="cpu", out=folder / "out")
    return folder


def rows_of(out: Path) -> list[dict[str, Any]]:
    (path,) = out.glob("answers-*.jsonl")
    return [*read_jsonl(path)]


def test_a_second_start_answers_nothing_again(model: Path, done: Path) -> None:
    (result,) = evaluate(
        model, data=done / "ChartQA_TEST.tsv", max_new_tokens=4, device="cpu", out=done / "out"
    ).results
    assert result.cost is None
    assert [row["index"] for row in rows_of(done / "out")] == [0, 1, 2, 3, 4]


def test_another_protocol_is_refused_and_named(model: Path, done: Path) -> None:
    with raises("output.other-settings", "task.max_new_tokens was 4", "--overwrite"):
        evaluate(model, data=done / "ChartQA_TEST.tsv", max_new_tokens=5, device="cpu", out=done / "out")
    assert [row["index"] for row in rows_of(done / "out")] == [0, 1, 2, 3, 4]


def test_the_protocol_names_what_scores_depend_on(done: Path, model: Path) -> None:
    (result,) = read_results(done / "out").values()
    processing = result["protocol"]["processing"]
    assert processing["image"]["max_pixels"] == 4096
    assert processing["dtype"] == "float32"
    assert {"chat_template", "tokenizer", "engine", "sampling"} <= processing.keys()
    assert set(result["environment"]) >= {"torch", "python"}
    assert "environment" not in result["protocol"]
    task = result["protocol"]["task"]
    assert (task["max_new_tokens"], task["sampling"], task["questions"]) == (4, "greedy", 5)
    assert result["protocol"]["model"]["weights"] == tessera_weights(shutil.copytree(model, done / "copy"))


def tessera_weights(folder: Path) -> str:
    from tessera.evaluation.protocol import weight_fingerprint

    return weight_fingerprint(folder)


def changed_copy(out: Path, target: Path, **changes: Any) -> Path:
    """Copy an evaluation, with other settings of its processor."""
    shutil.copytree(out, target)
    results = json.loads((target / "results.json").read_text())
    for result in results.values():
        result["protocol"]["processing"]["image"] |= changes
        result["protocol"]["model"] = {"name": "second", "weights": "2"}
    (target / "results.json").write_text(json.dumps(results))
    return target


def test_results_of_two_models_are_compared(done: Path, tmp_path: Path) -> None:
    second = changed_copy(done / "out", tmp_path / "second")
    (path,) = second.glob("answers-*.jsonl")
    rows = rows_of(second)
    for row in rows[:3]:
        row["values"] = {"relaxed_accuracy": 1.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (comparison,) = compare_results(done / "out", second)
    assert comparison.test is not None
    assert (comparison.test.better, comparison.test.worse, comparison.test.p) == (3, 0, 0.25)
    assert comparison.test.value == pytest.approx(0.6)
    page = write_comparison_page(tmp_path / "page.html", [comparison]).read_text()
    assert page.count('class="answer better"') == 3
    assert "second" in page


def test_numbers_of_different_protocols_are_not_compared(done: Path, tmp_path: Path) -> None:
    second = changed_copy(done / "out", tmp_path / "second", max_pixels=8192)
    with raises("evaluation.not-comparable", "processing.image.max_pixels: 4096 / 8192"):
        compare_results(done / "out", second)
    (comparison,) = compare_results(done / "out", second, anyway=True)
    assert comparison.test is not None
    assert comparison.differences == ["processing.image.max_pixels: 4096 / 8192"]
    outcome = CliRunner().invoke(app, ["eval", "--compare", str(done / "out"), str(second)])
    assert isinstance(outcome.exception, tessera.TesseraError)


def test_a_model_that_reads_no_images_is_refused_before_its_weights_are_loaded(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera.evaluation import evaluate as module
    from tests.toys.text_classes import SIZES, write_text_class

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(module, "load", never)
    folder = write_text_class("LlamaForCausalLM", SIZES, tmp_path / "text")
    with raises("evaluation.modality", "image"):
        evaluate(folder, data=done / "ChartQA_TEST.tsv", device="cpu", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_metric_scores_held_out_samples(model: Path, tmp_path: Path) -> None:
    data = write_chat_set(tmp_path, samples=4) / "train.jsonl"
    (result,) = evaluate(model, data=data, metric="anls", max_new_tokens=2, device="cpu", out=tmp_path / "anls").results
    assert result.metric == "anls"
    score = tmp_path / "score.py"
    score.write_text("def letters(answer, question):\n    return {'length': min(1, len(answer) / 10)}\n")
    named = f"{score}:letters"
    with raises("run.code-not-trusted"):
        evaluate(model, data=data, metric=named, max_new_tokens=2, device="cpu", out=tmp_path / "own")
    evaluation = evaluate(
        model, data=data, metric=named, max_new_tokens=2, device="cpu", out=tmp_path / "own", trust=True
    )
    assert evaluation.results[0].metric == "length"
    assert 0 < evaluation.score <= 1
    assert "length" in evaluation.report.read_text()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tasks": "mmmo"}, "evaluation.unknown-benchmark mmmu"),
        ({"tasks": "gsm8k:strct"}, "evaluation.unknown-variant"),
        ({"tasks": "gsm8k", "metric": "exact"}, "evaluation.metric-of-benchmark"),
        ({"data": "AI2D_TST.tsv"}, "evaluation.unknown-benchmark ai2d_test"),
        ({"metric": "anlss"}, "evaluation.unknown-metric anls"),
        ({"metric": "mmmu"}, "evaluation.unknown-metric columns"),
        ({}, "evaluation.no-held-out-data"),
    ],
)
def test_wrong_names_are_refused(model: Path, tmp_path: Path, options: dict[str, Any], code: str) -> None:
    with raises(code):
        evaluate(model, device="cpu", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_pages_of_hostile_files_show_them_as_text(done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done / "out", tmp_path / "out"))
    evil = "</div><script>window.evil=1</script>"
    rows = rows_of(out)
    for key in ("prompt", "answer", "extracted"):
        rows[0][key] = evil
    rows[0] |= {"expected": [evil], "regions": [{"of": evil, "numbers": [evil]}, 3], "error": {"message": evil}}
    (path,) = out.glob("answers-*.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"index": 9, "values": {"a": "b"}}\n[]\n')
    results = json.loads((out / "results.json").read_text())
    (result,) = results.values()
    result |= {"categories": {evil: {evil: {"questions": evil}, "b": 3}}, "cost": {"seconds": evil}}
    (out / "results.json").write_text(json.dumps({evil: result}))
    listing = next((out / "images").glob("*.json"))
    listing.write_text(json.dumps({"0": [{"file": "../../../etc/passwd", "width": 1, "height": 1}, 4]}))
    page = write_evaluation_page(out).read_text()
    assert "<script" not in page
    assert "default-src 'none'" in page


def test_a_page_of_many_answers_is_bounded(done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done / "out", tmp_path / "out"))
    (path,) = out.glob("answers-*.jsonl")
    row = rows_of(out)[0] | {"prompt": "x" * 20_000, "answer": "y" * 2000}
    path.write_text("".join(json.dumps(row | {"index": number}) + "\n" for number in range(1000)))
    page = write_evaluation_page(out)
    assert page.stat().st_size < 20 << 20
    assert "of 1,000" in page.read_text()


def start(words: list[object], out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tessera", "eval", *map(str, words), "--out", str(out), "--device", "cpu"]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.slow
def test_an_evaluation_continues_after_kills_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    words = [model, "--data", write_table(tmp_path, 200), "--max-new-tokens", 60]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start([*words], whole).wait(WAIT_S) == 0, whole.with_suffix(".log").read_text()[-2000:]
    parts = killed / "answers-chartqa-vlmevalkit.jsonl.parts"
    counts = []
    for wanted in (5, 60):
        process = start(words, killed)
        deadline = time.monotonic() + WAIT_S
        while sum(file.read_bytes().count(b"\n") for file in parts.glob("rank-*")) < wanted:
            assert process.poll() is None, killed.with_suffix(".log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        counts.append(sum(file.read_bytes().count(b"\n") for file in parts.glob("rank-*")))
    assert counts[1] > counts[0] >= 5, "the second start has continued"
    assert not (killed / "results.json").exists()
    assert start(words, killed).wait(WAIT_S) == 0
    names = "answers-chartqa-vlmevalkit.jsonl"
    assert (killed / names).read_bytes() == (whole / names).read_bytes()
    scores = [json.loads((out / "results.json").read_text()) for out in (whole, killed)]
    assert scores[0]["chartqa:vlmevalkit"]["figures"] == scores[1]["chartqa:vlmevalkit"]["figures"]


@pytest.mark.slow
def test_ranks_answer_each_question_once(model: Path, tmp_path: Path) -> None:
    """Seventeen questions do not divide by three ranks."""
    words: list[object] = [model, "--data", write_table(tmp_path, 17), "--max-new-tokens", 4]
    single, ranks = tmp_path / "single", tmp_path / "ranks"
    assert start(words, single).wait(WAIT_S) == 0
    assert start([*words, "--nproc", 3], ranks).wait(WAIT_S) == 0, ranks.with_suffix(".log").read_text()[-2000:]
    name = "answers-chartqa-vlmevalkit.jsonl"
    assert (ranks / name).read_bytes() == (single / name).read_bytes()
    assert [row["index"] for row in rows_of(ranks)] == [*range(17)]
    both = [next(iter(read_results(out).values())) for out in (single, ranks)]
    assert both[0]["fingerprint"] == both[1]["fingerprint"]
    assert [result["environment"]["ranks"] for result in both] == ["1", "3"]


def write_colours(folder: Path) -> Path:
    """Write a task file with three questions of text."""
    rows = [{"question": f"Say {word}.", "answer": word} for word in ("red", "blue", "tall")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = folder / "colours.yaml"
    task.write_text("name: colours\ndata: {path: rows.jsonl}\nprompt: '{question}'\nmetric: f1\nmax_new_tokens: 4\n")
    return task


def test_benchmarks_are_scored_during_training_and_choose_the_best_checkpoint(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "chat", samples=8)
    task = write_colours(tmp_path)
    recipe = chat_recipe(data, tmp_path / "runs", steps=4)
    recipe["evaluation"] = {"tasks": [str(task)], "every": 2}
    recipe["checkpoint"]["keep_best"] = "colours"
    run = tessera.train(recipe)
    scores = [row["eval_colours"] for row in run.metrics if "eval_colours" in row]
    assert len(scores) == 2
    assert json.loads((run.folder / "best.json").read_text())["metric"] == "colours"
    out = run.folder / "eval" / "training" / "step-00000004"
    assert read_results(out)["colours"]["score"] == scores[-1]
    assert "Say blue." in (out / "report.html").read_text()
    written = (out / "results.json").read_bytes()
    for _ in range(2):  # the second one continues the first
        again = evaluate(run.folder, tasks=str(task), device="cpu")
        assert again.folder == run.folder / "eval" / "step-00000004"
        assert [row["answer"] for row in rows_of(again.folder)] == [row["answer"] for row in rows_of(out)]
        assert again.score == scores[-1]
    assert again.results[0].cost is None
    assert (out / "results.json").read_bytes() == written
    (comparison,) = compare_results(out, again.folder)
    assert comparison.test is not None


@pytest.mark.slow
def test_a_recipe_names_the_metric_of_held_out_answers_and_functions_of_task_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_STATE_DIR", str(tmp_path / "state"))
    data = write_chat_set(tmp_path / "chat", samples=4)
    task = write_colours(tmp_path)
    (tmp_path / "score.py").write_text("def same(answer, question):\n    return {'same': 0.25}\n")
    task.write_text(task.read_text().replace("metric: f1", "metric: score.py:same"))
    recipe = chat_recipe(data, tmp_path / "runs", steps=1)
    recipe["evaluation"] = {"tasks": [str(task)], "metric": f"{tmp_path / 'score.py'}:same"}
    recipe["train"] |= {"generate_every": 1, "generate_samples": 2, "generate_tokens": 2}
    with raises("run.code-not-trusted", "score.py:same"):
        tessera.train(recipe)
    recipe["evaluation"]["functions"] = ["score.py:same"]
    run = tessera.train(recipe, overwrite=True)
    metrics = {name: value for row in run.metrics for name, value in row.items()}
    assert (metrics["eval_colours"], metrics["eval_same"]) == (0.25, 0.25)
    assert "eval_exact_match" not in metrics
    rows = [*read_jsonl(run.folder / "answers-step-1.jsonl")]
    assert [row["correct"] for row in rows] == [False, False]
    assert evaluate(run.folder, device="cpu", out=tmp_path / "out", max_new_tokens=2).results[0].metric == "same"
    (run.folder / "run-id").unlink()  # as in a run of somebody else
    with raises("run.code-not-trusted", "evaluation.metric"):
        evaluate(run.folder, device="cpu", out=tmp_path / "other", max_new_tokens=2)
    named = evaluate(run.folder, metric="anls", device="cpu", out=tmp_path / "other", max_new_tokens=2)
    assert named.results[0].metric == "anls"


@pytest.mark.parametrize(
    ("evaluation", "code"),
    [({"metric": "anls"}, "recipe.no-held-out-data"), ({"functions": ["a.py:b"]}, "recipe.no-task-files")],
)
def test_keys_of_the_evaluation_without_effect_are_refused(
    tmp_path: Path, evaluation: dict[str, Any], code: str
) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "chat", samples=2), tmp_path / "runs", steps=1)
    del recipe["data"]["eval"]
    with raises(code, "evaluation"):
        tessera.train({**recipe, "evaluation": evaluation})


@pytest.mark.slow
def test_a_run_that_replaces_another_is_evaluated_anew(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path / "chat", samples=4)
    recipe = chat_recipe(data, tmp_path / "runs", steps=1)
    task = write_colours(tmp_path)
    for _ in range(2):
        run = tessera.train(recipe, overwrite=True)
        assert not (run.folder / "eval").exists()
        evaluation = tessera.evaluate(run.folder, tasks=str(task), device="cpu")
        assert evaluation.folder == run.folder / "eval" / "step-00000001"
        recipe["train"]["seed"] = 7
