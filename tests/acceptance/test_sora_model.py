"""`GenerationModel` and `SoRAModel`: encoders, VAE, transformer and objective in one module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation_cases import WAN, example, tiny_parts, tiny_predictor, write_wan

from tessera.training.generation_model import GenerationModel
from tessera_compat.mindspeed_mm.sora_model import SoRAModel
from tests.errors import raises

CAPTIONS = ["a red kite", "the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wan")
    write_wan(target)
    return target


@pytest.fixture(scope="module")
def videos() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (5, 32, 48, 3), dtype=np.uint8) for _ in CAPTIONS]


def model_json(folder: Path, **changes: Any) -> dict[str, Any]:
    model = tiny_predictor(example("wan2.2/A14B/t2v/pretrain_model_high.json"), **WAN, in_dim=4, out_dim=4)
    model["predictor"]["from_pretrained"] = str(folder / "transformer")
    return {**tiny_parts(model, folder), **changes}


def test_videos_ids_and_features_have_one_loss(folder: Path, videos: list[np.ndarray]) -> None:
    model = SoRAModel(model_json(folder))
    options = model.task.options.model_dump(exclude={"encoders"}, exclude_unset=True)
    text = {"dtype": "float32"}
    loaded = GenerationModel.load(folder, dtype="float32", encoders={"text": text}, **options)
    batch = loaded.batch(videos, CAPTIONS, seed=7)
    loss = loaded(batch)
    loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.predictor.parameters())
    pixels = torch.stack([torch.from_numpy(one).permute(3, 0, 1, 2) for one in videos]) / 127.5 - 1
    ids = [loaded.processor.tokenize(caption)[0][0] for caption in CAPTIONS]
    wide = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.zeros(2, 8)
    for number, some in enumerate(ids):
        wide[number, : len(some)] = torch.tensor(some)
        mask[number, : len(some)] = 1
    (same,) = model(pixels, wide, prompt_mask=mask, seed=7)
    assert torch.allclose(same, loss, rtol=1e-5)
    inputs = loaded.task.inputs(*loaded.task.encode([batch]))
    latents = _latents(inputs["clean"], batch.shapes["latents"])
    features = SoRAModel(model_json(folder, load_video_features=True, load_text_features=True))
    (again,) = features(latents, inputs["text"].view(2, 512, -1), seed=7)
    assert torch.allclose(again, loss, rtol=1e-5)
    (other,) = features(latents, inputs["text"].view(2, 512, -1), seed=8)
    assert not torch.allclose(other, loss, rtol=1e-3)
    assert set(features.state_dict()) == {f"predictor.{name}" for name in features.predictor.state_dict()}


def _latents(tokens: torch.Tensor, grids: Any) -> torch.Tensor:
    """Return tokens of equal grids as latents [B, C, f, h, w]."""
    frames, rows, columns = grids[0]
    cut = tokens.view(len(grids), frames, rows, columns, 4, 1, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return cut.reshape(len(grids), 4, frames, 2 * rows, 2 * columns)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"predictor": {"model_id": "vace"}}, "job.unknown-predictor"),
        ({"predictor": None}, "job.predictor-missing"),
        ({"ae": {"from_pretrained": "a/vae.pt"}}, "job.encoder-folder"),
        ({"frames": 5, "use_dynamic_dpcp": True}, "job.refused-settings"),
    ],
)
def test_a_model_that_cannot_be_is_refused(folder: Path, change: dict[str, Any], error: str) -> None:
    with raises(error):
        SoRAModel(model_json(folder, **change))


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    model = SoRAModel(model_json(folder, load_video_features=True, load_text_features=True))
    with raises("generation.latent-channels-mismatch"):
        model(torch.zeros(1, 3, 2, 4, 6), torch.zeros(1, 8, 16))
    with raises("generation.size-not-whole-patches"):
        model(torch.zeros(1, 4, 2, 5, 6), torch.zeros(1, 8, 16))
    with raises("job.unknown-input", "video_mask"):
        model(torch.zeros(1, 4, 2, 4, 6), torch.zeros(1, 8, 16), torch.ones(1))
