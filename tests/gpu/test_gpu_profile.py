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
    table: dict[str, Any] = json.loads((run.folder / "profile" / "table.json").read_text())
    return table


def shares(table: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(row["name"], row["direction"]): row["share"] for row in table["modules"]}


def test_a_small_model_leaves_the_device_idle_and_the_table_shows_it(tmp_path: Path) -> None:
    table = profiled(tmp_path)
    assert shares(table)["device idle", ""] > 0.3
    assert shares(table).get(("beside the step", ""), 0) < 0.02
    assert (tmp_path / "out" / "chat" / "profile" / "memory.pickle").stat().st_size > 0
    for direction in ("forward", "backward"):
        assert shares(table)["text.layers.*.attn", direction] > 0
        assert shares(table)["vision.blocks.*.mlp", direction] > 0


def test_a_wide_mlp_is_where_the_time_goes(tmp_path: Path) -> None:
    table = profiled(tmp_path, wide=True)
    modules = {key: share for key, share in shares(table).items() if key[1]}
    assert max(modules, key=modules.__getitem__)[0] == "text.layers.*.mlp"
    rates = {(row["name"], row["direction"]): row["tflops"] for row in table["modules"]}
    assert rates["text.layers.*.mlp", "backward"] > 50 * rates["text.layers.*.attn", "backward"]


@pytest.mark.slow
def test_compiled_blocks_have_their_kernels(tmp_path: Path) -> None:
    table = profiled(tmp_path, compile=True)
    rows = shares(table)
    assert rows["text.layers.*", "forward"] > 0
    assert rows["text.layers.*", "backward"] > 0
    assert rows["vision.blocks.*", "backward"] > 0
    assert ("text.layers.*.attn", "forward") not in rows
    assert rows.get(("beside the step", ""), 0) < 0.02
