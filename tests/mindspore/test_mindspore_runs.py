"""Recipes train on MindSpore as on torch: curves, checkpoints, adapters, exports, ranks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needed  # noqa: F401
import pytest
import torch
from models_of_both import mindspore_results, torch_results
from recipes_of_both import recipe
from safetensors.torch import load_file

import tessera
from tessera.core.batch import Batch
from tessera.core.callback import Callback, StepResult, TrainerHandle
from tessera.errors import TesseraError
from tessera.tasks.language import LanguageTask
from tests.close import assert_as_close, queries_for_keys

pytestmark = pytest.mark.mindspore
CLOSE = 1e-3  # of losses, which are about 10 at first


def losses(run: Any) -> list[float]:
    return [line["loss"] for line in run.metrics if line["kind"] == "train"]


def far(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


class Stop(Callback):
    """Stop the run after its fourth step."""

    def on_step_end(self, trainer: TrainerHandle, result: StepResult) -> None:
        if result.step == 4:
            trainer.request_stop("the other framework continues")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen2_vl"])
def test_fifty_steps_have_the_curve_of_torch(family: str, tmp_path: Path) -> None:
    curves = [
        losses(tessera.train(recipe(family, tmp_path, 50, initial=True, name=framework, framework=framework)))
        for framework in ("torch", "mindspore")
    ]
    assert len(curves[1]) == 50
    assert curves[1][-1] < 0.9 * curves[1][0]
    assert far(*curves) < CLOSE


class Recorder(LanguageTask):
    """Train like the task of recipes, and store the last batch."""

    batch: Batch

    def counts(self, batch: Batch) -> dict[str, int]:
        self.batch = batch
        return super().counts(batch)


class Comparison(Callback):
    """Compare gradients in every seventh step of a training on torch, at the weights that it has then."""

    def __init__(self, task: Recorder) -> None:
        self.task = task
        self.steps = 0

    def on_before_optim(self, trainer: TrainerHandle) -> None:
        if trainer.step % 7:
            return
        self.steps += 1
        batches, module = [self.task.batch], trainer.module
        exact = torch_results(copy.deepcopy(module).double(), batches)
        peer = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        ours = mindspore_results(copy.deepcopy(module), batches)
        for name, tensor in peer.items():
            terms = exact[queries_for_keys(name)]
            assert_as_close(ours[name], tensor, exact[name], k=8.0, roundings=2.0, what=name, terms=terms)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen2_vl"])
def test_large_gradients_of_a_training_differ_by_rounding(family: str, tmp_path: Path) -> None:
    """Where gradients are large, weights that differ by a rounding lead to other curves: on torch, too. What must
    agree is each step from the same weights."""
    task = Recorder()
    comparison = Comparison(task)
    run = tessera.train(recipe(family, tmp_path, 50), callbacks=[comparison], task=task)
    assert comparison.steps == 8
    assert max(line["grad_norm"] for line in run.metrics if line["kind"] == "train") > 40


@pytest.mark.parametrize("first", ["torch", "mindspore"])
def test_each_resumes_the_checkpoint_of_the_other(first: str, tmp_path: Path) -> None:
    """Four steps of one framework and two of the other are six of either, with adapters, accumulation and export."""
    second = {"torch": "mindspore", "mindspore": "torch"}[first]
    changes = {
        "model__lora": {"rank": 4, "merge": True},
        "train__micro_batch": 1,
        "checkpoint__export": True,
    }
    whole = tessera.train(recipe("qwen2", tmp_path, 6, name="whole", framework=second, **changes))
    begun = tessera.train(recipe("qwen2", tmp_path, 6, name="begun", framework=first, **changes), callbacks=[Stop()])
    run = tessera.resume(begun.folder, {"framework": second})
    assert len(losses(run)) == 6
    assert far(losses(run), losses(whole)) < CLOSE
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        ours, theirs = load_file(run.folder / file), load_file(whole.folder / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=2e-5) for name in theirs), file


def test_features_that_mindspore_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(TesseraError) as refused:
        tessera.train(recipe("qwen2", tmp_path, 1, framework="mindspore", optim__name="lion"))
    assert refused.value.code == "framework.feature-not-available"


def test_two_workers_of_msrun_train_as_one(tmp_path: Path) -> None:
    config = recipe("qwen2", tmp_path, 3, name="one", framework="mindspore", train__micro_batch=1)
    alone = tessera.train(config)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**config, "name": "two"}), encoding="utf-8")
    command = "import sys; from tessera.cli.main import main; sys.argv = ['tessera', 'train', sys.argv[1]]; main()"
    script = tmp_path / "train.py"
    script.write_text(command, encoding="utf-8")
    folder = Path(sys.executable).parent
    words = [folder / "msrun", "--worker_num", 2, "--local_worker_num", 2, "--master_port", 8311, "--join", "True"]
    words += ["--log_dir", tmp_path / "logs", script, file]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([str(word) for word in words], env=env, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = (tmp_path / "runs" / "two" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    together = [line["loss"] for line in map(json.loads, rows) if line["kind"] == "train"]
    assert far(together, losses(alone)) < CLOSE / 10
