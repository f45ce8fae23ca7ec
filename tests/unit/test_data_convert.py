"""Data sets written in another spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_cases import pictures, row, seen, write_jsonl

from tessera.config.run_config import SourceSection
from tessera.data.sources.source import Source, open_source
from tessera.tools.data_convert import convert
from tessera_compat.mindspeed_mm.llava_data import convert_llava
from tests.errors import raises


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    (tmp_path / "COCO2017" / "train2017").mkdir(parents=True)
    pictures(tmp_path / "COCO2017" / "train2017", ["000000033471.jpg", "000000052846.jpg"])
    return tmp_path / "COCO2017"


def llava(path: Path, *more: dict[str, Any]) -> Path:
    said = [
        seen("000000033471.jpg", id="000000033471"),
        {"id": "none", "conversations": [{"from": "human", "value": "Hé?"}, {"from": "gpt", "value": "Yes."}]},
        {"id": "empty", "image": "", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
        seen("000000052846.jpg", id="000000052846"),
    ]
    path.write_text(json.dumps([*said, *more], ensure_ascii=False), encoding="utf-8")
    return path


def test_llava_instruct_becomes_the_mllm_form(tmp_path: Path, coco: Path) -> None:
    annotations = llava(
        tmp_path / "llava.json",
        seen("000000000000.jpg", id="gone"),
        seen("../../etc/passwd", id="outside"),
        {"id": "king", "image": "000000033471.jpg", "conversations": [{"from": "king", "value": "<image>"}]},
    )
    done = convert_llava(annotations, coco, tmp_path / "out" / "mllm.json")
    assert (done.written, done.skipped) == (4, {"media.no-such-file": 2, "data.unknown-speaker": 1})
    rows = json.loads((tmp_path / "out" / "mllm.json").read_text(encoding="utf-8"))
    assert rows[0] == {
        "images": [f"{coco}/train2017/000000033471.jpg"],
        "messages": [
            {"role": "user", "content": "<image>\nWhat?"},
            {"role": "assistant", "content": "A thing."},
        ],
    }
    assert rows[1] == {
        "images": [],
        "messages": [{"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "Yes."}],
    }
    assert f"{coco}/train2017/000000000000.jpg" in done.first[0].reason
    assert "3 skipped: 2 media.no-such-file, 1 data.unknown-speaker" in done.lines()[0]
    # What was written can be trained on, with the root that is named.
    assert done.root == coco
    assert f"root: {coco}" in done.lines()[1]
    source = open_source(SourceSection(path=done.out, root=coco))
    assert [len(source.read(n).media()) for n in range(4)] == [1, 0, 0, 1]
    assert list(tmp_path.glob("**/*.part")) == []


def test_without_a_look_at_the_pictures(tmp_path: Path) -> None:
    done = convert_llava(llava(tmp_path / "a.json"), tmp_path / "nowhere", tmp_path / "b.json", check_images=False)
    assert done.written == 4
    with raises("data.no-image-folder", "train2017"):
        convert_llava(tmp_path / "a.json", tmp_path / "nowhere", tmp_path / "c.json")


def test_nothing_is_overwritten_or_left_half_written(tmp_path: Path, coco: Path) -> None:
    annotations, out = llava(tmp_path / "a.json"), tmp_path / "b.json"
    out.write_text("mine")
    with raises("output.exists"):
        convert_llava(annotations, coco, out)
    convert_llava(annotations, coco, out, overwrite=True)
    assert len(json.loads(out.read_text())) == 4
    with raises("output.replaces-source"):
        convert(SourceSection(path=annotations), annotations, overwrite=True)
    write_jsonl(tmp_path / "mixed.jsonl", [row("a", "b"), seen("a.png")])
    with raises("data.mixed-formats"):
        convert(SourceSection(path=tmp_path / "mixed.jsonl"), tmp_path / "c.jsonl")
    write_jsonl(tmp_path / "bad.jsonl", [{"messages": []}])
    with raises("data.no-row-written"):
        convert(SourceSection(path=tmp_path / "bad.jsonl"), tmp_path / "c.jsonl")
    assert not (tmp_path / "c.jsonl").exists()
    assert list(tmp_path.glob(".*")) == []


def all_of(source: Source) -> list[Any]:
    return [(one.id, one.messages) for _, one in source.scan(range(len(source)))]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "rows",
    [
        [seen("a.png", id="x"), seen("b.png", id="y")],
        [{"id": "x", "instruction": "a", "output": "b", "history": [["c", "d"]]}],
        [{"id": "x", "text": "see <image> there", "images": ["a.png"]}, {"id": "y", "text": "plain"}],
        [row("<image> <video>", "b", id="x", images=["a.png"], videos=["b.mp4"], tools=[{"name": "f"}])],
    ],
)
def test_any_set_says_the_same_after_it_was_converted(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    before = SourceSection(path=write_jsonl(tmp_path / "a.jsonl", rows))
    done = convert(before, tmp_path / "b.jsonl")
    assert done.written == len(rows)
    assert all_of(open_source(before)) == all_of(open_source(SourceSection(path=done.out)))


def test_missing_media_can_be_looked_for(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png"])
    path = write_jsonl(tmp_path / "a.jsonl", [seen("a.png"), seen("gone.png"), {"conversations": []}])
    done = convert(SourceSection(path=path), tmp_path / "b.jsonl", check_media=True)
    assert (done.written, done.skipped) == (1, {"media.no-such-file": 1, "data.no-turns": 1})
