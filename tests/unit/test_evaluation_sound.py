"""Benchmarks about recordings: LibriSpeech from its folders and from Parquet, scored, and a report that plays them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.data.media.clips import AudioClip
from tessera.data.sources.container import RecordError
from tessera.evaluation.benchmark import Benchmark, BenchmarkQuestion
from tessera.evaluation.evaluate import evaluate
from tessera.evaluation.page import write_evaluation_page
from tessera.evaluation.tasks.load import open_task
from tests.errors import raises
from tests.toys import speech
from tests.toys.audio_folder import audio_folder

pytest.importorskip("av")
RATE = 16_000
TEXTS = ["ONE TWO THREE", "WRITE DOWN", "WHAT IS SAID"]


def librispeech(folder: Path) -> Path:
    """Write three utterances of a second as LibriSpeech has them, of which one has no recording."""
    for chapter, numbers in {"84/121": [0, 1], "9/2": [2]}.items():
        here = folder / chapter
        here.mkdir(parents=True)
        stem = chapter.replace("/", "-")
        (here / f"{stem}.trans.txt").write_text("".join(f"{stem}-{n:04} {TEXTS[n]}\n" for n in numbers))
        for number in numbers[:1]:
            data = speech.encoded(speech.steps(1, RATE), RATE, "flac", "flac")
            (here / f"{stem}-{number:04}.flac").write_bytes(data)
    return folder


def question_at(benchmark: Benchmark, number: int) -> BenchmarkQuestion | RecordError:
    ((_, question),) = benchmark.questions(range(number, number + 1))
    return question


def test_librispeech_of_folders(tmp_path: Path) -> None:
    benchmark = open_task("librispeech", data=librispeech(tmp_path / "test-clean"))
    assert len(benchmark) == 3
    first, lost = question_at(benchmark, 0), question_at(benchmark, 1)
    assert isinstance(first, BenchmarkQuestion)
    assert [(part.kind, part.value) for part in first.sample.messages[0].parts] == [
        ("audio", "84/121/84-121-0000.flac"),
        ("text", "Transcribe the speech."),
    ]
    assert (first.id, first.expected) == ("84-121-0000", ("ONE TWO THREE",))
    assert isinstance(lost, RecordError)
    assert lost.code == "media.no-such-file"
    mark = benchmark.metric.mark("One, two -- four!", first)
    assert benchmark.metric.summary(mark.values) == {"wer": 1}  # numbers in a row are one word: 124, not 123
    assert len(benchmark.protocol()["data"]["md5"]) == 2
    alone = question_at(open_task("librispeech:recording", data=tmp_path / "test-clean"), 0)
    assert isinstance(alone, BenchmarkQuestion)
    assert [part.kind for part in alone.sample.messages[0].parts] == ["audio"]


def test_librispeech_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = speech.wav(speech.steps(1, RATE), RATE)
    rows = {"id": ["1-2-0"], "audio": [{"bytes": data, "path": "1-2-0.flac"}], "text": ["ONE TWO"]}
    (tmp_path / "other" / "test").mkdir(parents=True)
    parquet.write_table(pyarrow.table(rows), tmp_path / "other" / "test" / "0000.parquet")
    question = question_at(open_task("librispeech:other", data=tmp_path), 0)
    assert isinstance(question, BenchmarkQuestion)
    assert question.sample.media()[0].value == data
    with raises("evaluation.no-data"):
        open_task("librispeech", data=tmp_path)


def test_tasks_with_parts_of_recordings(tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_bytes(speech.wav(speech.steps(2, RATE), RATE))
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "start": "0.5", "end": "1", "answer": "x"}\n{"id": "b"}\n')
    task = tmp_path / "talk.yaml"
    columns = 'columns: {audio: ["talk.wav#t={start},{end}"]}'
    task.write_text(f"name: talk\nprompt: What?\nmetric: exact\ndata: {{path: rows.jsonl}}\n{columns}\n")
    benchmark = open_task(task)
    question = question_at(benchmark, 0)
    assert isinstance(question, BenchmarkQuestion)
    assert question.sample.media()[0].value == AudioClip("talk.wav", 0.5, 1.0)
    assert isinstance(question_at(benchmark, 1), RecordError)


def test_report_plays_recordings(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = librispeech(tmp_path / "test-clean")
    model = audio_folder(tmp_path / "model")
    (result,) = evaluate(model, tasks="librispeech", data=data, max_new_tokens=4, device="cpu", out=out).results
    assert (result.metric, result.questions, result.unusable) == ("wer", 2, 1)
    page = write_evaluation_page(out).read_text(encoding="utf-8")
    assert page.count("<audio controls") == 2
    assert "media-src data:" in page
    (tmp_path / "outside.mp3").write_bytes(b"x")
    (listed,) = (out / "images").glob("*.json")
    listed.write_text(re.sub(r'"images/[^"]+"', '"../outside.mp3"', listed.read_text()))
    assert write_evaluation_page(out).read_text(encoding="utf-8").count("<audio controls") == 0
