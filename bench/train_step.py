"""Step time of a published shape through the whole Trainer: loader, engine, clipping, optimizer, metrics.

    python bench/train_step.py 2b 8192 4        # preset, tokens of a row, pictures of 56 x 56 patches in it

Prints one JSON line per case. Weights are random: speed does not depend on them as long as they are finite.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import tessera
from tessera.core import device as devices
from tessera.data.tokenizer import train_tokenizer

SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
VOCABULARY = 151936
SIDE = 56 * 14


def write_data(folder: Path, length: int, pictures: int, rows: int = 8) -> None:
    chance = random.Random(0)
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer = train_tokenizer(["a"], VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    lines = []
    for row in range(rows):
        shown = []
        for number in range(pictures):
            name = f"{row}-{number}.png"
            pixels = np.random.default_rng(row * 97 + number).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name, compress_level=1)
            shown.append({"type": "image", "image": name})
        text = "".join(chance.choice("abcdefgh") for _ in range(length - pictures * (28 * 28 + 2) - 64))
        talk = [{"role": "user", "content": shown}, {"role": "assistant", "content": text}]
        lines.append(json.dumps({"id": str(row), "messages": talk}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def measure(preset: str, length: int, case: dict[str, Any], folder: Path, steps: int = 14) -> dict[str, Any]:
    ids = {f"{word}_token_id": VOCABULARY - 7 + at for at, word in enumerate(SPECIAL)}
    recipe = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": {
            "family": "qwen2_vl",
            "preset": preset,
            "tokenizer": str(folder / "tokenizer"),
            "config": {
                "vision_start_token_id": ids["vision_start_token_id"],
                "vision_end_token_id": ids["vision_end_token_id"],
                "image_token_id": ids["image_pad_token_id"],
                "video_token_id": ids["video_pad_token_id"],
                "text": {"vocab_size": VOCABULARY},
            },
            "dtype": case["dtype"],
        },
        "data": {"train": [{"path": str(folder / "train.jsonl")}], "length": length, "workers": 4},
        "parallel": case["parallel"],
        "train": {"steps": steps},
        "checkpoint": {"at_end": False},
        "log": {"every": 1},
    }
    run = tessera.train(recipe, overwrite=True)
    rows = [row for row in run.metrics if "step_seconds" in row][4:]
    middle = statistics.median(row["step_seconds"] for row in rows)
    return {
        "ms": round(middle * 1e3, 1),
        "tokens_per_s": round(length / middle),
        "tflops": round(statistics.median(row["tflops"] for row in rows), 1),
        "data_wait": round(statistics.median(row["data_wait"] for row in rows), 4),
        "peak_gib": round(max(row["peak_memory_gib"] for row in rows), 1),
        "loss": round(rows[-1]["loss"], 3),
        "finite": all(np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]) for row in rows),
    }


CASES: dict[str, dict[str, Any]] = {
    "bf16 weights": {"dtype": "bfloat16", "parallel": {"reduce_dtype": "bfloat16"}},
    "fp32 master weights": {"dtype": "float32", "parallel": {"param_dtype": "bfloat16"}},
    "fp32 master weights, recompute": {
        "dtype": "float32",
        "parallel": {"param_dtype": "bfloat16", "recompute": ["text.layers.{*}", "vision.blocks.{*}"]},
    },
}


def main(preset: str = "2b", length: int = 8192, pictures: int = 4) -> None:
    device = devices.resolve("auto")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(folder, length, pictures)
        for name, case in CASES.items():
            facts = {"case": name, "preset": preset, "tokens": length, "pictures": pictures}
            result = measure(preset, length, case, folder)
            print(
                json.dumps({**facts, "device": devices.name(device), "torch": torch.__version__, **result}), flush=True
            )


if __name__ == "__main__":
    main(*(sys.argv[1:2] or ["2b"]), *map(int, sys.argv[2:4]))
