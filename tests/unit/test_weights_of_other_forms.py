"""A run can begin from shards of a Megatron-style job, or from a torch DCP folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tessera
from tests.errors import raises
from tests.quick import quick
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Data, a Hugging Face folder with its tokenizer, and a recipe that starts from it."""
    root = tmp_path_factory.mktemp("begun")
    data = write_chat_set(root / "data")
    recipe = chat_recipe(data, root / "first", steps=1)
    recipe["checkpoint"] = {"every": 0, "export": True, "prove": "never"}
    run = tessera.train(recipe)
    return data, run.folder / "hf", {**recipe, "model": {"path": str(run.folder / "hf")}}


def losses(recipe: dict[str, Any], out: Path, **model: Any) -> list[float]:
    changed = {**recipe, "out": str(out), "model": {**recipe["model"], **model}}
    return [row["loss"] for row in tessera.train(changed).metrics if row["kind"] == "train"]


@pytest.mark.parametrize(("to", "layout"), quick([("mm", {"tp": 2}), ("dcp", None)], ("mm", {"tp": 2})))
def test_a_run_begins_from_another_form_as_from_the_folder(
    begun: tuple[Path, Path, dict[str, Any]], to: Any, layout: Any, tmp_path: Path
) -> None:
    _, folder, recipe = begun
    other = tessera.convert(folder, tmp_path / "other", to=to, layout=layout)
    assert losses(recipe, tmp_path / "a") == losses(recipe, tmp_path / "b", weights=str(other))


def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    begun: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, folder, recipe = begun
    other = tessera.convert(folder, tmp_path / "other", to="mm", layout={})
    with raises("weights.shape-mismatch"):
        losses(recipe, tmp_path / "a", weights=str(other), config={"text.intermediate_size": 200})
    with raises("checkpoint.not-dcp-folder"):
        losses(recipe, tmp_path / "b", weights=str(folder))
    with raises("weights.folder-missing"):
        losses(recipe, tmp_path / "c", weights=str(tmp_path / "nowhere"))
    without = {key: value for key, value in recipe.items() if key != "model"}
    with raises("recipe.wrong-value"):
        tessera.train({**without, "model": {"family": "qwen2_vl", "preset": "quickstart", "weights": str(other)}})
