"""The section `evaluation` of a recipe: benchmarks that are answered while the model is trained."""

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
    every: StepsOrNone = Field(0, description="steps between evaluations; 0: only after the last step")
    data: Path | None = Field(None, description="file or folder of published data, in place of a download")
    max_samples: Count | None = Field(None, description="answer only the first questions of each benchmark")
    max_new_tokens: Count | None = Field(None, description="longest answer; default: as each benchmark sets it")
