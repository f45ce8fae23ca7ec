"""Jobs of MindSpeed-MM that train on pairs of videos, and that sample on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generation_cases import WAN, example, put, tiny_parts, tiny_predictor, tiny_videos, write_videos, write_wan

from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.entry_points import inference_sora, posttrain_sora_dpo, pretrain
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.migrate import lay_out
from tessera_compat.state import destroy
from tests.errors import raises
from tests.toys.generation_set import write_video

ROOT = Path(__file__).parents[2]
MODEL = "wan2.2/A14B/t2v/pretrain_model_high.json"
DATA = "wan2.2/A14B/t2v/data.json"
FLAGS = "--lr 1e-3 --train-iters 2 --micro-batch-size 1 --global-batch-size 2 --num-workers 0 --log-interval 1"
COMPARED = {"loss_beta": 2000, "weight_alpha": 0, "weight_beta": None, "histogram_path": "scores.json"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    lay_out(root)
    write_videos(root)
    for number in range(4):
        write_video(root / f"data/videos/worse-{number}.mp4", 5, size=(48, 32), grey_step=2 + number)
    rows = [
        {"file": "1.mp4", "file_rejected": f"worse-{number}.mp4", "captions": "a red kite", "score": 0.8}
        for number in range(4)
    ]
    (root / "data/videos/pairs.json").write_text(json.dumps(rows))
    write_wan(root / "ckpt/wan")
    return root


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(workspace)
    return workspace


def job(root: Path, **compared: Any) -> list[str]:
    """Write the files of a job on pairs, and return the words that start it."""
    model = tiny_parts(tiny_predictor(example(MODEL), **WAN, in_dim=4, out_dim=4), root / "ckpt/wan")
    model["dpo"] = {**COMPARED, **compared}
    data = tiny_videos(example(DATA), root / "ckpt/wan")
    basic = {"data_path": "data/videos/pairs.json", "data_folder": "data/videos"}
    data["dataset_param"]["basic_parameters"] = basic
    files = ["--mm-model", put(root / "model.json", model), "--mm-data", put(root / "data.json", data)]
    return [*FLAGS.split(), *files, "--load", "ckpt/wan/transformer"]


def test_a_job_on_pairs_is_a_recipe_on_pairs(here: Path) -> None:
    recipe, report = recipe_of(parse_args(job(here)))
    assert report.refused == []
    assert recipe["train"]["task"] == "diffusion_dpo"
    options = recipe["train"]["task_options"]
    assert (options["beta"], options["beta_by_time"]) == (4000, True)  # there, nothing is halved
    section = recipe["data"]
    assert section["kind"] == "generation_preference"
    assert section["train"][0]["columns"] == {"chosen": "file", "rejected": "file_rejected", "text": "captions"}
    assert section["length"] == 2 * 2 * 2 * 3, "two videos of two latent frames of 2 x 3 tokens"


def test_pairs_that_are_weighed_and_jobs_of_another_kind_are_refused(here: Path) -> None:
    _, report = recipe_of(parse_args(job(here, weight_alpha=0.7), allow_refused=True))
    assert [entry.key for entry in report.refused] == ["dpo.weight_alpha"]
    words = job(here)
    with raises("job.preference-entry", "posttrain_sora_dpo.py"):
        pretrain(words)
    model = json.loads(Path("model.json").read_text())
    put(Path("model.json"), {**model, "load_video_features": True, "load_text_features": True})
    with raises("job.preference-features"):
        posttrain_sora_dpo(words)
    put(Path("model.json"), {key: value for key, value in model.items() if key != "dpo"})
    with raises("job.preference-section-missing"):
        posttrain_sora_dpo(words)


@pytest.mark.slow
def test_a_job_on_pairs_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        posttrain_sora_dpo([*job(here), "--save", "paired", "--save-interval", "2"])
    finally:
        destroy()
    assert (here / "paired/latest_checkpointed_iteration.txt").read_text() == "2"
    rows = [json.loads(line) for line in (here / "paired/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "model and reference are the same at first"
    assert losses[1] != losses[0]


@pytest.mark.slow  # two processes that import torch
def test_two_ranks_sample_one_video_together(here: Path) -> None:
    job = tiny_parts(tiny_predictor(example("wan2.1/1.3b/t2v/inference_model.json"), **WAN), here / "ckpt/wan")
    job["pipeline_config"]["input_size"] = [5, 32, 48]
    job["diffusion"]["num_inference_steps"] = 1
    job |= {"prompt": ["a red kite"], "dtype": "fp32"}
    words = ["--mm-model", put(here / "asked.json", job), "--load", "ckpt/wan/transformer", "--seed", "3"]
    inference_sora(words)
    alone = json.loads(Path("samples/wan2.1/video_0.json").read_text())
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*started, "inference_sora.py", *words, "--context-parallel-size", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("wrote samples/wan2.1/video_0.mp4") == 1
    shared = json.loads(Path("samples/wan2.1/video_0.json").read_text())
    assert shared["request"] == alone["request"]
    assert "'ranks': '2'" in str(shared)


def test_stages_of_a_model_that_samples_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises("job.sampling-pipeline"):
        inference_sora(["--pipeline-model-parallel-size", "2"])
