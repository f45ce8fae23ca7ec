"""The records of a run that never was: everything that a report can show, in a second."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

EVIL = '<script>window.evil = 1</script><img src=x onerror="window.evil = 1">'


def write_recorded_run(folder: Path, steps: int = 200, lr: float = 1e-4, **end: Any) -> Path:
    """Write a run of preferences with answers about an image. `end`: the last row of its history; none: a kill."""
    folder.mkdir(parents=True)
    config = {
        "name": folder.name,
        "model": {"family": "qwen2_vl"},
        "train": {"steps": steps, "global_batch": 4, "seed": 0},
        "optim": {"lr": lr},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row = {"kind": "train", "step": step, "epoch": step / 50, "loss": math.exp(-step / 90) + 0.1, "grad_norm": 1.0}
        row |= {"lr": lr, "margin": step / 100, "reward_chosen": step / 200, "reward_rejected": -step / 200}
        if step % 10 == 0:
            row |= {"tokens_per_s": 52000.0, "data_wait": 0.01, "memory_gib": 40.0, "peak_memory_gib": 61.2}
            row |= {"step_seconds": 0.63, "tflops": 400.0, "mfu": 0.41}
        rows.append(row)
        if step % 50 == 0:
            rows.append({"kind": "eval", "step": step, "eval_loss": math.exp(-step / 90) + 0.2})
    _write(folder / "metrics.jsonl", rows)
    image = Image.new("RGB", (640, 480), (90, 140, 190))
    ImageDraw.Draw(image).rectangle([160, 120, 320, 360], fill=(200, 60, 60))
    image.save(folder / "box.png")
    about = {"group": "1 image", "images": [str(folder / "box.png")]}
    said, wanted = "<box>[[250, 250, 500, 750]]</box>", "<box>[[260, 250, 500, 740]]</box>"
    _write(
        folder / "answers.jsonl",
        [
            {"id": "0", "question": "Where?", "answer": said, "expected": wanted, "correct": False, **about},
            {"id": "1", "question": EVIL, "answer": "word " * 400, "expected": EVIL, "correct": False, **about},
            {
                "id": "2",
                "question": "2 + 2?",
                "answer": f"{lr}",
                "expected": "4",
                "correct": True,
                "group": "text only",
            },
        ],
    )
    start = {"kind": "start", "step": 0, "time": "2026-03-01T09:00:00+00:00", "device": "NVIDIA H200", "ranks": 16}
    history = [{**start, "machines": 2, "versions": {"torch": "2.11.0"}, "process": {}}]
    history += [{"kind": "end", "step": steps, "time": "2026-03-01T10:30:00+00:00", **end}] if end else []
    _write(folder / "history.jsonl", history)
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
