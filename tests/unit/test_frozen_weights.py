"""Frozen weights that came from a model's folder are not stored again: checkpoints name the folder, with hashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tessera
from tests.errors import raises
from tests.quick import quick
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=12)


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start")
    begun = tessera.train(recipe(data, out, None, steps=1))
    return tessera.convert(begun.folder, out / "hf", prove="never")


def recipe(data: Path, out: Path, path: Path | None, steps: int = 4, **model: Any) -> dict[str, Any]:
    settings = chat_recipe(data, out, steps=steps, global_batch=1)
    settings["data"] |= {"eval": [], "workers": 0, "balance": False}
    settings["optim"]["lr"] = 1e-2
    settings["model"] = settings["model"] if path is None else {"path": str(path)}
    settings["model"] |= model
    return settings


def stored(run: tessera.Run) -> dict[str, torch.Tensor]:
    assert run.checkpoint is not None
    return {n: t for path in sorted(run.checkpoint.glob("*.safetensors")) for n, t in load_file(path).items()}


def weights(path: Path) -> dict[str, torch.Tensor]:
    model, _ = tessera.load(path, device="cpu")
    return dict(model.module.named_parameters())


@pytest.mark.parametrize(
    "model", quick([{"freeze": ["vision"]}, {"lora": {"rank": 2}}], {"lora": {"rank": 2}}), ids=["freeze", "lora"]
)
def test_a_run_without_its_frozen_weights_resumes_bitwise_and_can_be_used(
    data: Path, folder: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    whole = tessera.train(recipe(data, tmp_path / "whole", folder, **model))
    part = tessera.train(recipe(data, tmp_path / "part", folder, **model), callbacks=[StopAt(2)])
    again = tessera.resume(part.folder)
    ends = stored(whole), stored(again)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert not any(name.startswith("model.vision.") for name in ends[0])
    assert any(name.startswith("model.text.") for name in ends[0])
    frozen = json.loads((whole.checkpoint / "state.json").read_text())["frozen"]  # type: ignore[operator]
    assert frozen["folder"] == str(folder)
    assert list(frozen["files"]) == ["model.safetensors"]
    loaded, start = weights(again.folder), weights(folder)
    assert all(torch.equal(loaded[name], start[name]) for name in loaded if name.startswith("vision."))
    assert tessera.convert(
        again.checkpoint or "", tmp_path / "out", prove="never"
    ).is_dir()  # of a checkpoint alone, too


@pytest.mark.slow
def test_a_folder_that_moved_or_changed_is_named(data: Path, folder: Path, tmp_path: Path) -> None:
    begun_from = Path(shutil.copytree(folder, tmp_path / "base"))
    run = tessera.train(recipe(data, tmp_path, begun_from, steps=2, freeze=["vision"]))
    begun_from.rename(tmp_path / "moved")
    for use in (tessera.resume, tessera.load):
        with raises("checkpoint.frozen-weights-moved", str(begun_from)):
            use(run.folder)
    longer = tessera.resume(run.folder, {"train.steps": 3, "model.path": str(tmp_path / "moved")})
    tessera.load(longer.folder)  # the run knows the new folder now
    file = tmp_path / "moved" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with raises("checkpoint.frozen-weights-moved", "model.safetensors") as caught:
        tessera.load(longer.folder)
    assert "model.path" in str(caught.value)


def test_what_was_ever_trained_is_stored(data: Path, folder: Path, tmp_path: Path) -> None:
    run = tessera.train(recipe(data, tmp_path, folder, steps=1))
    frozen = tessera.resume(run.folder, {"train.steps": 2, "model.freeze": ["vision"]})
    assert any(name.startswith("model.vision.") for name in stored(frozen))
    assert "frozen" not in json.loads((frozen.checkpoint / "state.json").read_text())  # type: ignore[operator]


def test_frozen_weights_are_stored_on_request_and_without_a_folder(data: Path, folder: Path, tmp_path: Path) -> None:
    settings = recipe(data, tmp_path / "asked", folder, steps=1, freeze=["vision"])
    settings["checkpoint"]["store_frozen"] = True
    random = recipe(data, tmp_path / "random", None, steps=1, freeze=["vision"])
    for run in (tessera.train(settings), tessera.train(random)):
        assert any(name.startswith("model.vision.") for name in stored(run))
        tessera.load(run.folder)
