"""Boxes and points of data sets: bad ones are left out with the reason, found by the doctor, trained on and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tessera
from tessera.config.run_config import SourceSection
from tessera.core.sample import Sample
from tessera.data.sources.container import RecordError
from tessera.data.sources.regions import MOST
from tessera.data.sources.source import open_source
from tessera.evaluation.evaluate import evaluate, held_out_sources
from tessera.inference.questions import Question, questions
from tessera.observe.report.page import write_report
from tessera.runtime import html
from tessera.runtime.files import read_jsonl
from tessera.tools.data_convert import convert
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.examine import examine, for_recipe
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.unit.data_cases import row, write_jsonl

WIDTH, HEIGHT = 40, 20
BOX = [4, 2, 20, 18]


def about(id: str, answer: str = "<bbox>", images: int = 1, **objects: Any) -> dict[str, Any]:
    """A row with a question about an image, and an answer with boxes."""
    return {
        "id": id,
        "messages": [
            {"role": "user", "content": "<image>" * images + "Say where it is."},
            {"role": "assistant", "content": answer},
        ],
        "images": ["a.png"] * images,
        "objects": objects,
    }


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no-object": ("data.bad-objects", about("", bbox=[BOX]) | {"objects": [1, 2]}),
    "no-json": ("data.bad-objects", about("") | {"objects": "{bbox: "}),
    "no-list": ("data.bad-objects", about("", bbox={"x": 1})),
    "flat": ("data.bad-objects", about("", bbox=BOX)),
    "deep": ("data.bad-objects", about("", bbox=[[BOX]])),
    "three": ("data.bad-objects", about("", bbox=[[1, 2, 3]])),
    "nan": ("data.bad-objects", about("", bbox=[[float("nan"), 2, 3, 4]])),
    "text": ("data.bad-objects", about("", bbox=[["1", 2, 3, 4]])),
    "huge": ("data.bad-objects", about("", bbox=[[1, 2, 3, 10**400]])),
    "many": ("data.bad-objects", about("", "<bbox>" * (MOST + 1), bbox=[BOX] * (MOST + 1))),
    "unit": ("data.bad-objects", about("", bbox=[BOX], bbox_type="percent")),
    "ids": ("data.bad-objects", about("", bbox=[BOX], image_id=[0, 0])),
    "name": ("data.not-a-text", about("", "<ref-object>", ref=[7])),
    "fewer": ("data.region-count", about("", "<bbox><bbox>", bbox=[BOX])),
    "more": ("data.region-count", about("", bbox=[BOX, BOX])),
    "names": ("data.region-count", about("", "<ref-object><bbox>", bbox=[BOX])),
    "image": ("data.region-image", about("", bbox=[BOX], image_id=[1])),
    "minus": ("data.region-image", about("", bbox=[BOX], image_id=[-1])),
    "no-image": ("data.region-image", about("", images=0, bbox=[BOX])),
    "reversed": ("data.region-outside", about("", bbox=[[20, 18, 4, 2]])),
    "flat-area": ("data.region-outside", about("", bbox=[[4, 2, 4, 18]])),
    "outside": ("data.region-outside", about("", bbox=[[50, 2, 60, 18]])),
    "point": ("data.region-outside", about("", bbox=[[20, 25]])),
    "pixels": ("data.region-outside", about("", bbox=[BOX], bbox_type="norm1")),
}
ODD = {
    "box-outside": about("box-outside", bbox=[[4, 2, 43, 18]]),
    "box-unit": about("box-unit", bbox=[[0.1, 0.1, 0.5, 0.9]]),
    "box-swapped": about("box-swapped", bbox=[[2, 4, 18, 39]]),
    "loose-placeholder": row("Where?", "<bbox>", id="loose-placeholder"),
}
GOOD = [
    about("good-0", bbox=[BOX]),
    about("good-1", "<ref-object><bbox> and <bbox>", 2, ref=["it"], bbox=[BOX, [3, 1]], image_id=[1, 0]),
    about("good-2", "<bbox>", bbox=[[0, 0, 1, 1]], bbox_type="norm1"),
    about("good-3", bbox=[[500, 500]], bbox_type="norm1000") | {"objects": '{"bbox": [[4, 2]]}'},
    about("good-4", "no boxes", bbox=[BOX, BOX]),
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_set(tmp_path_factory.mktemp("regions"), samples=1)
    Image.new("RGB", (WIDTH, HEIGHT), "teal").save(folder / "a.png")
    bad = [{**record, "id": id} for id, (_, record) in BAD.items()]
    write_jsonl(folder / "train.jsonl", [*bad, *ODD.values(), *GOOD])
    return folder


def recipe(zoo: Path, out: Path, **data: Any) -> dict[str, Any]:
    settings = chat_recipe(zoo, out, steps=2, eval_rows=1, global_batch=2)
    settings["data"] |= {"max_bad_share": 1.0, "length": 512, "eval": [], **data}
    return settings


def test_bad_objects_make_a_bad_sample_and_the_others_are_read(zoo: Path) -> None:
    source = open_source(SourceSection(path=zoo / "train.jsonl"))
    read = {str(item.where if isinstance(item, RecordError) else item.id): item for _, item in source.scan(range(99))}
    assert len(read) == len(BAD) + len(ODD) + len(GOOD)
    codes = {id: item.code for id, item in read.items() if isinstance(item, RecordError)}
    assert codes == {id: code for id, (code, _) in BAD.items() if code != "data.region-outside"}
    two = read["good-1"]
    assert isinstance(two, Sample)
    (part,) = two.messages[1].parts
    assert [(region.numbers, region.label, region.image) for region in part.regions] == [
        ((), "it", 0),
        ((4, 2, 20, 18), "it", 1),
        ((3, 1), "", 0),
    ]
    assert part.spelled() == "it[4.0, 2.0, 20.0, 18.0] and [3.0, 1.0]"


def test_a_conversion_keeps_boxes(zoo: Path) -> None:
    file, plain = write_jsonl(zoo / "good.jsonl", GOOD), zoo / "plain.jsonl"
    assert convert(SourceSection(path=file), plain).written == len(GOOD)
    sources = [open_source(SourceSection(path=path)) for path in (file, plain)]
    for number in range(4):  # the last sample has no placeholder, so that its `objects` is not read
        before, after = (source.read(number).messages for source in sources)
        assert before == after


def examined(zoo: Path, tmp_path: Path, model: bool) -> Diagnosis:
    sections = [SourceSection(path=zoo / "train.jsonl")]
    if not model:
        return examine(sections, workers=0, samples=99)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(zoo, tmp_path)))
    chosen = for_recipe(tmp_path / "recipe.yaml")
    return examine(sections, chosen.processor, length=512, work=chosen.work, workers=0, samples=99)


@pytest.mark.parametrize("model", [False, True])
def test_the_doctor_finds_each_flaw_at_its_sample(zoo: Path, tmp_path: Path, model: bool) -> None:
    diagnosis = examined(zoo, tmp_path, model)
    bad = diagnosis.findings["bad-boxes"]
    of_boxes = [id for id, (code, _) in BAD.items() if code != "data.not-a-text"]
    assert bad.count == len(of_boxes)
    assert {place.id for place in bad.locations} <= set(of_boxes)
    assert all(place.detail and place.code == BAD[place.id][0] for place in bad.locations)
    for kind in ODD:
        finding = diagnosis.findings[kind]
        assert (finding.count, finding.locations[0].id) == (1, kind)
        assert finding.locations[0].detail
    assert diagnosis.total("usable") == len(ODD) + len(GOOD)


def test_the_doctor_draws_boxes_and_points(zoo: Path, tmp_path: Path) -> None:
    page = examined(zoo, tmp_path, model=True).html()
    articles = page.split("<article>")[1:]
    article = next(text for text in articles if "good-1" in text)
    first, second = article.split('<svg class="shapes"')[1:]
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in first
    assert '<circle cx="3" cy="1"' in first
    assert '<rect x="4" y="2" width="16" height="16"' in second
    assert "<title>it</title>" in second
    assert "<svg" not in next(text for text in articles if "good-4" in text)


def test_a_run_trains_on_the_good_samples_and_lists_the_others(zoo: Path, tmp_path: Path) -> None:
    run = tessera.train(recipe(zoo, tmp_path))
    listed = {entry["id"]: entry["code"] for entry in read_jsonl(run.folder / "quarantine.jsonl")}
    assert listed == {id: code for id, (code, _) in BAD.items()}
    rows = list(read_jsonl(run.folder / "metrics.jsonl"))
    assert [entry["step"] for entry in rows if entry["kind"] == "train"] == [1, 2]


def test_truncation_by_turns_keeps_the_boxes_of_earlier_turns(zoo: Path, tmp_path: Path) -> None:
    talk = about("long", "<bbox>", bbox=[BOX, BOX])
    talk["messages"] += [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": "<bbox>" + "a" * 900}]
    data = write_jsonl(zoo / "long.jsonl", [talk, *GOOD])
    settings = recipe(zoo, tmp_path, truncate="turns", train=[{"path": str(data)}])
    run = tessera.train(settings)
    assert not (run.folder / "quarantine.jsonl").exists() or not list(read_jsonl(run.folder / "quarantine.jsonl"))


@pytest.fixture(scope="module")
def evaluated(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = write_jsonl(zoo / "eval.jsonl", GOOD)
    section = {"path": str(data)}
    run = tessera.train(recipe(zoo, tmp_path_factory.mktemp("runs"), train=[section], eval=[section]))
    score = evaluate(run.folder, max_new_tokens=2, device="cpu")
    assert score.results[0].unusable == 0
    return run.folder


def test_expected_answers_have_the_words_of_the_family(evaluated: Path) -> None:
    _, processor = tessera.load(evaluated, device="cpu")
    records = questions(held_out_sources(evaluated, None, None, None), processor.processor)
    expected = {one.sample.id: one for one in records if isinstance(one, Question)}
    assert expected["good-0"].expected == "<|box_start|>(100,100),(500,900)<|box_end|>"
    assert expected["good-3"].expected == "<|box_start|>(100,100)<|box_end|>"
    assert expected["good-4"].regions == ()
    answer = "It is at (100,100),(500,800), (1, 2)."
    marked = expected["good-0"].marked(answer, processor.processor)["regions"]
    assert [(one["of"], one["numbers"]) for one in marked] == [
        ("expected", [4, 2, 20, 18]),
        ("answer", pytest.approx([4, 2, 20, 16])),
    ]
    assert [one["image"] for one in expected["good-1"].marked(answer, processor.processor)["regions"]] == [1, 0, 1, 1]


def test_the_report_draws_expected_and_answered_boxes(evaluated: Path) -> None:
    file = evaluated / "answers.jsonl"
    rows = list(read_jsonl(file))
    assert [len(one.get("regions", [])) for one in rows] == [1, 2, 1, 1, 0]
    evil = {"of": "answer", "image": 0, "numbers": [float("inf"), "<b>", None, 1], "label": "</svg><script>"}
    rows[0]["regions"] += [{"of": "answer", "image": 0, "numbers": [1, 2, 3, 4], "label": "</svg><script>"}, evil, 3]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    page = write_report(evaluated).read_text()
    assert '<rect x="4" y="2" width="16" height="16" class="shape good"' in page
    assert '<rect x="1" y="2" width="2" height="2" class="shape held"' in page
    assert "<script" not in page
    assert "inf" not in page.split('<svg class="shapes"')[1].split("</svg>")[0]


def test_an_overlay_leaves_out_what_cannot_be_drawn() -> None:
    shapes = [html.Shape(numbers) for numbers in ((), (1.0,), (float("nan"), 1.0), (1.0, 2.0, 3.0))]
    assert html.overlay(10, 10, shapes) == ""
    many = html.overlay(10, 10, [html.Shape((1.0, 2.0))] * 5000)
    assert many.count("<circle") == html.MOST_SHAPES


def test_a_class_of_transformers_refuses_boxes(zoo: Path) -> None:
    from tessera.models.transformers.processor import _as_images

    sample = open_source(SourceSection(path=zoo / "train.jsonl")).read(len(BAD) + len(ODD))
    with raises("model.no-box-words"):
        _as_images(sample, [Image.new("RGB", (WIDTH, HEIGHT))])
