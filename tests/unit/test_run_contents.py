"""Settings of a run change only by steps that were trained with them, and what is no part of a run stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.core.callback import Callback
from tessera.evaluation.evaluate import held_out_sources
from tessera.inference.found_model import find_model
from tessera.inference.weight_source import origin_of
from tessera.observe.report.recorded import read_run
from tessera.training.run_folder import RunFolder
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


def quick_recipe(data: Path, out: Path) -> dict[str, Any]:
    settings = chat_recipe(data, out, steps=2, global_batch=1)
    settings["data"] |= {"workers": 0, "eval": []}
    settings["guard"] = {"coverage": "off"}
    return settings


class FailAtStart(Callback):
    def on_start(self, trainer: Any) -> None:
        raise RuntimeError("planted")


@pytest.mark.slow
def test_files_without_a_name_of_a_run_are_never_removed(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis" / "one.tex").write_text("years of work")
    (folder / "checkpoints").mkdir()  # the run's own name: replaced with the run
    recipe = quick_recipe(data, tmp_path)
    tessera.train(recipe)
    begun = (folder / "config.yaml").read_bytes()
    (folder / "made-by-a-callback").write_text("")
    with pytest.raises(RuntimeError, match="planted"):
        tessera.train(recipe, overwrite=True, callbacks=[FailAtStart()])
    assert (folder / "thesis" / "one.tex").exists()
    assert (folder / "made-by-a-callback").exists()
    for _ in range(2):
        tessera.train(recipe, overwrite=True)
        assert (folder / "thesis" / "one.tex").read_text() == "years of work"
    assert (folder / "made-by-a-callback").exists()
    killed = RunFolder(folder)
    killed.open(overwrite=True)
    assert {path.name for path in folder.glob("[!.]*")} == {"thesis", "made-by-a-callback"}
    killed._lock.release()  # as the system does for a process that is killed
    for spoiled in (False, True):  # until the next start, all commands read the old run
        if spoiled:
            (folder / "config.yaml").write_text("name: new")
            (folder / "processor").mkdir()
        assert origin_of(folder) == "run"
        assert find_model(folder, None, trust=False).files == folder / ".replaced" / "processor"
        assert [row["step"] for row in read_run(folder).rows if row["kind"] == "train"] == [1, 2]
        with raises("evaluation.no-held-out-data"):
            held_out_sources(folder, None, None, None)
    assert tessera.resume(folder, {"train.steps": 3}).checkpoint == folder / "checkpoints" / "step-00000003"
    assert (folder / "thesis" / "one.tex").exists()

    # Settings of a resume that has no step to train are not those of the run.
    before = (folder / "config.yaml").read_bytes()
    tessera.resume(folder, {"train.task": "dpo", "optim.lr": 0.5})
    assert (folder / "config.yaml").read_bytes() == before
    tessera.resume(folder, {"train.steps": 4})

    # A configuration that cannot be used is named, with the copy that the newest checkpoint has.
    for spoiled, told in (
        (b"", "recipe.several-problems"),
        (before.replace(b"name:", b"oame:"), "recipe.several-problems"),
    ):
        (folder / "config.yaml").write_bytes(spoiled)
        with raises(told) as raised:
            tessera.resume(folder, {"train.steps": 5})
        assert raised.value.where == str(folder / "config.yaml")
        assert f"`cp {folder / 'checkpoints' / 'step-00000004' / 'config.yaml'} " in str(raised.value.fix)

    # A run that ended while it wrote its own copy of the tokenizer has trained nothing with it.
    (folder / "config.yaml").write_bytes(begun)
    shutil.rmtree(folder / "checkpoints")
    (folder / "processor" / ".sha256.json").unlink()
    (folder / "processor" / "tokenizer.json").write_text('{"half": ')
    assert tessera.resume(folder).checkpoint == folder / "checkpoints" / "step-00000002"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system in which nobody makes a folder")
def test_a_run_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    with raises("run.folder-not-writable"):
        RunFolder(Path("/proc/nowhere/run")).open()
    (tmp_path / ".lock").symlink_to(tmp_path / "gone" / "lock")
    with raises("run.folder-not-writable"):
        RunFolder(tmp_path).open()
