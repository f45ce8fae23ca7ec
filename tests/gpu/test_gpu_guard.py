"""On an accelerator the update is queued before the host knows whether the step was bad: it must not happen then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.train.callbacks import Callback, StepResult
from tessera.train.guard.check import acts_on_flag
from tessera.train.jsonl import read_jsonl
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.faults import FlipBit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
WEIGHT = "text.layers.1.mlp.down.weight"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


class Weights(Callback):
    """Of every step, before and after, with the moments."""

    def __init__(self) -> None:
        self.same: list[bool] = []
        self.on_flag: bool | None = None
        self.before: list[torch.Tensor] = []

    def _all(self, trainer: Any) -> list[torch.Tensor]:
        return [t.detach().clone() for t in trainer.tensors().values()]

    def on_step_begin(self, trainer: Any) -> None:
        self.before = self._all(trainer)

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.on_flag = acts_on_flag(trainer.optimizer, trainer.world.device)
        self.same.append(all(torch.equal(a, b) for a, b in zip(self.before, self._all(trainer), strict=True)))


@pytest.mark.parametrize(
    ("parallel", "on_flag"),
    [({}, True), ({"param_dtype": "bfloat16"}, True), ({"param_dtype": "bfloat16", "offload": True}, False)],
    ids=str,
)
def test_a_bad_step_changes_nothing(data: Path, tmp_path: Path, parallel: dict[str, Any], on_flag: bool) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=6)
    recipe["data"] |= {"kind": "tests.toys.faults", "workers": 0, "options": {"nan_pixels": ["sample-7"]}}
    recipe["parallel"] = parallel
    weights = Weights()
    run = tessera.train(recipe, callbacks=[weights])
    found = list(read_jsonl(run.folder / "guard.jsonl"))
    assert found
    assert all(event["samples"] == ["sample-7"] for event in found)
    assert all(event["module"].startswith("forward of vision.patch_embed") for event in found)
    skipped = {event["step"] for event in found}
    assert weights.same == [step in skipped for step in range(1, 7)]
    assert weights.on_flag == on_flag


def test_a_flipped_bit_is_undone_from_host_memory(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=12)
    recipe["parallel"] = {"param_dtype": "bfloat16"}
    recipe["guard"] = {"copy_every": 2}
    run = tessera.train(recipe, callbacks=[FlipBit(8, WEIGHT)])
    (event,) = read_jsonl(run.folder / "guard.jsonl")
    assert [bad["name"] for bad in event["parameters"]] == [WEIGHT]
    assert event["back_to"] in (6, 8)
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert losses[-1] < losses[0]
