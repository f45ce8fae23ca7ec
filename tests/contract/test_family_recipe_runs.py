"""Recipes of vision-language and language families train tiny models of the family on the demo set, from files to
adapters and folders."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from small_folders import small_folder

import tessera
from tessera.config.run_config import load_config
from tests.toys.audio_folder import audio_folder
from tests.toys.omni_set import write_omni_set

ROOT = Path(__file__).parents[2] / "recipes"
# Recipe -> tiny model, as `small_folders` names it. Each family has one, each method three or more, each task one.
RUNS = {
    "qwen2_vl/full": "qwen2_vl",
    "qwen2_5_vl/qlora": "qwen2_5_vl",
    "qwen2_5_omni/lora": "qwen2_5_omni",
    "qwen2_audio/lora": "qwen2_audio",
    "qwen3_omni/full": "qwen3_omni",
    "qwen3_vl/dpo": "qwen3_vl",
    "internvl/full": "internvl",
    "llava/lora": "llava one vision",
    "glm4v/qlora": "glm4v",
    "llama/dpo": "llama",
    "qwen2/lora": "qwen2",
    "qwen3/full": "qwen3",
    "tasks/ocr": "qwen2_5_vl",
    "tasks/vqa": "internvl",
    "tasks/grounding": "qwen3_vl",
    "tasks/captioning": "qwen2_vl",
    "tasks/tools": "qwen3",
    "tasks/projector": "llava 1.5",
    "machines/24gb-lora": "qwen3_vl",
    "demo/lora": "qwen2_vl",
}
TOOL_ROW = {
    "tools": [{"type": "function", "function": {"name": "light", "description": "Switch a light.", "parameters": {}}}],
    "messages": [
        {"role": "user", "content": "Switch the light on."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "light", "arguments": {"on": True}}}],
        },
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "It is on."},
    ],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tessera.demo(tmp_path_factory.mktemp("data") / "demo").folder


def rows_for(name: str, case: str, demo: Path, folder: Path) -> dict[str, str]:
    """Return a data set with rows in the form that the comments of a recipe show."""
    if case in ("qwen2_audio", "qwen3_omni"):
        file = write_omni_set(folder / "sound", films=False)
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if case == "qwen3_omni" or '"image"' not in line))
        return {"path": str(file)}
    kind = load_config(ROOT / f"{name}.yaml").data.kind
    file = demo / ("pairs.jsonl" if kind == "preference" else "train.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if case in ("llama", "qwen2", "qwen3"):  # they read text alone
        for row in rows:
            for message in row["messages"]:
                if isinstance(message["content"], list):
                    message["content"] = message["content"][-1]["text"]
    if name == "tasks/tools":
        rows = [TOOL_ROW] * 4
    if name in ("tasks/captioning", "tasks/projector"):
        with_images = [row for row in rows if row["id"].startswith("caption-")]
        rows = [
            {"text": row["messages"][1]["content"], "images": [row["messages"][0]["content"][0]["image"]]}
            for row in with_images
        ]
    if name == "tasks/vqa":
        with_images = [row for row in rows if row["id"].startswith("vqa-")]
        rows = [
            {
                "image": row["messages"][0]["content"][0]["image"],
                "conversations": [
                    {"from": "human", "value": "<image>\n" + row["messages"][0]["content"][1]["text"]},
                    {"from": "gpt", "value": row["messages"][1]["content"]},
                ],
            }
            for row in with_images
        ]
    written = folder / "rows.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(written), "root": str(demo)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_recipe_trains_a_tiny_model_on_the_demo_set(name: str, demo: Path, tmp_path: Path) -> None:
    case = RUNS[name]
    recipe = ROOT / f"{name}.yaml"
    config = load_config(recipe)
    source = rows_for(name, case, demo, tmp_path)
    make_folder = audio_folder if case == "qwen2_audio" else functools.partial(small_folder, case)
    changes: dict[str, Any] = {
        "out": str(tmp_path / "runs"),
        "model.path": str(make_folder(tmp_path / "model")),
        "data.train": [source],
        "data.eval": [source] if config.data.eval else [],
        "data.workers": 0,
        "data.length": 4096,
        "parallel.compile": False,
        "parallel.ep": 1,
        "train.steps": 2,
        "train.global_batch": 2,
        "train.eval_every": 0,
        "train.generate_every": 0,
        "train.device": "cpu",
        "precision.compute": "float32",
        "precision.weights": "float32",
        "optim.schedule.warmup": 1,
        "checkpoint.prove": "never",
    }
    # Sizes are those of the tiny model; that the recipe's own keys are known to its processor is asked first.
    options = dict(config.data.processor)
    for key in ("min_pixels", "max_pixels"):
        if key in options:
            options[key] = {"min_pixels": 1024, "max_pixels": 4096}[key]
    changes["data.processor"] = options
    if config.train.samples_per_step is not None:
        changes["train.samples_per_step"] = 4
    if config.train.early_stop is not None:
        changes |= {"train.generate_every": 1, "train.eval_every": 1, "train.generate_samples": 2}
    run = tessera.train(str(recipe), changes)
    losses = [line["loss"] for line in run.metrics if line["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    written = run.folder / ("hf" if config.model.lora is None else "adapter")
    assert list(written.glob("*.safetensors"))
    assert not (run.folder / "quarantine.jsonl").exists()
