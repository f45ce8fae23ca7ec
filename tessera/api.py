"""The Python face: the same verbs as the command line, with the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.core.run_config import load_config
from tessera.evaluate.answers import evaluate
from tessera.infer.ask import generate
from tessera.infer.load import load
from tessera.parallel.plan import Plan
from tessera.tools.compare import compare
from tessera.tools.convert import convert
from tessera.tools.dry_run import dry_run
from tessera.tools.preflight import preflight
from tessera.train.describe import describe
from tessera.train.report import write_report as report
from tessera.train.run import Run, resume, train

__all__ = [
    "Run",
    "compare",
    "convert",
    "dry_run",
    "evaluate",
    "generate",
    "load",
    "plan",
    "preflight",
    "report",
    "resume",
    "train",
]


def plan(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, world: int = 1) -> Plan:
    """How a recipe would be dealt out over `world` ranks. Starts nothing."""
    return describe(load_config(recipe, overrides), world).plan
