"""The section `evaluation` of a recipe: benchmarks answered during training, and the metric of held-out samples."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tessera.config.reader import Section
from tessera.config.values import Count, StepsOrNone


class EvaluationSection(Section):
    tasks: list[str] = Field(
        default_factory=list,
        max_length=100,
        description="benchmarks: names (mmmu), names with variants (mmbench:cn) or paths of task files",
    )
    functions: list[str] = Field(
        default_factory=list,
        max_length=100,
        description="functions of your own that task files name as their metric, as they are written there: "
        "file.py:function; others are refused",
    )
    metric: str | None = Field(
        None,
        max_length=4096,
        description="how answers to held-out samples (data.eval) are scored: exact (the default), anls, ... or "
        "file.py:function",
    )
    every: StepsOrNone = Field(0, description="steps between evaluations; 0: only after the last step")
    data: Path | None = Field(None, description="file or folder of published data, in place of a download")
    max_samples: Count | None = Field(None, description="answer only the first questions of each benchmark")
    max_new_tokens: Count | None = Field(None, description="longest answer; default: as each benchmark sets it")
