"""Conversions that can be made to die at any point. It imports little: children run it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tessera.checkpoint.files import no_fault
from tessera.inference.found_model import find_model
from tessera.tools.conversion import ConversionJob, ConvertedModel, convert_folder
from tessera_compat.shards.layout import parse_layout


def convert(source: Path, target: Path, fault: Callable[[str], None] = no_fault, kind: str = "mm") -> None:
    """Convert in one thread, so that all points of failure come in one order.

    `kind`: "mm" (of a Qwen2-VL folder), "dcp", "hf", "fp8" (of a Hugging Face folder) or "run" (of a run, to one).
    """
    to = kind if kind in ("mm", "dcp") else "hf"
    job = ConversionJob(source, "hf", target, to, overwrite=True, prove="never", jobs=1, fault=fault)  # type: ignore[arg-type]
    if kind == "run":
        job.form, job.trained = None, find_model(source, None, False)
        convert_folder(job, ConvertedModel.of(job.trained.section))
        return
    if kind == "mm":
        config = json.loads((source / "config.json").read_text())
        vision, text = config["vision_config"]["depth"], config.get("text_config", config)["num_hidden_layers"]
        job.layout = parse_layout({"tp": 2, "vit": [[vision, 0]], "llm": [[1, text - 1]]})
    job.quantize = "fp8" if kind == "fp8" else None
    convert_folder(job, ConvertedModel.of_folder(source))


def killed_at(number: int, source: Path, target: Path, kind: str = "mm") -> None:
    """Convert, and die at the point of this number as at any instruction of a processor."""
    remaining = number

    def fault(point: str) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, fault, kind)
