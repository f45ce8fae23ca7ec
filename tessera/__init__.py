"""Train vision-language and language models, and any `nn.Module`, on one device or many.

    import tessera
    run = tessera.train("recipe.yaml", {"train.steps": 100})
    model, processor = tessera.load(run.folder)

The functions are defined in `tessera.api`, which is imported on first use: `import tessera` itself is fast.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tessera.version import __version__ as __version__

if TYPE_CHECKING:
    from tessera.api import *

__all__ = [
    "GenerationModel",
    "Run",
    "TesseraError",
    "answer_speaker",
    "chat",
    "compare",
    "convert",
    "demo",
    "download",
    "dry_run",
    "evaluate",
    "generate",
    "generate_answers",
    "load",
    "parity",
    "pipeline",
    "plan",
    "preflight",
    "push",
    "record",
    "report",
    "resume",
    "score",
    "speaker",
    "train",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("tessera.api"), name)
    raise AttributeError(f"module 'tessera' has no attribute {name!r}")
