"""What a checkpoint costs the step that saves it, on one accelerator.

    python bench/saves.py            # 3B in bf16: one JSON line with saves in the background, one without

A step is timed from the end of the step before it to its own end, with training's stream idle at both, so that the
pause of a save is counted to the step behind it. The copies of the save have a stream of their own, for which training
never waits.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conversations import SIDE, apart, model_section, write_even, write_tokenizer
from vlm import FAMILY, LENGTH, PICTURES, TESSERA

import tessera
from tessera.core.callback import Callback

STEPS, FIRST = 15, 8  # one save, behind step FIRST; steps before it compile and warm up


class Clock(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.reports: list[Any] = []
        self._last = time.perf_counter()

    def on_step_end(self, trainer: Any, result: Any) -> None:
        torch.cuda.current_stream().synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def on_save(self, trainer: Any, path: Path) -> None:
        self.reports.append(trainer.checkpoints.report)


def measure(folder: Path, asynchronous: bool) -> dict[str, Any]:
    case, clock = TESSERA["3b-bf16"], Clock()
    recipe = {
        "name": "saves",
        "out": str(folder / "runs"),
        "model": model_section(FAMILY, case["preset"], folder / "tokenizer"),
        "data": {
            "train": str(folder / "even.jsonl"),
            "length": LENGTH,
            "workers": 4,
            "processor": {"max_pixels": SIDE * SIDE},
        },
        "parallel": case["parallel"],
        "precision": case["precision"],
        "train": {"steps": STEPS},
        "checkpoint": {"every": FIRST, "keep": 1, "at_end": False, "asynchronous": asynchronous},
    }
    tessera.train(recipe, overwrite=True, callbacks=[clock])
    usual = statistics.median(seconds for step, seconds in enumerate(clock.seconds, 1) if step > 3 and step % FIRST > 3)
    saving = [clock.seconds[step] for step in range(FIRST, STEPS, FIRST)]
    return {
        "asynchronous": asynchronous,
        "usual_ms": round(usual * 1e3),
        "saving_ms": [round(seconds * 1e3) for seconds in saving],
        "ratio": [round(seconds / usual, 2) for seconds in saving],
        "written_s": [round(report.seconds, 1) for report in clock.reports],
        "paused_s": [round(report.paused_seconds, 3) for report in clock.reports],
        "gigabytes": round(clock.reports[0].bytes / 1e9, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        write_even(folder, LENGTH, PICTURES)
        for asynchronous in [word == "background" for word in sys.argv[1:]] or [True, False]:
            print(json.dumps(apart(measure, folder, asynchronous)), flush=True)


if __name__ == "__main__":
    main()
