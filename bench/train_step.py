"""Step time of a published shape through the whole Trainer: loader, engine, clipping, optimizer, metrics.

    python bench/train_step.py precision 2b 8192 4    # cases, preset, tokens of a row, pictures (56 x 56 patches) in it
    python bench/train_step.py memory                 # what each memory form saves and costs

Prints one JSON line per case. Weights are random: speed does not depend on them as long as they are finite.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversations import apart, model_section, write_even, write_tokenizer

import tessera


def measure(preset: str, length: int, case: dict[str, Any], folder: Path, steps: int = 10) -> dict[str, Any]:
    recipe = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": model_section("qwen2_vl", preset, folder / "tokenizer"),
        "data": {"train": str(folder / "even.jsonl"), "length": length, "workers": 4},
        "parallel": case.get("parallel", {}),
        "precision": case["precision"],
        "train": {"steps": steps},
        "checkpoint": {"at_end": False},
        "log": {"every": 1},
    }
    run = tessera.train(recipe, overwrite=True)
    rows = [row for row in run.metrics if "step_seconds" in row][3:]
    middle = statistics.median(row["step_seconds"] for row in rows)
    return {
        "ms": round(middle * 1e3, 1),
        "tokens_per_s": round(length / middle),
        "tflops": round(statistics.median(row["tflops"] for row in rows), 1),
        "data_wait": round(statistics.median(row["data_wait"] for row in rows), 4),
        "peak_gib": round(rows[-1]["peak_memory_gib"], 1),
        "held_gib": round(rows[-1]["memory_gib"], 1),
        "loss": round(rows[-1]["loss"], 3),
        "finite": all(np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]) for row in rows),
    }


LAYERS = ["text.layers.{*}", "vision.blocks.{*}"]
MASTER = {"weights": "float32", "compute": "bfloat16"}  # computed in bf16 over fp32 master weights
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {
        "bf16 weights": {"precision": {"weights": "bfloat16", "reduce": "bfloat16"}},
        "fp32 master weights": {"precision": MASTER},
    },
    "memory": {
        name: {"precision": MASTER, "parallel": form}
        for name, form in {
            "nothing": {},
            "recompute MLPs, keep matmul": {"recompute": [{"modules": f"{m}.mlp", "keep": "matmul"} for m in LAYERS]},
            "recompute, keep matmul": {"recompute": [{"modules": m, "keep": "matmul"} for m in LAYERS]},
            "recompute, keep attention": {"recompute": [{"modules": m, "keep": "attention"} for m in LAYERS]},
            "recompute": {"recompute": LAYERS},
            "offload attention": {"activation_offload": ["text.layers.{*}.attn", "vision.blocks.{*}.attn"]},
            "offload layers": {"activation_offload": LAYERS},
            "recompute, offload": {"recompute": LAYERS, "offload": True},
        }.items()
    },
}


def main(cases: str = "precision", preset: str = "2b", length: int = 8192, pictures: int = 4) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(folder)
        write_even(folder, length, pictures)
        for name, case in CASES[cases].items():
            facts = {"case": name, "preset": preset, "tokens": length, "pictures": pictures, "torch": torch.__version__}
            facts |= apart(measure, preset, length, case, folder)
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
