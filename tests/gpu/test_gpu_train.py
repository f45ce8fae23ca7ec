"""What only an accelerator shows: the same run there and on the CPU, mixed precision, no host waits between lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.core.callback import Callback, StepResult
from tessera.errors import TesseraError
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.greedy_task import GreedyTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


def losses(run: tessera.Run) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def test_fp32_follows_the_cpu(data: Path, tmp_path: Path) -> None:
    weights = tessera.train(chat_recipe(data, tmp_path / "start", steps=1)).folder
    runs = []
    for device in ("cpu", "auto"):
        recipe = chat_recipe(data, tmp_path / device, device=device)
        recipe["model"] = {"path": str(weights), "tokenizer": str(data / "tokenizer")}
        recipe["precision"] = {"compute": "float32"}
        runs.append(losses(tessera.train(recipe)))
    assert runs[1] == pytest.approx(runs[0], rel=1e-3)


def test_bf16_with_fp32_master_weights_learns_and_resumes(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path / "a", device="auto", steps=40)
    recipe["parallel"] = {"recompute": ["text.layers.{*}"]}  # bf16 over fp32 weights is the default of accelerators
    whole = tessera.train(recipe)
    assert losses(whole)[-1] < losses(whole)[0] - 0.5
    part = tessera.train({**recipe, "out": str(tmp_path / "b")}, callbacks=[StopAt(21)])
    # Not bitwise here: some kernels of an accelerator add in an order of their own.
    assert losses(tessera.resume(part.folder)) == pytest.approx(losses(whole), rel=2e-2)
    model, processor = tessera.load(whole.folder, dtype="bfloat16")
    assert isinstance(model.generate(processor([{"role": "user", "content": "Say red."}]), max_new_tokens=5), str)


def test_fp16_with_loss_scaling_learns_and_resumes(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path / "a", device="auto", steps=40)
    recipe["precision"] = {"compute": "float16", "loss_scale": {"start": 2.0**24, "growth_steps": 8}}
    whole = tessera.train(recipe)
    assert losses(whole)[-1] < losses(whole)[0] - 0.5
    assert any(row.get("skipped") for row in whole.metrics if row["kind"] == "train")  # the first scale is too large
    assert not (whole.folder / "guard.jsonl").exists() or not (whole.folder / "guard.jsonl").read_text()
    part = tessera.train({**recipe, "out": str(tmp_path / "b")}, callbacks=[StopAt(21)])
    assert losses(tessera.resume(part.folder)) == pytest.approx(losses(whole), rel=2e-2)


def test_every_memory_form_begins_and_learns_alike(data: Path, tmp_path: Path) -> None:
    """Weights kept on the host begin as those on the device do: both are drawn on the device."""
    forms: list[dict[str, Any]] = [
        {},
        {"offload": True},
        {"recompute": ["text.layers.{*}"]},
        {"activation_offload": ["text.layers.{*}"]},
    ]
    curves = []
    for number, form in enumerate(forms):
        recipe = chat_recipe(data, tmp_path / str(number), device="auto", steps=8)
        recipe["parallel"], recipe["precision"] = form, {"compute": "float32"}
        curves.append(losses(tessera.train(recipe)))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-4)


def test_no_host_waits_between_lines(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=12, micro_batch=2)
    recipe["log"]["every"] = 100
    recipe["data"]["eval"] = []
    recipe["checkpoint"] = {"every": 0}
    watch = Watch()
    tessera.train(recipe, callbacks=[watch])
    assert watch.steps > 5


class Watch(Callback):
    """From the third step to the one before the last line, making the host wait for the device is an error."""

    steps = 0

    def on_step_begin(self, trainer: Any) -> None:
        if 3 <= trainer.step < trainer.config.train.steps - 1:
            torch.cuda.set_sync_debug_mode("error")
            self.steps += 1

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_a_device_without_memory_is_explained_and_the_run_goes_on_from_there(data: Path, tmp_path: Path) -> None:
    recipe = chat_recipe(data, tmp_path, device="auto", steps=4, global_batch=2)
    recipe["checkpoint"] = {"every": 0}
    with pytest.raises(TesseraError, match=r"out of memory at step 3, in micro-batch 2 of 2: 1 row, 192 tokens"):
        tessera.train(recipe, task=GreedyTask(at=5, real=True))
    resumed = tessera.resume(tmp_path / "chat", task=GreedyTask())
    assert [row["step"] for row in resumed.metrics if row["kind"] == "train"] == [1, 2, 3, 4]
