"""A conversion to Megatron-style shards that can be made to die at any point. It imports little: children run it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tessera.checkpoint.files import no_fault
from tessera.tools import convert as tool
from tessera.tools.shard_layout import parse_layout


def convert(source: Path, target: Path, fault: Callable[[str], None] = no_fault) -> None:
    """Convert a Qwen2-VL folder in one thread, so that all points of failure come in one order."""
    job = tool._Job(source, "hf", target, "mm", "", True, "never", jobs=1, fault=fault)
    config = json.loads((source / "config.json").read_text())
    vision, text = config["vision_config"]["depth"], config.get("text_config", config)["num_hidden_layers"]
    job.layout = parse_layout({"tp": 2, "vit": [[vision, 0]], "llm": [[1, text - 1]]})
    tool._stream(job, tool._Model.of_folder(source))


def killed_at(number: int, source: Path, target: Path) -> None:
    """Convert, and die at the point of this number as at any instruction of a processor."""
    left = number

    def fault(point: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, fault)
