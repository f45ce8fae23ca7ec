"""A start that is killed while it copies the processor's files, and the start after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tessera
from tests.toys.chat_set import chat_recipe, write_chat_set


class KilledError(BaseException):
    """Stands for a kill: nothing in the library handles it."""


def test_a_kill_while_the_generation_config_is_written_leaves_no_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = chat_recipe(write_chat_set(tmp_path / "data", samples=4), tmp_path, steps=1)
    recipe["data"]["eval"] = []
    replace = os.replace

    def killed(source: str | Path, target: str | Path) -> None:
        if Path(target).name == "generation_config.json":
            raise KilledError
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KilledError):
        tessera.train(recipe)
    monkeypatch.undo()
    folder = Path(recipe["out"]) / recipe["name"]
    assert (folder / "config.yaml").is_file()
    assert not (folder / "processor" / "generation_config.json").exists()
    run = tessera.resume(folder)
    assert run.checkpoint is not None
    assert (folder / "processor" / "generation_config.json").is_file()
