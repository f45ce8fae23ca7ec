"""Jobs of MindSpeed-MM and commands with images train on MindSpore, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needed  # noqa: F401
import pytest
import torch
from recipes_of_both import recipe
from safetensors.torch import load_file
from small_folders import small_folder
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera_compat.mindspeed_mm.migrate import lay_out, migrate
from tessera_compat.mindspore.convert import convert
from tests.acceptance.job_cases import write_jobs, write_mllm_data

pytestmark = pytest.mark.mindspore
CLOSE = 1e-3
ROOT = Path(__file__).parents[2]


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_images_train_from_the_command_line_and_each_framework_continues(tmp_path: Path) -> None:
    config = recipe("qwen2_vl", tmp_path, 9, initial=True, optim__lr=2e-3, optim__schedule={"kind": "constant"})
    whole = tessera.train({**config, "name": "whole"})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**config, "name": "images", "framework": "mindspore"}), encoding="utf-8")
    folder = whole.folder.parent / "images"
    commands = (
        ["train", str(file), "train.steps=3"],
        ["resume", str(folder), "framework=torch", "train.steps=6"],
        ["resume", str(folder), "framework=mindspore", "train.steps=9", "checkpoint.export=true"],
    )
    for command in commands:
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    ours, theirs = losses(folder), losses(whole.folder)
    assert len(ours) == 9
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < CLOSE
    assert sum(ours[-3:]) < 0.9 * sum(ours[:3])
    before, after = (load_file(path / "model.safetensors") for path in (tmp_path / "model/hf", folder / "hf"))
    encoder = [name for name in before if name.startswith("visual.")]
    assert len(encoder) > 20
    assert not any(torch.equal(before[name], after[name]) for name in encoder if not name.endswith("bias"))


def test_a_job_that_names_mindspore_trains_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of msrun, as the converted script starts them, train as a single rank of torch. What the job asks for
    and MindSpore lacks, tensor parallelism, is switched off."""
    lay_out(tmp_path)
    write_mllm_data(tmp_path)
    write_jobs(tmp_path / "jobs")
    small_folder("qwen2_vl", tmp_path / "ckpt" / "tiny")
    monkeypatch.chdir(tmp_path)
    text = convert((tmp_path / "jobs" / "tensor_parallel.sh").read_text(encoding="utf-8"), "job.sh", "mm").text
    (tmp_path / "job.sh").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MASTER_PORT": "8341"}
    done = subprocess.run(["bash", "job.sh"], env=env, timeout=500, capture_output=True, text=True)
    logs = "".join(file.read_text() for file in sorted((tmp_path / "msrun_log").glob("worker_*.log")))
    assert done.returncode == 0, done.stdout[-1000:] + logs[-3000:]
    assert "parallel.tp: 1 in its place; not available on MindSpore" in logs
    alone = migrate(tmp_path / "job.sh").recipe
    assert alone.pop("framework") == "mindspore"
    run = tessera.train({**alone, "name": "alone"})
    assert len(losses(run.folder)) == 2
    for ours, theirs in zip(losses(tmp_path / "save_tensor_parallel"), losses(run.folder), strict=True):
        assert abs(ours - theirs) < CLOSE
