"""The doctor examines pairs of answers, and rated ones, as the runs that a recipe describes read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.config.run_config import SourceSection
from tessera.tools.data_doctor.examine import examine, for_recipe
from tests.toys.pair_set import pair_recipe, rated_recipe, write_pair_set
from tests.unit.data_cases import write_jsonl


@pytest.mark.parametrize(("recipe", "file"), [(pair_recipe, "pairs"), (rated_recipe, "rated")])
def test_pairs_and_rated_answers_are_read_as_a_run_reads_them(
    recipe: Callable[..., dict[str, Any]], file: str, tmp_path: Path
) -> None:
    data = write_pair_set(tmp_path / "data", samples=6)
    described = tmp_path / "recipe.yaml"
    described.write_text(json.dumps(recipe(data, tmp_path)))  # JSON is YAML
    rows = data / f"{file}.jsonl"
    processor = for_recipe(described).processor
    diagnosis = examine([SourceSection(path=rows)], processor, length=512, workers=1, samples=2)
    count = len(rows.read_text().splitlines())
    assert (diagnosis.total("rows"), diagnosis.total("usable")) == (count, count)
    assert not set(diagnosis.findings) & {"turn-order", "nothing-trained", "bad-row"}
    assert any(span.kind == "trained" for shown in diagnosis.samples for span in shown.spans)


@pytest.mark.parametrize("question", [{"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}])
def test_pairs_without_a_recipe_are_examined_as_pairs(question: dict[str, Any], tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "pairs.jsonl", [{**question, "chosen": "Hello there", "rejected": "Go"}])
    diagnosis = examine([SourceSection(path=file)], workers=0)
    assert (diagnosis.worst, diagnosis.total("usable")) == ("sound", 1)
    assert {span.text for span in diagnosis.samples[0].spans} >= {"Hello there", "Go"}
