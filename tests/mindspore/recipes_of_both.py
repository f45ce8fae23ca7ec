"""A small recipe that runs on torch and on MindSpore."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from small_folders import small_folder

WORDS = ("red", "blue", "tall", "small", "old")


def rows(folder: Path, images: bool) -> Path:
    """Write 24 samples; with images, three of four show a square in one of several sizes."""
    lines = []
    for number in range(24):
        said = f"Say {WORDS[number % 5]} {WORDS[number % 3]}."
        content: Any = said
        if images and number % 4:
            picture = Image.new("RGB", (48 + 16 * (number % 3), 64), WORDS[number % 2])
            ImageDraw.Draw(picture).rectangle((8, 8, 8 + 2 * number, 40), fill="white")
            picture.save(folder / f"{number}.png")
            content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": said}]
        answer = " ".join([WORDS[number % 5], WORDS[number % 3]] * (1 + number % 4))
        lines.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def initial_weights(folder: Path) -> None:
    """Replace the weights of a folder by initial ones: norms are 1, and other weights have the usual spread of 0.02."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for number, (name, weight) in enumerate(sorted(weights.items())):
        if re.search(r"norm|ln_q", name):
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
    save_file(weights, file, metadata={"format": "pt"})


def recipe(family: str, folder: Path, steps: int, *, initial: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a recipe with weight decay, clipping that acts and warm-up.

    `initial`: whether the model has initial weights; otherwise they are 15 times as large, with gradients to match.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not model.exists():
        small_folder(family, model)
        rows(folder, images=family == "qwen2_vl")
        if initial:
            initial_weights(model / "hf")
    source = {"path": str(folder / "rows.jsonl"), "root": str(folder)}
    nested: dict[str, Any] = {
        "out": str(folder / "runs"),
        "model": {"path": str(model / "hf")},
        "data": {"train": [source], "workers": 0, "length": 128},
        "train": {"steps": steps, "global_batch": 2, "micro_batch": 2, "device": "cpu"},
        "optim": {
            "lr": 2e-4,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "schedule": {"kind": "cosine", "warmup": 5},
        },
        "checkpoint": {"every": 0, "prove": "never"},
        "log": {"every": 1},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return nested
