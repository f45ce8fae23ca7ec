"""A recipe of each generation family trains a tiny model of that family, from media to weights and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.config.run_config import load_config
from tests.toys import sampling_folders as folders
from tests.toys.generation_set import write_image, write_jsonl, write_video

ROOT = Path(__file__).parents[2] / "recipes"
RUNS: dict[str, Callable[[Path], Any]] = {
    "wan/t2v": folders.write_wan,
    "hunyuan_video/lora": folders.write_hunyuan_video,
    "hunyuan_video/i2v": partial(folders.write_hunyuan_video_i2v, condition="token_replace"),
    "hunyuan_video_1_5/t2v": folders.write_hunyuan_video_1_5,
    "hunyuan_video_1_5/i2v": folders.write_hunyuan_video_1_5_i2v,
    "flux/lora": folders.write_flux,
    "qwen_image/dpo": folders.write_qwen_image,
    "qwen_image/edit": partial(folders.write_qwen_image, edit=True),
    "sd3/t2i": folders.write_sd3,
    "cogvideox/lora": folders.write_cogvideox,
    "ltx_video/i2v": folders.write_ltx_video,
}


def write_media(folder: Path, kind: str, images: bool, edits: bool = False) -> Path:
    """Write a set of four samples, or of four pairs. `edits`: with an image that was edited."""
    rows = []
    suffix = "png" if images else "mp4"
    for number in range(4):
        names = [f"{number}-{side}.{suffix}" for side in ("a", "b")]
        for shade, name in enumerate(names):
            if images:
                write_image(folder / name, shade=30 * number + 20 * shade)
            else:
                write_video(folder / name, 9)
        media = {"chosen": names[0], "rejected": names[1]} if kind == "generation_preference" else {"path": names[0]}
        more = {"references": names[1:]} if edits else {}
        rows.append({"cap": "a red kite moving left", **media, **more})
    return write_jsonl(folder / "set.jsonl", rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_recipe_trains_a_tiny_model(name: str, tmp_path: Path) -> None:
    recipe = ROOT / f"{name}.yaml"
    RUNS[name](tmp_path / "model")
    config = load_config(recipe)
    images = config.data.processor.get("num_frames") is None
    edits = name.endswith("/edit")
    data = write_media(tmp_path, config.data.kind, images, edits)
    changes: dict[str, Any] = {
        "out": str(tmp_path / "runs"),
        "model.path": str(tmp_path / "model"),
        "data.train": [{"path": str(data)}],
        "data.workers": 0,
        "data.length": 1200,  # of text alone, HunyuanVideo 1.5 may have a thousand
        "data.processor": {"max_pixels": 1024, **({} if images else {"num_frames": 9})}
        | ({"reference_pixels": 4096} if edits else {}),
        "parallel.compile": False,
        "train.steps": 2,
        "train.global_batch": 2,
        "train.device": "cpu",
        "precision.compute": "float32",
        "precision.weights": "float32",
        "optim.schedule.warmup": 1,
        "checkpoint.prove": "never",
    }
    if config.train.preview is not None:
        changes["train.preview"] = {"prompts": ["a red kite"], "height": 32, "width": 32, "steps": 1}
        changes["train.preview"] |= {} if images else {"frames": 5}
    if config.model.lora is not None:
        changes |= {"model.lora.rank": 2, "model.lora.alpha": 2}
    run = tessera.train(str(recipe), changes)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
    written = run.folder / ("hf" if config.model.lora is None else "adapter")
    assert list(written.glob("*.safetensors"))
    assert not (run.folder / "quarantine.jsonl").exists()
    if config.train.preview is not None:
        assert list((run.folder / "previews").iterdir())
