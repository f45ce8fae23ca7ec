"""A small chat set with everything in it: text only, one picture, two of odd sizes, and the tokenizer for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.models.processing.tokenizer import train_tokenizer

SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad", "vision_pad")
VOCABULARY = 512
MODEL = {
    "text": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mrope_section": [1, 1, 2]},
    "vision": {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 4},
}


def write_chat_set(folder: Path, samples: int = 40, seed: int = 0) -> Path:
    """`train.jsonl`, `pictures/` and `tokenizer/` below `folder`."""
    chance = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(samples):
        images = []
        for which in range(number % 3):
            width, height = chance.randint(9, 30), chance.randint(9, 30)
            name = f"pictures/{number}-{which}.png"
            pixels = np.random.default_rng(number * 3 + which).integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
            images.append({"type": "image", "image": name})
        words = " ".join(chance.choice(["red", "blue", "tall", "small", "old"]) for _ in range(chance.randint(1, 9)))
        rows.append(
            {
                "id": f"sample-{number}",
                "messages": [
                    {"role": "user", "content": [*images, {"type": "text", "text": f"Say {words}."}]},
                    {"role": "assistant", "content": words},
                ],
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(["red blue tall small old Say"], VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def chat_recipe(data: Path, out: Path, **train: Any) -> dict[str, Any]:
    """A tiny Qwen2-VL over that set; a step takes a few hundredths of a second."""
    return {
        "name": "chat",
        "out": str(out),
        "model": {
            "family": "qwen2_vl",
            "preset": "quickstart",
            "tokenizer": str(data / "tokenizer"),
            "config": MODEL,
        },
        "data": {
            "train": [{"path": str(data / "train.jsonl")}],
            "eval": [{"path": str(data / "train.jsonl"), "max_samples": 6}],
            "length": 192,
            "processor": {"min_pixels": 64, "max_pixels": 1024},
            "workers": 0,  # by default each rank has a process that decodes: it would take longer to start than the run
        },
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 1, "device": "cpu", "eval_rows": 2, **train},
        "optim": {"lr": 1e-3, "schedule": {"kind": "constant"}},
        "checkpoint": {"every": 2, "prove": "never"},
        "log": {"every": 2},
    }
