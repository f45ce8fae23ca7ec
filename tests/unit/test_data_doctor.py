"""The doctor finds every flaw of a set made of flaws, once, at its place; and what it writes cannot hurt its reader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.config.run_config import SourceSection, load_config
from tessera.core.sample import Sample
from tessera.tools.data_doctor.collect import ladder
from tessera.tools.data_doctor.diagnosis import Diagnosis
from tessera.tools.data_doctor.examine import ForModel, examine, for_model, for_recipe, sets_as_in
from tessera.tools.data_doctor.findings import KINDS
from tessera.tools.data_doctor.histogram import bars, chart, histogram, short
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.generation_set import pipeline_folder, processor_of, write_image, write_video
from tests.unit.data_cases import LetterProcessor, TroubleProcessor, pictures, png_header, row, seen, write_jsonl

ROOT = Path(__file__).parents[2]


def looked_at(*paths: Path, **options: Any) -> Diagnosis:
    arguments = {"workers": 0, "length": 100, **options}
    return examine(
        [SourceSection(path=path) for path in paths], arguments.pop("processor", LetterProcessor()), **arguments
    )


def counts(diagnosis: Diagnosis) -> dict[str, int]:
    return {name: found.count for name, found in diagnosis.findings.items()}


def with_image(image: str, text: str = "What?") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ---------------------------------------------------------------------------------------------- flaws

# Kind of finding -> messages of one row that has this flaw.
FLAWS: dict[str, list[dict[str, Any]]] = {
    "missing-file": [with_image("gone.png"), answer("a thing")],
    "outside-root": [with_image("../outside.png"), answer("a thing")],
    "by-url": [with_image("https://images.example.org/a.png"), answer("a thing")],
    "unreadable-media": [with_image("garbage.png"), answer("a thing")],
    "too-large": [with_image("bomb.png"), answer("a thing")],
    "unfit": [with_image("narrow.png"), answer("a thing")],
    "unknown-role": [{"role": "oracle", "content": "hm"}, answer("a thing")],
    "nothing-trained": [ask("and nobody answers?")],
    "too-long": [ask("long"), answer("a" * 200)],
    "empty-answer": [ask("say nothing"), answer("  ")],
    "all-trained": [answer("I speak"), answer("and speak")],
    "special-word": [ask("end it <|im_end|> here"), answer("so be it")],
    "loose-placeholder": [ask("look at <image> now"), answer("at what")],
    "mojibake": [ask("itâ€™s broken"), answer("so it is")],
    "control-character": [ask("a bell \x07"), answer("I hear")],
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    rows: list[Any] = [{"id": kind, "messages": talk} for kind, talk in FLAWS.items()]
    rows += [
        {"id": "more-places", "messages": [ask("<image><image>"), answer("hm, two")], "images": ["fine.png"]},
        {"id": "fewer-places", "messages": [ask("none"), answer("hm, one")], "images": ["fine.png"]},
        {"id": "two-users", "messages": [ask("one"), ask("two"), answer("three")]},
        {"id": "assistant-first", "messages": [answer("hello"), ask("hi"), answer("hello again")]},
        row("same words", "same answer", id="copy-1"),
        row("same words", "same answer", id="copy-2"),
        row("first of them", "one", id="twice"),
        row("second of them", "two", id="twice"),
        {"id": "fine", "messages": [with_image("fine.png"), answer("a red thing")]},
    ]
    file = write_jsonl(folder / "zoo.jsonl", rows)
    with file.open("a", encoding="utf-8") as more:
        more.write("{broken\n")
    pictures(folder, ["fine.png"])
    Image.new("RGB", (3000, 2)).save(folder / "narrow.png")
    (folder / "garbage.png").write_bytes(b"not a picture")
    (folder / "bomb.png").write_bytes(png_header(100_000, 100_000))
    return file


def test_every_flaw_is_found_once_and_at_its_place(zoo: Path) -> None:
    diagnosis = looked_at(zoo)
    count_of = counts(diagnosis)
    names = list(FLAWS)
    for name, finding in diagnosis.findings.items():
        if name in FLAWS:
            mine = [place for place in finding.locations if place.id == name]
            assert [place.where for place in mine] == [f"zoo.jsonl:{names.index(name) + 1}"], name
            assert mine[0].detail
    assert set(FLAWS) <= set(count_of)
    assert {name: count_of[name] for name in FLAWS} == dict.fromkeys(FLAWS, 1)
    assert count_of["placeholders"] == 2
    assert count_of["bad-row"] == 1
    assert count_of["repeated-content"] == 1
    turns = diagnosis.findings["turn-order"]
    assert {place.id for place in turns.locations} >= {"two-users", "assistant-first"}
    assert diagnosis.worst == "loss"
    assert diagnosis.exit_code == 1
    # Each row once: 8 unusable flaws of FLAWS (with the too long one 9), two placeholders, and one that is no JSON.
    assert diagnosis.total("rows") == len(FLAWS) + 10
    assert diagnosis.total("rows") - diagnosis.total("usable") == 9 + 2 + 1
    assert diagnosis.total("too_long") == 1


def test_worst_come_first_and_say_how_to_mend(zoo: Path) -> None:
    diagnosis = looked_at(zoo)
    severities = [KINDS[name].severity for name in diagnosis.findings]
    assert severities == sorted(severities, key=["loss", "warning", "note"].index)
    text = "\n".join(diagnosis.lines())
    for name, finding in diagnosis.findings.items():
        kind = KINDS[name]
        assert f"{kind.title}: {finding.count:,}" in text, name
        assert kind.mend.split()[0] in text


def test_without_a_model_lengths_are_characters(zoo: Path) -> None:
    diagnosis = looked_at(zoo, processor=None)
    count_of = counts(diagnosis)
    assert {"missing-file", "placeholders", "nothing-trained", "empty-answer", "all-trained"} <= set(count_of)
    assert "too-long" not in count_of
    assert not diagnosis.forecast
    assert any("--model" in line for line in diagnosis.lines())
    assert "--model" in diagnosis.html()
    assert {one.unit for one in diagnosis.histograms} >= {"characters"}


def test_processes_change_nothing(zoo: Path) -> None:
    alone, together = (json.loads(looked_at(zoo, workers=workers).json()) for workers in (0, 2))
    assert alone.pop("seconds") >= 0
    assert together.pop("seconds") > 0
    assert alone == together


def test_a_sound_set_is_called_sound(tmp_path: Path) -> None:
    rows = [row(f"question {number}", f"answer number {number}", id=str(number)) for number in range(40)]
    diagnosis = looked_at(write_jsonl(tmp_path / "good.jsonl", rows))
    assert counts(diagnosis) == {}
    assert (diagnosis.worst, diagnosis.exit_code) == ("sound", 0)
    assert "All 40 samples are sound" in diagnosis.lines()[0]


def test_only_decoding_finds_what_lies_behind_a_header(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    file = write_jsonl(tmp_path / "set.jsonl", [seen("cut.png", id="cut")])
    assert "damaged-media" not in counts(looked_at(file))
    assert counts(looked_at(file, decode=True))["damaged-media"] == 1
    assert counts(looked_at(file, decode=True, processor=None))["damaged-media"] == 1


def test_one_answer_for_most_is_told(tmp_path: Path) -> None:
    pictures(tmp_path, ["same.png"])
    rows = [{"messages": [with_image("same.png", f"question {n}"), answer("I cannot" if n % 2 else f"it is {n}")]}
            for n in range(60)]  # fmt: skip
    diagnosis = looked_at(write_jsonl(tmp_path / "set.jsonl", rows))
    findings = diagnosis.findings
    assert findings["one-answer"].count == 30
    assert "I cannot" in findings["one-answer"].locations[0].detail


def test_a_set_of_two_forms_is_a_finding_and_other_sets_are_seen(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png"])
    rows = [row("q", "words"), seen("a.png"), row("q2", "more words")]
    mixed, sound = (
        write_jsonl(tmp_path / "mixed.jsonl", rows),
        write_jsonl(tmp_path / "sound.jsonl", [row("q", "a b c")]),
    )
    diagnosis = looked_at(mixed, sound)
    assert counts(diagnosis)["set-refused"] == 1
    assert [one.usable for one in diagnosis.sets] == [0, 1]
    assert diagnosis.exit_code == 1


def test_pictures_that_are_enlarged_or_shrunk_are_told(tmp_path: Path) -> None:
    write_chat_set(tmp_path, samples=2)
    Image.new("RGB", (4, 4)).save(tmp_path / "tiny.png")
    Image.new("RGB", (400, 400)).save(tmp_path / "huge.png")
    file = write_jsonl(tmp_path / "set.jsonl", [seen("tiny.png", id="tiny"), seen("huge.png", id="huge")])
    model = toy(tmp_path)
    findings = looked_at(file, processor=model.processor, work=model.work, length=400).findings
    assert [place.id for place in findings["enlarged"].locations] == ["tiny"]
    assert [place.id for place in findings["shrunk"].locations] == ["huge"]
    assert "400x400 to " in findings["shrunk"].locations[0].detail


# ---------------------------------------------------------------------------------------------- forecast, figures


def test_the_forecast_says_what_a_length_drops(tmp_path: Path) -> None:
    # 10 letters each, in 1, 2, 4 or 8 exchanges of 10 letters.
    rows = [{"id": f"{n}-{k}", "messages": [m for _ in range(n) for m in (ask("q" * 5), answer(f"{k:05d}"))]}
            for n in (1, 2, 4, 8) for k in range(10)]  # fmt: skip
    diagnosis = looked_at(write_jsonl(tmp_path / "set.jsonl", rows), length=40)
    rungs = {rung.length: rung for rung in diagnosis.forecast}
    assert list(rungs) == [10, 20, 40, 80]
    chosen = rungs[40]
    assert chosen.chosen
    assert chosen.dropped == 10
    assert chosen.tokens_lost == pytest.approx(800 / 1500)
    assert rungs[10].dropped == 30
    assert rungs[80].dropped == 0
    assert rungs[80].padding == pytest.approx(1 - 1500 / (19 * 80))
    assert counts(diagnosis)["too-long"] == 10
    cut = looked_at(tmp_path / "set.jsonl", length=40, truncate="turns")
    assert counts(cut)["cut"] == 10
    assert (cut.total("usable"), cut.exit_code) == (40, 0)


def test_the_ladder_ends_where_everything_fits() -> None:
    assert ladder(2048, 1000) == [512, 1024, 2048]
    assert ladder(2048, 9000) == [512, 1024, 2048, 4096, 8192, 16384]
    assert ladder(1, 1) == [1]


def test_histograms_count_everything_once() -> None:
    chance = np.random.default_rng(0)
    for values in (
        chance.integers(0, 5, 1000),
        chance.integers(1, 100_000, 1000),
        np.array([7]),
        np.array([0, 0, 1_000_000]),
        chance.lognormal(30, 3, 1000),
        np.zeros(3),
    ):
        binned = histogram("title", "unit", values)
        assert binned is not None
        assert sum(binned.counts) == len(values)
        assert binned.percentiles[50] == pytest.approx(np.median(values))
        assert chart(binned).count("<rect") == len(binned.counts)
        assert len(bars(binned)) <= 48
    assert histogram("title", "unit", np.empty(0)) is None


def test_numbers_are_short() -> None:
    assert [short(x) for x in (0, 7, 999, 9_999, 12_345, 1_234_567, 2.5, 3.2e12)] == [
        "0", "7", "999", "9,999", "12.3k", "1.23M", "2.5", "3.2T"
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- sets


def test_a_set_that_the_recipe_names_as_well_is_read_as_the_recipe_says(tmp_path: Path) -> None:
    data = load_config(
        {
            "model": {"family": "qwen2_vl"},
            "train": {"steps": 1},
            "data": {"train": [{"path": tmp_path / "a.jsonl", "root": tmp_path / "photos", "columns": {"id": "n"}}]},
        }
    ).data
    same, other = sets_as_in([f"{tmp_path}/x/../a.jsonl", str(tmp_path / "b.jsonl")], data)
    assert same == data.train[0]
    assert other == SourceSection(path=tmp_path / "b.jsonl")


# ---------------------------------------------------------------------------------------------- samples shown


def toy(folder: Path) -> ForModel:
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(chat_recipe(folder, folder / "runs")))  # JSON is YAML
    return for_recipe(recipe)


def test_samples_are_shown_as_the_model_sees_them(tmp_path: Path) -> None:
    data = write_chat_set(tmp_path, samples=30)
    model = toy(tmp_path)
    assert model.data.length == 192
    diagnosis = looked_at(data / "train.jsonl", processor=model.processor, work=model.work, length=192, samples=6)
    assert [one.location for one in diagnosis.samples[:6]] == [f"train.jsonl:{n}" for n in range(1, 7)]
    assert 6 < len(diagnosis.samples) <= 9
    for shown_sample in diagnosis.samples:
        number = int(shown_sample.id.split("-")[1])
        words = json.loads((data / "train.jsonl").read_text().splitlines()[number])["messages"][1]["content"]
        trained = "".join(piece.text for piece in shown_sample.spans if piece.kind == "trained")
        assert trained == words + "<|im_end|>"
        assert 0 < (shown_sample.trained or 0) < (shown_sample.tokens or 0)
        assert len(shown_sample.media) == number % 3
        assert all(thumb.tokens and thumb.uri for thumb in shown_sample.media)
    titles = {one.title for one in diagnosis.histograms}
    assert {"Length of a sample", "Patches of a sample", "Work in text", "Work in vision"} <= titles
    assert "⟦" in "\n".join(diagnosis.lines())
    # A folder with a run in it serves as well as its recipe.
    (tmp_path / "run" / "processor").mkdir(parents=True)
    assert model.processor is not None
    model.processor.save(tmp_path / "run" / "processor")
    config = load_config(chat_recipe(tmp_path, tmp_path / "runs"), {"model.tokenizer": str(tmp_path / "gone")})
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    again = for_model(tmp_path / "run")
    assert again.processor is not None
    sample = Sample("x", ())
    assert again.processor.measure(sample, []) == model.processor.measure(sample, [])


# ---------------------------------------------------------------------------------------------- hostile data

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'\x1b[2J\u202e"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.mark.parametrize("with_processor", [True, False])
def test_nothing_from_data_becomes_markup_or_a_terminal_code(tmp_path: Path, with_processor: bool) -> None:
    folder = tmp_path / "a<script>b"
    folder.mkdir()
    name = "<img src=x onerror=alert(3)>.png"
    pictures(folder, [name])
    rows = [
        {"id": EVIL, "messages": [with_image(name, EVIL), answer(EVIL)]},
        {"id": EVIL + "2", "messages": [with_image(EVIL.replace("/", "") + ".png"), answer("gone")]},
        {"id": EVIL + "3", "messages": [{"role": EVIL, "content": EVIL}]},
    ]
    file = write_jsonl(folder / "<b>evil.jsonl", rows)
    diagnosis = looked_at(file, processor=LetterProcessor() if with_processor else None, length=400)
    page = diagnosis.html()
    tags = _Tags()
    tags.feed(page)
    names = [tag for tag, _ in tags.seen]
    assert "script" not in names
    assert "<script" not in page
    for tag, attributes in tags.seen:
        assert not [key for key in attributes if key.startswith("on")], tag
        assert all((value or "").startswith("data:") for key, value in attributes.items() if key in ("src", "href")), (
            tag
        )
    assert "alert(1)" in page  # shown, not hidden
    assert not re.search(r"https?://", page)
    for text in ["\n".join(diagnosis.lines()), page]:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
    assert json.loads(diagnosis.json())["findings"]


def test_a_sample_that_kills_its_reader_is_named(tmp_path: Path) -> None:
    rows = [row(f"question {n}", f"answer {n}", id=str(n)) for n in range(8)]
    rows[5] = row("question", "CRASH", id="deadly")
    file = write_jsonl(tmp_path / "set.jsonl", rows)
    diagnosis = examine([SourceSection(path=file)], TroubleProcessor(), length=100, workers=1, samples=2)
    findings = diagnosis.findings
    assert findings["stuck"].count == 1
    assert findings["stuck"].locations[0].where == "set.jsonl:6"
    assert diagnosis.total("usable") == 7


def test_wrong_input_is_said_plainly(tmp_path: Path) -> None:
    with raises("data.no-files-named"):
        examine([])
    with raises("data.no-such-file", "gone.jsonl"):
        looked_at(tmp_path / "gone.jsonl")


def test_the_same_examination_twice_is_the_same(tmp_path: Path) -> None:
    rows = [row(f"question {n}", f"answer {n}" * 5, id=str(n)) for n in range(300)]
    file = write_jsonl(tmp_path / "set.jsonl", rows)
    first, two = (replace(looked_at(file, length=30), seconds=0.0) for _ in range(2))
    assert first.html() == two.html()
    assert first.json() == two.json()


# ---------------------------------------------------------------------------------------------- the bench


@pytest.mark.slow
def test_the_data_bench_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "bench/data.py", "--quick"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    cases = {line["case"] for line in lines}
    assert cases == {"samples/s", "headers/s/core", "index rows/s", "seek ms", "bytes written"}
    written = next(line for line in lines if line["case"] == "bytes written")
    assert written["by_loading"] == 0
    assert written["pixel_bytes_loaded"] > 0
    assert written["by_indexing"]["data"] == written["by_indexing"]["temporary"] == 0


def test_images_and_videos_with_captions_are_examined(tmp_path: Path) -> None:
    write_image(tmp_path / "fine.png")
    write_video(tmp_path / "clip.mp4", 9)
    write_video(tmp_path / "long.mp4", 41)
    write_image(tmp_path / "small.png", (4, 4))
    (tmp_path / "garbage.mp4").write_bytes(b"no video")
    rows = [
        {"path": "fine.png", "cap": "a red square"},
        {"path": "clip.mp4", "cap": "a red square moving"},
        {"path": "long.mp4", "cap": "a blue square"},
        {"path": "small.png", "cap": "a green square"},
        {"path": "garbage.mp4", "cap": "a square"},
        {"path": "gone.mp4", "cap": "a square up"},
        {"path": "fine.png", "cap": "  "},
        {"path": "fine.png", "cap": "a" * 100_001},
        {"path": "fine.png", "cap": " ".join(["red"] * 40)},
    ]
    processor = processor_of(pipeline_folder(tmp_path / "model"), num_frames=41)
    diagnosis = looked_at(write_jsonl(tmp_path / "set.jsonl", rows), processor=processor, length=32)
    count_of = counts(diagnosis)
    wanted = {
        *("too-long", "unfit", "unreadable-media", "missing-file"),
        *("empty-caption", "huge-caption", "long-caption"),
    }
    assert {name: count_of.get(name) for name in wanted} == dict.fromkeys(wanted, 1)
    assert not {"nothing-trained", "all-trained", "turn-order", "empty-answer"} & set(count_of)
    assert diagnosis.total("usable") == 3
    assert {one.unit for one in diagnosis.histograms} >= {"seconds", "embeddings", "pixels"}
    assert [rung.dropped for rung in diagnosis.forecast if rung.chosen] == [1]
    assert diagnosis.exit_code == 1
    assert "clip.mp4" in diagnosis.html()
