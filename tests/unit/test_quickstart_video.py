"""The quick start for video: its videos, its judge and its VAE do what the tutorial says, and the road is whole."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from tessera.config.run_config import load_config

FOLDER = Path(__file__).parents[2] / "recipes" / "quickstart-video"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a module of the recipe; afterwards none of them is known under its short name."""
    names = ("digits", "vae", "judge", "parts")
    monkeypatch.syspath_prepend(FOLDER)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def imported(name: str) -> ModuleType:
        return import_module(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)


def test_videos_show_the_scan_that_moves_one_way(modules: Any) -> None:
    digits = modules("digits")
    assert len(digits.split(held_out=False)) == 1438
    scan = digits.split(held_out=False).scans[0]
    moves = {"left": (2, -1), "right": (2, 1), "up": (1, -1), "down": (1, 1)}
    for way, (axis, sign) in moves.items():
        frames = digits.video(scan, way, digits.random.Random(3)).astype(int)
        assert (frames[-1] == np.roll(frames[0], sign * digits.TRAVEL, axis - 1)).all()
        assert frames[0].sum() == (scan * 255).round().sum()  # nothing leaves the canvas


def test_gifs_keep_every_pixel_and_frame(modules: Any) -> None:
    digits = modules("digits")
    frames = digits.video(digits.split(held_out=True).scans[0], "down", digits.random.Random(0))
    with Image.open(io.BytesIO(digits.as_gif(frames))) as gif:
        read = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    assert (np.stack(read) == frames[..., None]).all()


def test_judge_reads_real_videos_and_sees_when_one_is_wrong(modules: Any) -> None:
    digits, judge = modules("digits"), modules("judge")
    held_out = digits.split(held_out=True)
    videos, labels, ways = digits.drawn(held_out, 200, seed=5)
    judged = judge.Judge()
    digit, way = judged(videos).right(labels, ways)
    assert digit >= 0.97
    assert way >= 0.99
    assert judged(videos[:, ::-1]).right(labels, ways)[1] == 0
    assert judged(np.zeros_like(videos[:2])).ways == ["nowhere", "nowhere"]


def test_vae_computes_whole_videos_as_the_library_does_frame_by_frame(modules: Any) -> None:
    digits, vae = modules("digits"), modules("vae")
    torch.manual_seed(0)
    coder = vae.VideoVae(base_dim=16).eval()
    coder.init_weights()
    for parameter in coder.parameters():  # away from zeros that would hide a mistake
        parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
    videos, _, _ = digits.drawn(digits.split(held_out=True), 2, seed=0)
    pixels = vae.as_pixels(torch.from_numpy(videos))
    with torch.no_grad():
        latents = coder.encoded(pixels)
        assert latents.shape == (2, 8, 5, 4, 4)
        torch.testing.assert_close(latents, coder.vae.encode(pixels).latent_dist.mode(), rtol=1e-4, atol=1e-4)
        again = coder.vae.decode(latents).sample
        torch.testing.assert_close(coder.decoded(latents).clamp(-1, 1), again, rtol=1e-4, atol=1e-4)


def test_vae_begins_near_its_goal(modules: Any) -> None:
    digits, vae = modules("digits"), modules("vae")
    coder = vae.VideoVae()
    coder.init_weights()
    videos, _, _ = digits.drawn(digits.split(held_out=True), 16, seed=0)
    with torch.no_grad():
        pixels = vae.as_pixels(torch.from_numpy(videos))
        error = (coder.decoded(coder.encoded(pixels)) - pixels).square().mean()
    assert float(error) < 0.5 * float(pixels.var())


def test_recipes_fit_together() -> None:
    small, large = load_config(FOLDER / "vae.yaml"), load_config(FOLDER / "recipe.yaml")
    config = large.model.config
    assert config["in_channels"] == config["out_channels"] == small.model.config["arguments"]["z_dim"]
    assert large.data.length is not None
    assert large.data.length % 20 == 0  # tokens of a video: rows without padding


@pytest.mark.slow
def test_the_whole_road_with_a_few_steps(tmp_path: Path) -> None:
    few = ["--ways", "1", "--samples", "12", "--sample-steps", "2", "--vae", "train.steps=4"]
    few += ["--model", "train.steps=4", "--model", "train.generate_every=2"]
    place = ["--folder", str(tmp_path / "data"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *place, *few], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1, done.stderr  # so few steps cannot reach what is promised, and it says so
    assert "falls short" in done.stderr
    assert "over 12 samples" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 1438
    assert all((tmp_path / "data" / row["video"]).is_file() for row in rows)
    assert {row["text"].split()[-1] for row in rows} == {"left", "right", "up", "down"}
    run = tmp_path / "runs" / "quickstart-video"
    page = (run / "report.html").read_text()
    assert page.count("data:image/gif") == 12 + 4 * 2  # judged samples; previews of 4 prompts at 2 steps
    assert "Judged samples" in page
