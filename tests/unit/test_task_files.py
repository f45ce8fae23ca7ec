"""Benchmarks are read from small files with the columns of the published ones, and bad files are refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from tessera.data.sources.container import RecordError
from tessera.evaluation.benchmark import Benchmark, BenchmarkQuestion
from tessera.evaluation.tasks.load import open_task, published_files, read_task, task_names
from tests.errors import raises


def picture(number: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40 + number, 20), (10 * number, 80, 200)).save(buffer, "PNG")
    return buffer.getvalue()


def stored(number: int = 0) -> dict[str, Any]:
    """Return an image as Hugging Face stores it."""
    return {"bytes": picture(number), "path": None}


def parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), file, row_group_size=2)
    return file


def tsv(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    def cell(value: Any) -> str:
        text = base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
        return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in '"\n\t') else text

    lines = ["\t".join(rows[0]), *("\t".join(cell(value) for value in row.values()) for row in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def question_at(benchmark: Benchmark, number: int = 0) -> BenchmarkQuestion:
    ((index, question),) = benchmark.questions(range(number, number + 1))
    assert index == number
    assert isinstance(question, BenchmarkQuestion), question
    return question


def refused(benchmark: Benchmark, number: int = 0) -> str | None:
    ((_, question),) = benchmark.questions(range(number, number + 1))
    assert isinstance(question, RecordError), question
    return question.code


def prompt(question: BenchmarkQuestion) -> list[Any]:
    (message,) = question.sample.messages
    return [part.value if part.kind == "text" else part.kind for part in message.parts]


def sizes(question: BenchmarkQuestion) -> list[int]:
    parts = (part for part in question.sample.messages[0].parts if part.kind == "image")
    return [Image.open(io.BytesIO(part.value)).width - 40 for part in parts]


LETTER = "Answer with the option's letter from the given choices directly."
PHRASE = "Answer the question using a single word or phrase."
KIT = "Please select the correct answer from the options above. \n"
# Task -> a row of the published columns, the prompt after the image, and an answer that is right.
PUBLISHED: dict[str, tuple[dict[str, Any], str, str]] = {
    "ai2d": (
        {"question": "Which?", "options": ["x", "y"], "answer": "1", "image": stored()},
        f"Which?\nA. x\nB. y\n{LETTER}",
        "B. y",
    ),
    "chartqa": (
        {"type": "human_test", "question": "How many?", "answer": "50", "image": stored()},
        "How many?\nAnswer the question with a single word.",
        "52",
    ),
    "docvqa": (
        {"questionId": "7", "question": "Who?", "answers": ["Ann Lee", "A. Lee"], "image": stored()},
        f"Who?\n{PHRASE}",
        "ann lee",
    ),
    "infovqa": (
        {"questionId": "7", "question": "Who?", "answers": ["Ann Lee"], "image": stored()},
        f"Who?\n{PHRASE}",
        "Ann Lee",
    ),
    "textvqa": (
        {
            "question_id": 7,
            "question": "what is IT?",
            "answers": ["stop"] * 10,
            "ocr_tokens": ["STOP"],
            "image": stored(),
        },
        f"What is it?\n{PHRASE}",
        "Stop.",
    ),
    "ocrbench": (
        {"dataset": "IIIT5K", "question": " read ", "question_type": "Digits", "answer": ["12"], "image": stored()},
        "read",
        "it says 12",
    ),
    "pope": (
        {"question_id": "1", "question": "Is there a cat?", "answer": "yes", "category": "random", "image": stored()},
        f"Is there a cat?\n{PHRASE}",
        "Yes",
    ),
    "scienceqa": (
        {"hint": "A hint.", "question": "Which?", "choices": ["x", "y"], "answer": 0, "image": stored()},
        f"Context: A hint.\nWhich?\nA. x\nB. y\n{LETTER}",
        "A",
    ),
    "mmstar": (
        {
            "index": 3,
            "question": "Which?\nOptions: A: x, B: y Please answer yes or no.",
            "answer": "A",
            "image": stored(),
        }
        | {"category": "c", "l2_category": "d"},
        f"Which?\nOptions: A: x, B: y\n{LETTER[:-1]}",
        "The answer is A",
    ),
    "realworldqa": ({"question": "Which?\nA. x", "answer": "A", "image": stored()}, "Which?\nA. x", "A"),
    "mathvista": (
        {
            "pid": "1",
            "question": "How long?",
            "decoded_image": stored(),
            "choices": None,
            "unit": "cm",
            "precision": 1.0,
        }
        | {
            "answer": "1.2",
            "question_type": "free_form",
            "answer_type": "float",
            "query": "q",
            "metadata": {"task": "t"},
        },
        "How long? (Unit: cm)\nAnswer the question using a single floating-point number with one decimal place.",
        "1.21",
    ),
    "mmbench": (
        {
            "index": 1000123,
            "question": "Which?",
            "hint": "nan",
            "A": "x",
            "B": "y",
            "C": "nan",
            "D": "nan",
            "answer": "B",
        }
        | {"category": "c", "L2-category": "d", "image": stored()},
        f"Which? There are several options:\nA. x\nB. y\n\n{LETTER}",
        "B.",
    ),
    "gsm8k": (
        {"question": "How many?", "answer": "So.\n#### 18"},
        "Q: How many?\nA: Let's think step by step.",
        "It is 18.",
    ),
    "ifeval": (
        {"key": 1, "prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"]}
        | {"kwargs": [{"num_words": None, "relation": None}]},
        "Say it.",
        "It",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_columns_prompts_and_metrics(name: str, tmp_path: Path) -> None:
    row, text, right = PUBLISHED[name]
    task, _, _ = read_task(name)
    folder = task.data.config or "data"
    published = task.data.file or f"{folder}/{task.data.split}-00000-of-00001.parquet"
    parquet(tmp_path / published, [row])
    parquet(tmp_path / folder / "other-00000-of-00001.parquet", [row, row])  # a split that is not asked
    benchmark = open_task(name, data=tmp_path)
    question = question_at(benchmark)
    assert (benchmark.name, benchmark.variant, len(benchmark)) == (name, "lmms-eval", 1)
    assert prompt(question) == ([] if name in ("gsm8k", "ifeval") else ["image"]) + [text]
    for answer, score in ((right, 1), (f"<think>no, x</think>\n{right}", 1), ("", 0), ("zzz, zzz", 0)):
        values = benchmark.metric.mark(answer, question).values
        assert next(iter(benchmark.metric.summary(values).values())) == score, answer
    protocol = json.loads(json.dumps(benchmark.protocol()))
    assert protocol["prompt"] == ([*task.prompt] if isinstance(task.prompt, list) else task.prompt)
    (digest,) = protocol["data"]["md5"]
    assert digest == hashlib.md5((tmp_path / published).read_bytes()).hexdigest()


def test_every_task_and_variant_is_valid() -> None:
    expected = {*PUBLISHED, "mmmu", "videomme", "refcoco", "refcoco+", "refcocog", "librispeech"}
    assert set(task_names()) == expected
    for name in task_names():
        task, variant, _ = read_task(name)
        assert (task.name, variant) == (name, "clean" if name == "librispeech" else "lmms-eval")
        for variant in task.variants:
            assert read_task(f"{name}:{variant}")[1] == variant
    files = published_files()
    assert {"MMMU_DEV_VAL.tsv", "AI2D_TEST.tsv", "ChartQA_TEST.tsv", "DocVQA_VAL.tsv", "RefCOCO.tsv"} <= set(files)
    assert files["MMBench_DEV_CN.tsv"] == "mmbench:vlmevalkit-cn"


def test_images_of_mmmu_are_where_the_text_names_them(tmp_path: Path) -> None:
    common = {
        "id": "validation_Art_Theory_3",
        "options": "['x', 'y']",
        "answer": "B",
        "question_type": "multiple-choice",
    }
    images = {f"image_{number}": stored(number) if number < 4 else None for number in range(1, 8)}
    texts = ("Compare <image 2> with <image 1> now", "<image 3> <image 3> end", "none", "see <image 5>")
    file = parquet(tmp_path / "a.parquet", [{**common, "question": text, **images} for text in texts])
    benchmark = open_task("mmmu", data=file)
    first, twice, without = (question_at(benchmark, number) for number in range(3))
    tail = f"A. x\nB. y\n\n{LETTER}"
    assert prompt(first) == ["Compare", "image", "with", "image", f"now\n{tail}"]
    assert sizes(first) == [1, 2]  # lmms-eval takes them in order, whatever the text names
    assert first.categories == {"domain": "Art and Design", "subject": "Art_Theory"}
    assert prompt(twice) == ["image", f"end\n{tail}"]
    assert prompt(without) == [f"none\n{tail}"]
    assert refused(benchmark, 3) == "evaluation.no-media"
    rows = [
        {"index": 1, "question": texts[0], "image": f"{[encoded(1), encoded(2)]}", "answer": "B", "A": "x", "B": "y"}
    ]
    rows.append({**rows[0], "index": 2, "image": f"{[encoded(3)]}"})
    by_number = open_task("mmmu", data=tsv(tmp_path / "MMMU_DEV_VAL.tsv", rows))
    assert by_number.variant == "vlmevalkit"
    question = question_at(by_number)
    assert sizes(question) == [2, 1]
    assert prompt(question)[0] == "Question: Compare "
    assert refused(by_number, 1) == "evaluation.no-media"


def encoded(number: int) -> str:
    return base64.b64encode(picture(number)).decode()


def test_a_table_of_vlmevalkit_with_shared_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"A": "x", "B": "y", "C": "", "answer": "B", "category": "c"}
    rows = [
        {"index": "10", "hint": "A\thint", "question": 'Say "it"\nWhich?', "image": picture(1), **columns},
        {"index": "11", "hint": "", "question": "Which?", "image": "10", **columns},
        {"index": "12", "hint": "", "question": "Which?", "image": "13", **columns},  # of a row below
        {"index": "13", "hint": "", "question": "Which?", "image": picture(3), **columns},
        {"index": "14", "hint": "", "question": "Which?", "image": "99", **columns},
        {"index": "15", "hint": "", "question": "Which?", "image": "11", **columns},  # of a row without its own
        {"index": "16", "hint": "", "question": "Which?", "image": "x" * 70, **columns},
        {"index": "17", "hint": "", "question": "Which?", "image": "", **columns},
        {"index": "18", "hint": "", "question": "Which?", "image": picture(), **columns, "answer": ""},
    ]
    with caplog.at_level(logging.WARNING, "tessera"):
        benchmark = open_task("ai2d", data=tsv(tmp_path / "AI2D_TEST.tsv", rows))
    assert "not the published file" in caplog.text
    assert benchmark.protocol()["data"]["published"] is False
    options = f"Options:\nA. x\nB. y\n{KIT}"
    first = question_at(benchmark)
    assert prompt(first) == ["image", f'Hint: A\thint\nQuestion: Say "it"\nWhich?\n{options}']
    assert (first.id, first.expected, dict(first.options)) == ("10", ("B",), {"A": "x", "B": "y"})
    assert [sizes(question_at(benchmark, number)) for number in range(4)] == [[1], [1], [3], [3]]
    assert prompt(question_at(benchmark, 1)) == ["image", f"Question: Which?\n{options}"]
    codes = [refused(benchmark, number) for number in range(4, 9)]
    assert codes == [*["evaluation.image-not-base64"] * 3, "evaluation.no-media", "evaluation.no-answer"]


def test_media_are_below_their_folder_and_exist(tmp_path: Path) -> None:
    (tmp_path / "outside.png").write_bytes(picture())
    data = tmp_path / "data"
    (data / "media").mkdir(parents=True)
    (data / "media" / "a.png").write_bytes(picture(2))
    (data / "media" / "link.png").symlink_to(tmp_path / "outside.png")
    paths = ["a.png", "['a.png', 'a.png']", "../../outside.png", str(tmp_path / "outside.png"), "link.png", "b.png"]
    rows = [{"index": n, "question": "q", "answer": "a", "image_path": path} for n, path in enumerate(paths)]
    file = tsv(data / "ChartQA_TEST.tsv", [*rows, {**rows[0], "index": 9, "image_path": "http://host/a.png"}])
    benchmark = open_task("chartqa", data=file, root=data / "media")
    assert [len(question_at(benchmark, number).sample.media()) for number in range(2)] == [1, 2]
    codes = [refused(benchmark, number) for number in range(2, 7)]
    assert codes[0] == "media.path-leads-up"
    assert codes[3:] == ["media.no-such-file", "media.url-not-allowed"]
    assert all(code is not None and code.startswith("media.") for code in codes)


def test_boxes_have_a_question_for_each_expression(tmp_path: Path) -> None:
    rows = [
        {"question_id": "1", "bbox": [4.0, 2.0, 20.0, 10.0], "answer": ["left dog", "dog"], "image": stored()},
        {"question_id": "2", "bbox": [0.0, 0.0, 10.0, 10.0], "answer": ["cat"], "image": stored(10)},
        {"question_id": "3", "bbox": [0.0], "answer": ["cat"], "image": stored(10)},
    ]
    file = parquet(tmp_path / "data" / "val-0.parquet", rows)
    benchmark = open_task("refcoco", data=tmp_path)
    assert len(benchmark) == 4
    assert [question_at(benchmark, number).expected for number in range(3)] == [("left dog",), ("dog",), ("cat",)]
    right = "[0.1, 0.1, 0.6, 0.6]"  # of 40 x 20 pixels
    assert benchmark.metric.mark(right, question_at(benchmark, 1)).values["iou"] == pytest.approx(1)
    assert refused(benchmark, 3) == "evaluation.bad-box"
    together = open_task("refcoco:grounding", data=file)
    assert len(together) == 3
    assert '"left dog", "dog" in the image' in prompt(question_at(together))[-1]
    values = together.metric.mark('[{"bbox_2d": [4, 2, 24, 12]}]', question_at(together)).values
    assert values["acc@0.9"] == 1


def test_rows_of_one_split_and_groups_of_rotations(tmp_path: Path) -> None:
    box = {"bbox_x1": 4, "bbox_y1": 2, "bbox_x2": 24, "bbox_y2": 12, "width": 40, "height": 20}
    splits = ("RefCOCO_val", "RefCOCO+_val", "RefCOCO_testA")
    rows = [
        {"index": n, "split": split, "question": "Where?", "answer": "[]", "image": picture(), **box}
        for n, split in enumerate(splits)
    ]
    file = tsv(tmp_path / "RefCOCO.tsv", rows)
    plain, plus = open_task("refcoco", data=file), open_task("refcoco+", data=file)
    assert [(question.id, question.categories["split"]) for question in map(question_at, [plain] * 2, range(2))] == [
        ("0", "RefCOCO_val"),
        ("2", "RefCOCO_testA"),
    ]
    assert (len(plus), question_at(plus).id) == (1, "1")
    assert plus.metric.mark("[4 2 24 12]", question_at(plus)).values["iou"] < 0.1  # up to 1000: thousandths
    assert plus.metric.mark("[0.1 0.1 0.6 0.6]", question_at(plus)).values["iou"] == pytest.approx(1)
    row = PUBLISHED["mmbench"][0]
    indices = (5, 1000005, 2000005, 100005, 3000000, 0)
    file = parquet(tmp_path / "dev.parquet", [{**row, "index": index} for index in indices])
    benchmark = open_task("mmbench", data=file)
    assert [question_at(benchmark, number).group for number in range(6)] == ["5", "5", "5", "100005", "0", "0"]
    assert question_at(open_task("mmbench:single", data=file)).group == ""


def test_videos_are_found_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "abc.mkv").write_bytes(b"x")
    row = {"videoID": "abc", "question_id": "1-1", "question": "Which?", "options": ["A. x", "B. y"], "answer": "A"}
    table = parquet(tmp_path / "t.parquet", [{**row, "duration": "short"}, {**row, "videoID": "../../etc/passwd"}])
    benchmark = open_task("videomme", data=table, root=tmp_path)
    question = question_at(benchmark)
    assert question.sample.media()[0].value == "data/abc.mkv"
    assert "Which?\nA. x\nB. y\n\nAnswer" in prompt(question)[-1]
    assert question.categories["duration"] == "short"
    assert refused(benchmark, 1) == "media.path-leads-up"


# ---------------------------------------------------------------------------------------------- the user's own


def user_task(folder: Path, **keys: Any) -> Path:
    file = folder / "mine.yaml"
    task = {"name": "mine", "data": {"path": "rows.jsonl"}, "prompt": "{question}", "metric": "exact", **keys}
    file.write_text(yaml.safe_dump(task, allow_unicode=True), encoding="utf-8")
    return file


def write_rows(folder: Path, *rows: Mapping[str, Any]) -> None:
    lines = rows or ({"question": "2 + 2?", "answer": "4"}, {"question": "red?", "answer": ["yes", "y"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_cells_of_images_may_be_empty_or_numbers_of_other_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, {"question": "q", "answer": "1", "paths": ""})
    assert refused(open_task(user_task(tmp_path, columns={"image_paths": "paths"}))) == "evaluation.no-media"
    image = base64.b64encode(picture()).decode()
    rows = [{"index": 0, "image": image}, {"index": 1, "image": 0}]
    write_rows(tmp_path, *({"question": "q", "answer": "1", **row} for row in rows))
    task = open_task(user_task(tmp_path, columns={"images": ["image"]}))
    assert sizes(question_at(task, 1)) == sizes(question_at(task, 0))


def test_a_task_of_the_user_is_a_file_with_a_question_and_a_metric(tmp_path: Path) -> None:
    write_rows(tmp_path)
    benchmark = open_task(
        user_task(tmp_path, variants={"short": {"prompt": "{question} Briefly.", "max_new_tokens": 2}})
    )
    assert [question_at(benchmark, number).expected for number in range(2)] == [("4",), ("yes", "y")]
    assert benchmark.metric.mark("4", question_at(benchmark)).values == {"accuracy": 1}
    short = open_task(f"{tmp_path / 'mine.yaml'}:short")
    assert (prompt(question_at(short)), short.variant, short.max_new_tokens) == (["2 + 2? Briefly."], "short", 2)
    extraction = {"pattern": r"answer: (\S+)", "otherwise": "nothing"}
    each = open_task(user_task(tmp_path, extraction=extraction)).metric
    marks = [each.mark(answer, question_at(benchmark)) for answer in ("answer: 3, so answer: 4", "4")]
    assert [(mark.extracted, mark.values["accuracy"]) for mark in marks] == [("4", 1), (None, 0)]


def test_code_of_a_task_file_needs_trust(tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "score.py").write_text("def half(answer, question):\n    return 0.5\n")
    file = user_task(tmp_path, metric="score.py:half")
    with raises("run.code-not-trusted"):
        open_task(file)
    for trust in (True, {"score.py:half"}):
        benchmark = open_task(file, trust=trust)
        assert benchmark.metric.mark("x", question_at(benchmark)).values == {"score": 0.5}


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        ({"promt": "x"}, "recipe.unknown-key", "prompt"),
        ({"data": {"pth": "x"}}, "recipe.unknown-key", "path"),
        ({"metric": "exct"}, "evaluation.unknown-metric", "exact"),
        ({"metric": {"name": "anls", "options": {"lenght": "raw"}}}, "evaluation.metric-option", "length"),
        ({"prompt": "{question.__class__}"}, "evaluation.bad-template", ""),
        ({"prompt": "{question[0]}"}, "evaluation.bad-template", ""),
        ({"prompt": "{question!r}"}, "evaluation.bad-template", ""),
        ({"prompt": "{question:upper}"}, "evaluation.bad-template", "lower"),
        ({"prompt": "{question:match (}"}, "evaluation.bad-pattern", ""),
        ({"prompt": "{question"}, "evaluation.bad-template", ""),
        ({"extraction": {"pattern": "("}}, "evaluation.bad-pattern", ""),
        ({"columns": {"answer": None}}, "evaluation.no-answer", ""),
        ({"variants": {"short": {"promt": "x"}}}, "recipe.unknown-key", "prompt"),
        ({"variants": {"short": {"name": "x"}}}, "evaluation.bad-variant", ""),
        ({"columns": {"group": "{question}"}, "metric": "wer"}, "evaluation.metric-without-groups", "worst"),
        ({"data": {}}, "evaluation.no-data", ""),
        ({"data": {"path": "rows.json"}}, "data.no-such-file", "rows.jsonl"),
    ],
)
def test_mistakes_in_a_task_file_are_named(keys: dict[str, Any], code: str, words: str, tmp_path: Path) -> None:
    write_rows(tmp_path)
    with raises(code, words):
        open_task(user_task(tmp_path, **keys))


def test_unknown_names_and_variants(tmp_path: Path) -> None:
    with raises("evaluation.unknown-benchmark", "mmmu"):
        open_task("mmmmu")
    with raises("evaluation.unknown-variant", "vlmevalkit"):
        open_task("mmmu:vlmeval")
    with raises("evaluation.no-table"):
        open_task("mmmu", data=tmp_path / "x.tsv")
    with raises("evaluation.no-data", "AI2D_TEST.tsv"):
        (tmp_path / "AI2D_TEST_.tsv").write_text("a\tb\n")
        open_task("ai2d:vlmevalkit", data=tmp_path)


def test_a_published_file_name_and_a_variant_select_a_task(tmp_path: Path) -> None:
    row = {"index": "1", "question": "q", "answer": "A", "A": "x", "B": "y", "image": picture()}
    tsv(tmp_path / "AI2D_TEST.tsv", [row])
    for name in ("AI2D_test", "ai2d:vlmevalkit"):
        benchmark = open_task(name, data=tmp_path)
        assert (benchmark.name, benchmark.variant, len(benchmark)) == ("ai2d", "vlmevalkit", 1)


def test_damaged_files_are_refused_or_their_rows_are(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", [PUBLISHED["ai2d"][0]] * 3).read_bytes()
    for end in (0, 3, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.parquet").write_bytes(whole[:end])
        with raises("data.damaged-parquet"):
            open_task("ai2d", data=tmp_path / "a.parquet")
    wrong = open_task("ai2d", data=parquet(tmp_path / "b.parquet", [{"text": "x"}]))
    assert refused(wrong) in ("evaluation.no-answer", "evaluation.no-media")
    bad = [{**PUBLISHED["ai2d"][0], "answer": answer} for answer in ("2", "-1", "x")]
    numbers = open_task("ai2d", data=parquet(tmp_path / "c.parquet", bad))
    assert [refused(numbers, number) for number in range(3)] == ["evaluation.bad-options"] * 3
    file = tsv(tmp_path / "ChartQA_TEST.tsv", [{"index": "1", "question": "q", "answer": "a", "image": picture()}] * 2)
    file.write_bytes(file.read_bytes()[:-40])
    cut = open_task("chartqa", data=file)
    assert question_at(cut).expected == ("a",)
    assert refused(cut, 1) == "evaluation.image-not-base64"
    (tmp_path / "empty.jsonl").write_text("")
    with raises("evaluation.empty-table"):
        open_task(user_task(tmp_path, data={"path": "empty.jsonl"}))
    for value in ("[" * 100_000, "['a'", "(1, 2"):
        write_rows(tmp_path, {"question": "q", "answer": "a", "options": value})
        benchmark = open_task(user_task(tmp_path, columns={"options": "options"}))
        assert question_at(benchmark).options == {"A": value}


def test_a_hundred_thousand_rows_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (f'{{"question": "what is {number}?", "answer": "{number}"}}\n' for number in range(100_000))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    benchmark = open_task(user_task(tmp_path))
    assert len(benchmark) == 100_000
    questions = list(benchmark.questions(range(99_998, 100_000)))
    assert [(n, q.expected) for n, q in questions if isinstance(q, BenchmarkQuestion)] == [
        (99_998, ("99998",)),
        (99_999, ("99999",)),
    ]
