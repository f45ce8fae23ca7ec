"""A generation family in one folder, with a VAE of its own, trains, exports and samples through the public API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tessera
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.tools.data_features import write_features
from tests.errors import raises
from tests.toys.generation_set import write_image, write_jsonl
from tests.toys.painter.config import PainterConfig
from tests.toys.painter.vae import PainterVae
from tests.toys.pipeline_folder import write_pipeline_folder

FAMILY = "tests.toys.painter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder whose VAE is the family's own, and a set of images."""
    folder = write_pipeline_folder(tmp_path_factory.mktemp("painter"))
    for file in (folder / "vae").iterdir():
        file.unlink()
    (folder / "vae/config.json").write_text(json.dumps({"_class_name": "PainterVae", "side": 4}))
    mix = torch.eye(3) + 0.1 * torch.arange(9.0).view(3, 3)
    save_file({"mix.weight": mix}, folder / "vae/diffusion_pytorch_model.safetensors")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "PainterPipeline", "vae": [FAMILY, "PainterVae"]}
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": [FAMILY, "PainterTransformer"]}))
    rows = []
    for number in range(4):
        write_image(folder / f"{number}.png", (24, 16), 60 * number)
        rows.append({"path": f"{number}.png", "cap": "a red square"})
    write_jsonl(folder / "images.jsonl", rows)
    return folder


def recipe(folder: Path, data: Path, out: Path, **options: Any) -> dict[str, Any]:
    encoders = {"folder": str(folder), "text": {"dtype": "float32"}}
    return {
        "name": "painter",
        "out": str(out),
        "model": {"family": FAMILY, "tokenizer": str(folder)},
        "data": {"kind": "generation", "train": str(data), "length": 16, "workers": 0},
        "train": {"steps": 2, "global_batch": 2, "device": "cpu", "task_options": {"encoders": encoders, **options}},
        "optim": {"lr": 0.01},
        "log": {"every": 1},
        "checkpoint": {"export": True},
    }


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.metrics if row["kind"] == "train"]


def test_it_trains_exports_and_samples(folder: Path, tmp_path: Path) -> None:
    run = tessera.train(recipe(folder, folder / "images.jsonl", tmp_path / "run", caption_dropout=0.5))
    assert len(set(losses(run))) == 2
    exported = run.folder / "hf"
    assert json.loads((exported / "config.json").read_text())["_class_name"] == "PainterTransformer"
    stored = load_file(exported / "diffusion_pytorch_model.safetensors")
    assert sorted(stored)[0] == "painter.latents.bias"
    (sample,) = tessera.pipeline(run.folder, device="cpu", parts=folder, trust=True).generate("a red square", seed=3)
    assert sample.frames.shape == (1, 16, 24, 3)
    assert sample.frames.std() > 1, "a flat image says nothing"
    again = tessera.pipeline(exported, device="cpu", family=FAMILY, parts=folder)
    (same,) = again.generate("a red square", seed=3)
    assert np.array_equal(same.frames, sample.frames)
    with raises("generation.vae-option-not-supported", "enable_tiling"):
        again.generate("a red square", vae_tiling=True)
    squares = sample.frames[0].reshape(4, 4, 6, 4, 3)
    assert np.array_equal(squares, np.broadcast_to(squares[:, :1, :, :1], squares.shape)), "its own VAE decoded it"


def test_features_of_its_vae_train_alike(folder: Path, tmp_path: Path) -> None:
    online = recipe(folder, folder / "images.jsonl", tmp_path / "online")
    assert write_features(online, tmp_path / "features", batch=1).samples == 4
    stored = recipe(folder, tmp_path / "features", tmp_path / "stored", encoders=None)
    first, second = (losses(tessera.train(run)) for run in (online, stored))
    assert second == pytest.approx(first, rel=1e-4)


def test_other_families_do_not_read_its_vae(folder: Path) -> None:
    family = PainterConfig().generation()
    vae = PipelineFolder(folder, family.vaes).autoencoder()
    assert isinstance(vae, PainterVae)
    image = torch.randint(0, 256, (1, 16, 24, 3), dtype=torch.uint8)
    (latents,) = vae.encode([image])
    assert latents.shape == (3, 1, 4, 6)
    with raises("generation.unknown-vae", "PainterVae"):
        PipelineFolder(folder).autoencoder()
