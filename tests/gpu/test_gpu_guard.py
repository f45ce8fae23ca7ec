"""On an accelerator the update is queued before the host knows whether the step was bad: it must not happen then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.core.callback import Callback, StepResult
from tessera.observe.anomaly.check import StepLimits, acts_on_flag, checked_update
from tessera.optim.adamw import AdamW
from tessera.runtime.files import read_jsonl
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
    ("compute", "offload", "on_flag"),
    [("float32", False, True), ("bfloat16", False, True), ("bfloat16", True, False)],
    ids=str,
)
def test_a_bad_step_changes_nothing(data: Path, tmp_path: Path, compute: str, offload: bool, on_flag: bool) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=6)
    recipe["data"] |= {"kind": "tests.toys.faults", "workers": 0, "options": {"nan_pixels": ["sample-7"]}}
    recipe["parallel"], recipe["precision"] = {"offload": offload}, {"compute": compute}
    weights = Weights()
    run = tessera.train(recipe, callbacks=[weights])
    events = list(read_jsonl(run.folder / "guard.jsonl"))
    assert events
    assert all(event["samples"] == ["sample-7"] for event in events)
    assert all(event["module"].startswith("forward of vision.patch_embed") for event in events)
    skipped = {event["step"] for event in events}
    assert weights.same == [step in skipped for step in range(1, 7)]
    assert weights.on_flag == on_flag


def test_a_flipped_bit_is_undone(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=12)
    recipe["precision"] = {"compute": "bfloat16"}
    recipe["checkpoint"] = {"every": 2}
    run = tessera.train(recipe, callbacks=[FlipBit(8, WEIGHT)])
    (event,) = read_jsonl(run.folder / "guard.jsonl")
    assert [bad["name"] for bad in event["parameters"]] == [WEIGHT]
    assert event["back_to"] in (6, 8)
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("together", [False, True])
def test_a_spike_is_clipped_or_held_back_on_the_device_as_on_the_host(together: bool) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None

    def update(place: torch.device, limits: StepLimits) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(64, device=place))
        groups = [{"params": [weight], "lr": 1.0, "weight_decay": 0.0}]
        optimizer = AdamW(groups, (0.0, 0.0), 1e3, together=together and place.type != "cpu")  # as SGD / 1000
        weight.grad = torch.full((64,), 5.0, device=place)
        norm = weight.grad.norm().double()
        optimizer.clip_factor = 1 / norm  # clipped to 1
        check = checked_update(optimizer, torch.tensor(3.0, device=place), norm, limits)
        assert check.applied == (not limits.drop_spikes)
        assert acts_on_flag(optimizer, weight.device) == (place.type != "cpu")
        return weight.detach().cpu()

    host = torch.device("cpu")
    for limits in (StepLimits(), StepLimits(2.0, 99.0, 1.0, 0.25), StepLimits(2.0, 99.0, 1.0, 0.25, drop_spikes=True)):
        torch.testing.assert_close(update(accelerator, limits), update(host, limits), rtol=1e-5, atol=0)
    assert not update(accelerator, StepLimits(2.0, 99.0, 1.0, 0.25, drop_spikes=True)).any()
