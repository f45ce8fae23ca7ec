"""Missing folders of models: the error says what the path was meant to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.config.hub_ids import hub_hint
from tessera.training.early_checks import check_path
from tests.errors import raises


def test_a_run_without_an_export_is_named(tmp_path: Path) -> None:
    run = tmp_path / "painter"
    run.mkdir()
    (run / "config.yaml").touch()
    with raises("weights.run-without-export", str(run)):
        check_path(run / "hf")
    (run / "config.yaml").unlink()
    with raises("weights.folder-missing"):
        check_path(run / "hf")


def test_a_missing_recipe_is_no_missing_folder() -> None:
    with raises("recipe.no-such-file", "a.yaml"):
        check_path(Path("a.yaml"))
    with raises("weights.folder-missing", "a.yaml"):
        check_path(Path("a.yaml"), "model.path")  # no recipe can be its own model


@pytest.mark.parametrize(("path", "hub"), [("runs/digits", False), ("openai/whisper-tiny", True)])
def test_a_missing_run_is_no_model_of_a_hub(path: str, hub: bool) -> None:
    assert ("hf://" in hub_hint(Path(path))) is hub
