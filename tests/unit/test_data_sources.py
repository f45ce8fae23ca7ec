"""Rows of JSON and JSONL files in three spellings."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from data_cases import row, seen, write_jsonl

from tessera.core.errors import TesseraError
from tessera.core.types import Message, Part
from tessera.data.forms import RowError
from tessera.data.sources import FileSource, open_source

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "<image>and<image>: which? <video>"},
        {"from": "gpt", "value": "The first."},
    ],
    "images": ["a.png", "b.png"],
    "videos": ["c.mp4"],
}
PARTS = {
    "id": 7,
    "messages": [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what <image>?"}]},
        {"role": "assistant", "content": "A thing."},
    ],
}


def test_the_three_forms(tmp_path: Path) -> None:
    source = open_source(write_jsonl(tmp_path / "m.jsonl", [PARTS]))
    assert source.form == "messages"
    sample = source.read(0)
    assert sample.id == "7"
    assert sample.messages[0] == Message("user", (Part("image", "a.png"), Part("text", "what <image>?")))
    assert sample.messages[1] == Message("assistant", (Part("text", "A thing."),))

    source = open_source(write_jsonl(tmp_path / "s.jsonl", [SHAREGPT]))
    assert source.form == "sharegpt"
    sample = source.read(0)
    assert sample.id == "s.jsonl:1"
    assert [m.role for m in sample.messages] == ["system", "user", "assistant"]
    assert [(p.kind, p.value) for p in sample.messages[1].parts] == [
        ("image", "a.png"),
        ("text", "and"),
        ("image", "b.png"),
        ("text", ": which? "),
        ("video", "c.mp4"),
    ]

    source = open_source(write_jsonl(tmp_path / "l.jsonl", [seen("a.png", id="x")]))
    assert source.form == "llava"
    assert source.read(0).messages[0].parts == (Part("image", "a.png"), Part("text", "\nWhat?"))


def test_json_array_gives_the_same_rows_as_lines(tmp_path: Path) -> None:
    rows = [row(f"é中 {i}", 'ja\n"]},{', id=f"r{i}") for i in range(5)]
    lines = open_source(write_jsonl(tmp_path / "a.jsonl", rows))
    for number, indent in enumerate((None, 2)):
        path = tmp_path / f"b{number}.json"
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=bool(number)), encoding="utf-8")
        array = open_source(path)
        assert len(array) == len(lines) == 5
        assert [array.read(i) for i in (4, 0, 2)] == [lines.read(i) for i in (4, 0, 2)]


def test_text_only_rows_do_not_hide_the_form(tmp_path: Path) -> None:
    plain = {"conversations": seen("a.png")["conversations"][1:]}
    source = open_source(write_jsonl(tmp_path / "l.jsonl", [plain, seen("a.png"), plain]))
    assert source.form == "llava"
    assert [isinstance(sample, RowError) for _, sample in source] == [False] * 3
    assert open_source(write_jsonl(tmp_path / "p.jsonl", [plain])).form == "sharegpt"


def test_mixed_forms_are_an_error(tmp_path: Path) -> None:
    source = open_source(write_jsonl(tmp_path / "mixed.jsonl", [seen("a.png"), row("q", "a")]))
    with pytest.raises(TesseraError, match="has the form 'messages', the file was read as 'llava'") as raised:
        list(source)
    assert raised.value.where == f"{tmp_path / 'mixed.jsonl'}:2"
    with pytest.raises(TesseraError, match="has the form 'llava'"):
        open_source(tmp_path / "mixed.jsonl", form="sharegpt").read(0)


def test_blank_lines_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(row('a', 'b'))}\n\n  \r\n{json.dumps(row('c', 'd'))}".encode())
    source = open_source(path)
    assert [source.read(i).id for i in range(len(source))] == ["gaps.jsonl:1", "gaps.jsonl:4"]
    assert len(open_source(path, max_samples=1)) == 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"conversations": seen("a")["conversations"], "image": ["a", "b"]}, "1 <image> placeholders, 2 images"),
        ({**seen("a"), "image": []}, "1 <image> placeholders, 0 images"),
        ({**SHAREGPT, "videos": []}, "video token count that cannot match: 1 <video> placeholders, 0 videos"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "not a list of turns"),
        ({"messages": ["hello"]}, "not an object"),
        ({"messages": [{"role": "king", "content": "x"}]}, "unknown role 'king'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "unknown type of part 'smell'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a path is expected"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"messages": [{"role": "user", "content": "<image>"}], "images": []}, "1 <image> placeholders, 0 images"),
        ({"conversations": [{"from": "dog", "value": "x"}], "image": "a"}, "unknown speaker 'dog'"),
        ({"conversations": [{"from": "gpt", "value": None}], "image": "a"}, "not a text"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, bad: dict[str, Any], reason: str) -> None:
    source = open_source(write_jsonl(tmp_path / "bad.jsonl", [{**bad, "id": "it"}]))
    with pytest.raises(RowError) as raised:
        source.read(0)
    assert reason in raised.value.reason
    assert raised.value.id == "it"


def test_a_line_that_is_not_json_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text(
        f'{json.dumps(row("a", "b"))}\n{{"messages": [\n[1]\n{json.dumps(row("c", "d"))}\n', encoding="utf-8"
    )
    outcomes = [sample.reason if isinstance(sample, RowError) else sample.id for _, sample in open_source(path)]
    assert outcomes[0] == "torn.jsonl:1"
    assert outcomes[1].startswith("not readable as JSON")
    assert outcomes[2] == "a row is a JSON object, this is a list"
    assert outcomes[3] == "torn.jsonl:4"


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match="no such data file"):
        open_source(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TesseraError, match="no rows"):
        open_source(tmp_path / "empty.jsonl")
    with pytest.raises(TesseraError, match="cannot tell the form") as raised:
        open_source(write_jsonl(tmp_path / "other.jsonl", [{"prompt": "x"}]))
    assert "llava (conversations, image)" in str(raised.value)
    (tmp_path / "cut.json").write_text(json.dumps([row("a", "b")])[:-1])
    with pytest.raises(TesseraError, match="without ']'"):
        open_source(tmp_path / "cut.json")
    (tmp_path / "broken.json").write_text('[{"a": 1}, {"b": }]')
    with pytest.raises(TesseraError, match="row 2"):
        open_source(tmp_path / "broken.json")
    with pytest.raises(TesseraError, match="no such folder for media"):
        open_source(write_jsonl(tmp_path / "ok.jsonl", [row("a", "b")]), root=tmp_path / "nowhere")


def test_reading_leaves_no_handle_open(tmp_path: Path) -> None:
    source = open_source(write_jsonl(tmp_path / "a.jsonl", [row("a", "b")] * 3))
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(20):
        source.read(1)
        next(iter(source))
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before
    travelled = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own object, as a spawned worker gets it
    assert isinstance(travelled, FileSource)
    assert travelled.read(2) == source.read(2)
