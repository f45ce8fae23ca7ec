"""A profile on an accelerator: time is the device's, kernels belong to modules, compiled blocks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tests.toys.chat_set import chat_recipe, write_chat_set

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def profiled(tmp_path: Path, wide: bool = False, **parallel: Any) -> dict[str, Any]:
    data = write_chat_set(tmp_path / "data")
    recipe = chat_recipe(data, tmp_path / "out", device="auto", steps=8)
    recipe["profile"] = {"steps": [5, 7]}
    recipe["checkpoint"] = {"at_end": False}
    recipe["parallel"], recipe["precision"] = parallel, {"compute": "bfloat16"}
    if wide:
        text = {**recipe["model"]["config"]["text"], "intermediate_size": 262144}
        recipe["model"]["config"] = {**recipe["model"]["config"], "text": text}
    run = tessera.train(recipe)
    told: dict[str, Any] = json.loads((run.folder / "profile" / "table.json").read_text())
    return told


def shares(told: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["name"], row["direction"]): row["share"] for row in told["modules"]}


def test_a_small_model_leaves_the_device_idle_and_the_profile_says_so(tmp_path: Path) -> None:
    told = profiled(tmp_path)
    assert sum(row["share"] for row in told["modules"]) == pytest.approx(1, abs=1e-6)
    assert sum(row["share"] for row in told["kinds"]) == pytest.approx(1, abs=1e-6)
    assert shares(told)["device idle", ""] > 0.3
    assert any("the host launches too slowly" in said and "parallel.compile" in said for said in told["verdict"])
    assert shares(told).get(("not known whose", ""), 0) < 0.02
    for direction in ("forward", "backward"):
        assert shares(told)["text.layers.*.attn", direction] > 0
        assert shares(told)["vision.blocks.*.mlp", direction] > 0
    held = {row["name"] for row in told["memory"]["used_by"]}
    assert {"weights", "optimizer state"} <= held


def test_a_wide_mlp_is_where_the_time_goes(tmp_path: Path) -> None:
    told = profiled(tmp_path, wide=True)
    modules = {key: share for key, share in shares(told).items() if key[1]}
    assert max(modules, key=modules.__getitem__)[0] == "text.layers.*.mlp"
    rates = {(row["name"], row["direction"]): row["tflops"] for row in told["modules"]}
    assert rates["text.layers.*.mlp", "backward"] > 50 * rates["text.layers.*.attn", "backward"]


@pytest.mark.slow
def test_compiled_blocks_have_their_kernels(tmp_path: Path) -> None:
    told = profiled(tmp_path, compile=True)
    found = shares(told)
    assert found["text.layers.*", "forward"] > 0
    assert found["text.layers.*", "backward"] > 0
    assert found["vision.blocks.*", "backward"] > 0
    assert ("text.layers.*.attn", "forward") not in found
    assert found.get(("not known whose", ""), 0) < 0.02
