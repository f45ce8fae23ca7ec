"""The trainer knows no modality: an image denoiser goes through the same trainer, engine, checkpoint and report."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tessera
from tests.toys import denoise_task, denoiser
from tests.toys.callbacks import StopAt


def recipe(folder: Path, **train: Any) -> dict[str, Any]:
    return {
        "name": "denoise",
        "out": str(folder),
        "model": {"family": "tests.toys.denoiser", "preset": "tiny"},
        "data": {"kind": "tests.toys.digit_pictures", "eval": [{"path": "unused"}]},
        "train": {"steps": 30, "global_batch": 4, "micro_batch": 2, "device": "cpu", "eval_rows": 4, **train},
        "optim": {"lr": 3e-3, "schedule": {"warmup": 5}},
        "checkpoint": {"every": 10},
        "log": {"every": 5},
    }


def weights(run: tessera.Run) -> dict[str, torch.Tensor]:
    assert run.checkpoint is not None
    shards = [load_file(path) for path in sorted(run.checkpoint.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def test_a_denoiser_trains_evaluates_saves_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tessera.train(recipe(tmp_path))
    train = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(1, 31))
    assert train[-1]["loss"] < 0.7 * train[0]["loss"]
    assert "late" in train[-1]
    assert [row for row in run.metrics if row["kind"] == "eval"]
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("step 30/30"))
    assert "samples/s" in line
    assert train[-1]["pixels_per_s"] > 0
    assert "token" not in line
    assert "<svg" in (run.folder / "report.html").read_text()
    assert run.checkpoint is not None
    assert logging.getLogger("tessera").handlers == []


def test_its_task_is_short_and_its_family_is_one_folder() -> None:
    assert len(inspect.getsource(denoise_task).splitlines()) < 40
    assert {p.name for p in Path(denoiser.__file__).parent.iterdir() if p.suffix == ".py"} == {"__init__.py"}


def test_resume_is_bitwise_and_a_finished_run_stays_finished(tmp_path: Path) -> None:
    whole = tessera.train(recipe(tmp_path / "whole"))
    part = tessera.train(recipe(tmp_path / "part"), {"train.steps": 30}, callbacks=[StopAt(17)])
    assert part.stopped == "test"
    resumed = tessera.resume(part.folder)
    expected, tensors = weights(whole), weights(resumed)
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(expected[name], tensors[name]) for name in expected)
    strip = lambda rows: [(r["step"], r["loss"], r["grad_norm"]) for r in rows if r["kind"] == "train"]  # noqa: E731
    assert strip(resumed.metrics) == strip(whole.metrics)
    again = tessera.resume(part.folder)
    assert again.metrics == resumed.metrics
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights(again).items())


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    tessera.train(recipe(tmp_path, steps=2))
    with pytest.raises(Exception, match="already contains a run"):
        tessera.train(recipe(tmp_path, steps=2))
    tessera.train(recipe(tmp_path, steps=2), overwrite=True)


def test_another_seed_in_the_middle_is_refused(tmp_path: Path) -> None:
    run = tessera.train(recipe(tmp_path, steps=2))
    with pytest.raises(Exception, match=r"train\.seed"):
        tessera.resume(run.folder, {"train.seed": 5, "train.steps": 4})
