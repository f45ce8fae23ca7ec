"""The examples of docs/how-to/bring-your-own-data.md and docs/reference/data-sets.md are true."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_cases import write_jsonl

from tessera.config.reader import build
from tessera.config.run_config import DataSection, SourceSection
from tessera.core.sample import Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.sources.fields import COLUMNS
from tessera.data.sources.regions import regions_of
from tessera.data.sources.source import Source, open_source

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = (DOCS / "how-to" / "bring-your-own-data.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference" / "data-sets.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", HOW_TO + REFERENCE, re.DOTALL)


def test_rows_are_of_the_forms_they_stand_for(tmp_path: Path) -> None:
    forms = []
    for number, block in enumerate(blocks("json")):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(block, encoding="utf-8")
        source = open_source(SourceSection(path=path))
        assert isinstance(source, Source)
        forms.append(source.record_format)
        assert all(isinstance(found, Sample) for _, found in source.scan(range(len(source))))
    assert forms == ["messages", "sharegpt", "llava", "alpaca", "query_response", "question_answer", "text"]


def test_rows_with_boxes_have_regions(tmp_path: Path) -> None:
    (block,) = blocks("jsonl")
    (tmp_path / "boxes.jsonl").write_text(block, encoding="utf-8")
    source = open_source(SourceSection(path=tmp_path / "boxes.jsonl"))
    boxes = [region for number in range(len(source)) for region in regions_of(source.read(number))]
    assert [(region.label, region.image) for region in boxes] == [("the cat", 0), ("", 1)]


def test_sections_can_be_read(tmp_path: Path) -> None:
    sections = [build(DataSection, yaml.safe_load(block), "page") for block in blocks("yaml")]
    assert [len(section.train) for section in sections] == [1, 1, 3, 0, 0, 0]
    assert [one.weight for one in sections[2].train] == [1, 1, 3]
    said = {"dialogue": [{"who": "Q", "words": "<image>"}, {"who": "A", "words": "Yes."}], "pics": ["a.jpg"]}
    path = write_jsonl(tmp_path / "odd.jsonl", [said])
    sample = open_source(sections[1].train[0].model_copy(update={"path": path})).read(0)
    assert [message.role for message in sample.messages] == ["user", "assistant"]
    table = REFERENCE[REFERENCE.index("| name | default") : REFERENCE.index("## Conversion")].strip().splitlines()
    assert {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])} == set(COLUMNS)


def test_conversion_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "odd.jsonl", [{"dialogue": [{"role": "user", "content": "Hi"}]}])
    for code in blocks("python")[1:]:
        exec(code, {})
    assert json.loads((tmp_path / "data" / "plain.jsonl").read_text())["messages"][0]["content"] == "Hi"


def test_the_own_data_set_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers_set.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        results: list[Any] = []
        for block in blocks("yaml")[3:]:
            section = build(DataSection, yaml.safe_load(block), "page")
            results.append(KINDS.get("custom")(RowRequest(section, "train", None, 0)))
        held_out = KINDS.get("custom")(RowRequest(section, "eval", None, 0))
        assert [len(source) for source in (*results, held_out)] == [32, 16, 64, 16]
        assert [source.batch([0])["signal"].shape[0] for source in (*results, held_out)] == [1, 4, 1, 1]
    finally:
        sys.modules.pop("numbers_set", None)
