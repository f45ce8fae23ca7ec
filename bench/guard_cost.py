"""What the guard costs: the same run with and without it, wall time of a step over many steps that print nothing.

    python bench/guard_cost.py [preset] [tokens of a row] [steps] [times]

Prints one JSON line per case.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conversations import model_section, write_even, write_tokenizer

import tessera
from tessera.core.callback import Callback

WARM = 6


class Clock(Callback):
    """Seconds of a step, the device's work included, from step WARM on."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == WARM:
            torch.accelerator.synchronize()
            self.begun = time.perf_counter()

    def on_end(self, trainer: Any) -> None:
        torch.accelerator.synchronize()
        self.ended = time.perf_counter()


def measure(preset: str, length: int, steps: int, dtype: str, policy: str, folder: Path) -> float:
    recipe = {
        "name": "guard",
        "out": str(folder / "runs"),
        "model": model_section("qwen2_vl", preset, folder / "tokenizer"),
        "data": {"train": str(folder / "even.jsonl"), "length": length, "workers": 4},
        "precision": {"weights": dtype, "compute": "bfloat16"},
        "train": {"steps": steps},
        "checkpoint": {"at_end": False},
        "guard": {"policy": policy, "window": 10 * steps},
        "log": {"every": 10 * steps},
    }
    clock = Clock()
    tessera.train(recipe, overwrite=True, callbacks=[clock])
    return (clock.ended - clock.begun) / (steps - WARM) * 1e3


def main(preset: str = "2b", length: str = "2048", steps: str = "36", times: str = "2") -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        write_even(Path(folder), int(length), 1)
        for dtype in ("bfloat16", "float32"):
            for policy in ("off", "clip") * int(times):
                took = measure(preset, int(length), int(steps), dtype, policy, Path(folder))
                case = {"preset": preset, "tokens": int(length), "dtype": dtype, "guard": policy, "ms": round(took, 2)}
                print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
