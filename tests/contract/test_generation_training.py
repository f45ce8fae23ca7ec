"""A tiny wan is trained on images and videos, from the recipe to the weights: online, and from features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import tessera
from tessera.tools.data_features import write_features
from tessera.tools.dry_run import dry_run
from tests.dist.spawn import run_ranks
from tests.toys.callbacks import StopAt
from tests.toys.generation_set import write_image, write_jsonl, write_video
from tests.toys.pipeline_folder import TEXT_SIZE, write_pipeline_folder
from tests.toys.sampling_folders import write_wan

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_SIZE,
    "freq_dim": 8,
    "ffn_dim": 32,
    "num_layers": 2,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import WanTransformer3DModel

    folder = write_pipeline_folder(tmp_path_factory.mktemp("pipeline"))
    torch.manual_seed(0)
    WanTransformer3DModel(**TINY).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    rows = []
    for number, frames in enumerate((5, 9, 5)):
        write_video(folder / f"{number}.mp4", frames)
        rows.append({"path": f"{number}.mp4", "cap": "a red square moving"})
    for number in range(3):
        write_image(folder / f"{number}.png", shade=30 * number)
        rows.append({"path": f"{number}.png", "cap": "a red square"})
    return write_jsonl(folder / "set.jsonl", rows)


def recipe(data: Path, pipeline: Path, out: Path, **options: Any) -> dict[str, Any]:
    encoders = {"folder": str(pipeline), "vae": {"residence": "offloaded"}, "text": {"dtype": "float32"}}
    return {
        "name": "run",
        "out": str(out),
        "model": {"family": "wan", "config": TINY, "tokenizer": str(pipeline)},
        "data": {
            "kind": "generation",
            "train": [{"path": str(data)}],
            "length": 32,
            "workers": 0,
            "processor": {"num_frames": 9, "max_pixels": 1024},
        },
        "train": {"steps": 4, "global_batch": 2, "micro_batch": 1, "task_options": {"encoders": encoders, **options}},
        "optim": {"lr": 1e-2},
        "log": {"every": 1},
    }


def weights(run: Any) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(run.checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def losses(run: Any) -> list[float]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def test_training_from_pixels_and_captions_resumes_bit_by_bit(data: Path, pipeline: Path, tmp_path: Path) -> None:
    options = {"shift": 3.0, "time": "logit_normal", "caption_dropout": 0.3, "encoders": {}}
    recipes = [recipe(data, pipeline, tmp_path / name, **options) for name in ("whole", "part")]
    for changed in recipes:
        changed["model"] = {"path": str(pipeline)}  # which has the encoders as well
    del recipes[1]["train"]["task_options"]["encoders"]  # so they are the default
    whole = tessera.train(recipes[0])
    part = tessera.train(recipes[1], callbacks=[StopAt(2)])
    resumed = tessera.resume(part.folder)
    wanted, stored = weights(whole), weights(resumed)
    assert wanted.keys() == stored.keys()
    assert not any("vae" in name or "text_encoder" in name for name in wanted)  # frozen parts are not stored
    assert any("blocks" in name for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(tensor, stored[name]), name
    planned = tessera.plan(recipe(data, pipeline, tmp_path / "planned")).describe()
    assert "vae" in planned
    assert "otherwise in host memory" in planned
    assert "text_encoder" in planned


@pytest.mark.slow
@pytest.mark.parametrize("frames", ["none", "first"])
def test_encoding_several_steps_at_once_changes_no_bit(data: Path, pipeline: Path, tmp_path: Path, frames: str) -> None:
    if frames == "first":
        pipeline = tmp_path / "wan"
        write_wan(pipeline, image=True, embeds=1)
    options = {"caption_dropout": 0.3, "given": frames}
    recipes = []
    for name, steps in (("one", 1), ("three", 3), ("part", 3)):
        chosen = recipe(data, pipeline, tmp_path / name, **options)
        chosen["model"] = {"path": str(pipeline)}
        chosen["train"]["steps"] = 5
        chosen["train"]["task_options"]["encoders"]["steps"] = steps
        recipes.append(chosen)
    assert "3 steps together" in tessera.plan(recipes[1]).describe()
    wanted, together = (weights(tessera.train(chosen)) for chosen in recipes[:2])
    part = tessera.train(recipes[2], callbacks=[StopAt(2)])  # in the middle of what was encoded
    resumed = weights(tessera.resume(part.folder))
    for name, tensor in wanted.items():
        assert torch.equal(tensor, together[name]), name
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.slow  # a process of its own runs dry
def test_features_train_as_pixels_do_and_a_step_runs_dry(data: Path, pipeline: Path, tmp_path: Path) -> None:
    online = recipe(data, pipeline, tmp_path / "online", time="mode")
    features = write_features(online, tmp_path / "features").folder
    offline = recipe(features, pipeline, tmp_path / "offline", time="mode")
    del offline["train"]["task_options"]["encoders"]
    first, second = (losses(tessera.train(made)) for made in (online, offline))
    assert len(first) == 4
    assert second == pytest.approx(first, rel=1e-4)  # videos of one shape share a call of the VAE
    (role,) = dry_run(offline, world=2)
    assert role.volumes


def train_on_ranks(rank: int, world: int, recipes: list[dict[str, Any]]) -> list[list[float]]:
    return [losses(tessera.train(made)) for made in recipes]


@pytest.mark.slow
def test_ranks_that_share_encoders_or_sequences_train_as_one(data: Path, pipeline: Path, tmp_path: Path) -> None:
    options = {"time": "logit_normal", "caption_dropout": 0.3, "encoders": {"text": {"dtype": "float32"}}}
    layouts: dict[str, dict[str, Any]] = {"alone": {}, "shard": {}, "cp": {"cp": 2}}
    recipes = {name: recipe(data, pipeline, tmp_path / name, **options) for name in layouts}
    for name, parallel in layouts.items():
        recipes[name] |= {"model": {"path": str(pipeline)}, "parallel": parallel}
    wanted = losses(tessera.train(recipes.pop("alone")))
    for measured in run_ranks(train_on_ranks, 2, list(recipes.values()))[0]:
        assert measured == pytest.approx(wanted, rel=1e-4)
