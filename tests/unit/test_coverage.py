"""After the first step a run tells which trained tensors received a gradient, and stops where one received none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tessera
from tessera.config.reader import Section
from tessera.core.model_plan import ModelPlan
from tessera.core.spec import Component, ModelSpec
from tessera.errors import TesseraError
from tessera.training.checks import Coverage
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.denoiser import SPEC as DENOISER


class Forgetful(nn.Module):
    """A denoiser with a layer that nobody calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forgotten = nn.Linear(2, 2)

    def forward(self, batch: Any) -> Any:
        return self.inner(batch)

    def initialize(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, 0.1, generator=generator)


def plan(config: Section) -> ModelPlan:
    return ModelPlan(blocks=(), tensor={"inner.*": "replicate", "forgotten.*": "replicate"})


SPEC = ModelSpec(
    name="forgetful",
    config=DENOISER.config,
    main=Component(build=lambda config: Forgetful(DENOISER.main.build(config)), plan=plan),
    task=DENOISER.task,
    presets=DENOISER.presets,
)


def recipe(folder: Path) -> dict[str, Any]:
    return {
        "name": "denoise",
        "out": str(folder),
        "model": {"family": "tests.unit.test_coverage", "preset": "tiny"},
        "data": {"kind": "tests.toys.digit_pictures", "workers": 0},
        "train": {"steps": 2, "global_batch": 2, "device": "cpu"},
    }


def test_a_layer_that_nobody_calls_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TesseraError) as caught:
        tessera.train(recipe(tmp_path))
    assert "2 trained tensors received no gradient" in caught.value.what
    assert "forgotten.weight" in caught.value.what
    assert caught.value.where == "model.freeze"


def test_frozen_it_is_not_missed_and_warnings_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tessera.train(recipe(tmp_path / "a"), {"model.freeze": ["forgotten"]})
    assert "received no gradient" not in capsys.readouterr().err
    tessera.train(recipe(tmp_path / "b"), {"guard.coverage": "warn"})
    assert "forgotten.weight" in capsys.readouterr().err
    tessera.train(recipe(tmp_path / "c"), {"guard.coverage": "off"})
    assert "gradients of the first step" not in capsys.readouterr().err


def test_the_line_and_an_idle_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text alone: the encoder that sees runs on a blank picture, and its gradients are zeros."""
    data = write_chat_set(tmp_path / "data", samples=12)
    lines = (data / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("".join(line + "\n" for line in lines[::3]))
    settings = chat_recipe(data, tmp_path, steps=3, global_batch=1)
    settings["data"]["eval"] = []
    tessera.train(settings)
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if line.startswith("gradients of the first step")]
    parts = {words.split()[0]: words.split()[1:] for words in line.split(": ")[1].split(", ")}
    assert {"text", "vision"} <= parts.keys()
    assert all(received == trained for received, _, trained in parts.values())
    assert any("gradient of zeros" in line and "vision" in line for line in said)


@pytest.mark.parametrize(("moves", "warned"), [(True, False), (False, True)])
def test_layers_before_an_output_that_begins_as_zero_are_no_alarm(
    moves: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their first gradients are zeros, and the next ones are not. What stays at zero is told once."""
    early, output = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    group = {"names": ["early", "output"], "params": [early, output], "base_lr": 0.1, "weight_decay": 0.0}
    trainer: Any = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[group]), world=SimpleNamespace(is_main=True, size=1)
    )
    coverage = Coverage(["early", "output"], "stop")
    for _ in range(5):
        early.grad = output.grad = None
        (early * output).sum().backward()
        coverage.on_before_optim(trainer)
        if moves:
            output.data -= 0.1 * output.grad  # type: ignore[operator]
    told = [record.message for record in caplog.records if "gradient of zeros" in record.message]
    assert len(told) == warned
    assert all("early" in line and "output" not in line for line in told)
